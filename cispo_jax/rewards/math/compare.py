"""Whether two structures say the same, piece by piece; what needs algebra is asked of `ask` (see `judge`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from cispo_jax.rewards.math.grammar import (
    Collection,
    Expression,
    Node,
    Number,
    Quantity,
    Relation,
    Words,
    is_name,
    parse_list,
)
from cispo_jax.rewards.math.normal import with_matrices

# Name of a function of `symbolic`, its arguments -> True, False, None (cannot be read).
Ask = Callable[[str, list[Any]], Any]
FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}


def readable(node: Node | None, ask: Ask) -> bool:
    """Whether a reference answer can be judged: every expression in it is one."""
    match node:
        case None:
            return False
        case Words(text):
            return 0 < len(text.split()) <= 4
        case Expression(latex):
            return ask("read", [with_matrices(latex)]) is True
        case Quantity(value, _):
            return readable(value, ask)
        case Collection(_, items):
            return all(readable(item, ask) for item in items)
        case Relation(sides, _, operators):
            known = all(operator in FLIPPED or operator == r"\in" for operator in operators)
            return known and all(readable(side, ask) for side in (sides[1:] if is_name(node) else sides))
        case _:
            return True


def equal(gold: Node, answer: Node, ask: Ask) -> bool:
    """Whether an answer equals the reference by the table of `cispo_jax.rewards.math`; the reference's form decides what is accepted."""
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _relations(gold, answer, ask)
    if isinstance(gold, Quantity) or isinstance(answer, Quantity):
        return _quantities(gold, answer, ask)
    if isinstance(gold, Collection) or isinstance(answer, Collection):
        return _collections(gold, answer, ask)
    if isinstance(gold, Words) or isinstance(answer, Words):
        return gold == answer
    return _scalars(gold, answer, ask)


def _scalars(gold: Node, answer: Node, ask: Ask) -> bool:
    if isinstance(gold, Number) and isinstance(answer, Number):
        if gold.value == answer.value:
            return True
        unit = max(gold.unit, answer.unit)
        if not unit or (terminates(gold.value) and terminates(answer.value)):
            return False
        return abs(gold.value - answer.value) < unit
    if _latex(gold).replace(" ", "") == _latex(answer).replace(" ", ""):
        return True
    unit = max((x.unit for x in (gold, answer) if isinstance(x, Number)), default=Fraction(0))
    return ask("values_equal", [_latex(gold), _latex(answer), str(unit) if unit else None]) is True


def _latex(node: Node) -> str:
    if isinstance(node, Number):
        value = node.value
        return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    assert isinstance(node, Expression)
    return with_matrices(node.latex)


def terminates(value: Fraction) -> bool:
    """Whether a decimal equals it."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _quantities(gold: Node, answer: Node, ask: Ask) -> bool:
    a, b = (x if isinstance(x, Quantity) else Quantity(x, "") for x in (gold, answer))
    if a.unit and b.unit and a.unit != b.unit:
        return False
    if equal(a.value, b.value, ask):
        return True
    if "%" in (a.unit, b.unit) and a.unit != b.unit:  # 28% is 28 and 0.28
        hundredth = lambda x: (
            Expression(rf"\frac{{{_latex(x)}}}{{100}}") if isinstance(x, Expression) else _hundredth(x)
        )
        a_value, b_value = (hundredth(x.value) if x.unit == "%" else x.value for x in (a, b))
        return a_value is not None and b_value is not None and equal(a_value, b_value, ask)
    return False


def _hundredth(node: Node) -> Node | None:
    return Number(node.value / 100, "", node.unit / 100) if isinstance(node, Number) else None


def _collections(gold: Node, answer: Node, ask: Ask) -> bool:
    gold, answer = _as_list(gold, answer), _as_list(answer, gold)
    if not isinstance(gold, Collection) or not isinstance(answer, Collection):
        whole, single = (gold, answer) if isinstance(gold, Collection) else (answer, gold)
        alone = isinstance(whole, Collection) and whole.kind in ("set", "list") and len(whole.items) == 1
        if not alone:
            return False
        assert isinstance(whole, Collection)
        return equal(*((whole.items[0], single) if whole is gold else (single, whole.items[0])), ask)
    kinds = {gold.kind, answer.kind}
    if kinds == {"list", "tuple"}:
        ends = gold.ends + answer.ends
        return ends == "()" and _in_order(gold.items, answer.items, ask)
    if kinds <= {"list", "set"}:
        if "set" in kinds:
            return _each_in(gold.items, answer.items, ask) and _each_in(answer.items, gold.items, ask, swap=True)
        return _in_any_order(gold.items, answer.items, ask)
    if len(kinds) > 1 or gold.ends != answer.ends:
        return False
    ordered = gold.kind != "union"
    return (_in_order if ordered else _in_any_order)(gold.items, answer.items, ask)


def _as_list(node: Node, other: Node) -> Node:
    if isinstance(node, Number) and isinstance(other, Collection) and len(other.items) > 1:
        return parse_list(node) or node
    return node


def _in_order(gold: Sequence[Node], answer: Sequence[Node], ask: Ask) -> bool:
    return len(gold) == len(answer) and all(equal(a, b, ask) for a, b in zip(gold, answer, strict=True))


def _in_any_order(gold: Sequence[Node], answer: Sequence[Node], ask: Ask) -> bool:
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for a in gold:
        found = next((b for b in left if equal(a, b, ask)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _each_in(members: Sequence[Node], others: Sequence[Node], ask: Ask, swap: bool = False) -> bool:
    return all(any(equal(*((b, a) if swap else (a, b)), ask) for b in others) for a in members)


def _relations(gold: Node, answer: Node, ask: Ask) -> bool:
    if not isinstance(answer, Relation):
        assert isinstance(gold, Relation)
        if is_name(gold):
            return equal(gold.sides[-1], answer, ask)
        interval = _interval(gold)
        return interval is not None and equal(interval, answer, ask)
    if not isinstance(gold, Relation):
        if is_name(answer):
            return equal(gold, answer.sides[-1], ask)
        # 2 + 3 = 5 is 5 if it is true.
        if set(answer.operators) != {"="}:
            return False
        return equal(gold, answer.sides[-1], ask) and all(
            equal(answer.sides[-1], side, ask) for side in answer.sides[:-1]
        )
    if is_name(gold) and is_name(answer):
        same_name = isinstance(gold.sides[0], Words) or isinstance(answer.sides[0], Words)
        same_name = same_name or _bare(gold.texts[0]) == _bare(answer.texts[0])
        if same_name and equal(gold.sides[-1], answer.sides[-1], ask):
            return True
    pairs = [_binary(relation) for relation in (gold, answer)]
    if len(pairs[0]) != len(pairs[1]):
        return False
    left = pairs[1]
    for a in pairs[0]:
        found = next((b for b in left if _same_relation(a, b, ask)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _bare(text: str) -> str:
    return re.sub(r"[\s{}]", "", text)


def _binary(relation: Relation) -> list[tuple[str, str, str]]:
    return [(relation.texts[i], operator, relation.texts[i + 1]) for i, operator in enumerate(relation.operators)]


def _same_relation(gold: tuple[str, str, str], answer: tuple[str, str, str], ask: Ask) -> bool:
    if gold[1] not in FLIPPED or answer[1] not in (gold[1], FLIPPED[gold[1]]):
        return False
    if [_bare(x) for x in gold] == [_bare(x) for x in answer]:
        return True
    return ask("relations_equal", [[with_matrices(x) for x in relation] for relation in (gold, answer)]) is True


def _interval(relation: Relation) -> Node | None:
    """`0 < x <= 5` and `x > 3` as the interval of their variable."""
    operators, sides = relation.operators, relation.sides
    name = lambda node: isinstance(node, Expression) and re.fullmatch(r"\\?[A-Za-z]+", node.latex) is not None
    low: Node = Expression(r"-\infty")
    high: Node = Expression(r"\infty")
    ends = "()"
    if len(operators) == 2 and name(sides[1]):
        if all(x in ("<", r"\le") for x in operators):
            low, high = sides[0], sides[2]
        elif all(x in (">", r"\ge") for x in operators):
            low, high, operators = sides[2], sides[0], operators[::-1]
        else:
            return None
        ends = ("(" if operators[0] in "<>" else "[") + (")" if operators[1] in "<>" else "]")
        return Collection("tuple", (low, high), ends)
    if len(operators) != 1 or operators[0] not in ("<", ">", r"\le", r"\ge"):
        return None
    operator, value = operators[0], sides[1]
    if not name(sides[0]):
        if not name(sides[1]):
            return None
        operator, value = FLIPPED[operator], sides[0]
    closed = operator in (r"\le", r"\ge")
    if operator in (">", r"\ge"):
        return Collection("tuple", (value, high), ("[" if closed else "(") + ")")
    return Collection("tuple", (low, value), "(" + ("]" if closed else ")"))
