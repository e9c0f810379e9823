"""Whether two formulas say the same, by sympy. Runs only inside the process of `judge`, which may be killed at any time.

Formulas come as LaTeX from a policy, so nothing here evaluates text as Python: the grammar of latex2sympy2_extended (the parser under
math-verify) builds an unevaluated tree, whose numbers are bounded before anything is computed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from sympy.core.function import AppliedUndef

from cispo_jax.rewards.math.compare import FLIPPED, terminates

MAX_DIGITS = 100_000.0  # of a number that is computed
PRECISION = 60  # digits of a numerical comparison ...
AGREEMENT = sympy.Float("1e-45")  # ... and how far two equal numbers may be apart, of the larger


class Unreadable(Exception):
    """This is no formula that the grammar knows, or one with numbers too large to compute."""


def values_equal(gold: str, answer: str, unit: str | None = None) -> bool:
    """Whether two expressions are equal.

    Args:
      unit: of the last place, if one of the two is a decimal that may be rounded (see the table in `cispo_jax.rewards.math`).
    """
    a, b = read(gold), read(answer)
    if unit is not None:
        return _rounded(a, b, sympy.Rational(unit))
    if a == b:
        return True
    if _is_collection(a) or _is_collection(b):
        return False
    return _same(a, b)


def relations_equal(gold: Sequence[str], answer: Sequence[str]) -> bool:
    """Whether two relations (left, operator, right) hold for the same values because one is a multiple of the other."""
    operator, other_operator = gold[1], answer[1]
    sides = [read(text) for text in (gold[0], gold[2], answer[0], answer[2])]
    if any(map(_is_collection, sides)):
        raise Unreadable("no numbers on both sides")
    a, b = sides[0] - sides[1], sides[2] - sides[3]
    if not a.free_symbols or a.free_symbols != b.free_symbols:
        return False
    ratio = _constant_ratio(a, b)
    if ratio is None:
        return False
    if operator in ("=", r"\ne"):
        return operator == other_operator
    return other_operator == (operator if ratio > 0 else FLIPPED[operator])


@functools.lru_cache(maxsize=4096)
def read(latex: str) -> Any:
    """The expression, computed as far as it goes."""
    try:
        tree = latex2sympy(_letters(latex), is_real=True, convert_degrees=False, normalization_config=None)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None
    if not isinstance(tree, sympy.Basic | sympy.MatrixBase) or isinstance(tree, sympy.core.relational.Relational):
        raise Unreadable(f"a {type(tree).__name__}")
    if _digits(tree) > MAX_DIGITS:
        raise Unreadable("numbers too large to compute")
    tree = _exact(tree)
    tree = tree.doit()
    if isinstance(tree, sympy.Basic) and not tree.has(sympy.Sum, sympy.Product):
        tree = tree.xreplace({sympy.Symbol("i", real=True): sympy.I})
        tree = tree.xreplace({f: sympy.Symbol(f"function {f}", real=True) for f in tree.atoms(AppliedUndef)})
    return tree


def _letters(latex: str) -> str:
    """Capital letters as letters of their own: the grammar reads X as x, and E and I as constants."""

    def rename(match: re.Match[str]) -> str:
        letter, below = match["letter"], (match["below"] or "").strip("_{}")
        return match[0] if letter is None else f"{letter.lower()}_{{7777{below}}}"

    pattern = r"\\mathbb\s*\{[A-Z]\}|\\[A-Za-z]+|(?P<letter>[A-Z])(?P<below>_(?:\{\w+\}|\w))?"
    return re.sub(pattern, rename, latex)


def _exact(tree: Any) -> Any:
    """Decimals as fractions."""
    if isinstance(tree, sympy.MatrixBase):
        return tree.applyfunc(_exact)
    return tree.xreplace({x: sympy.Rational(str(x)) for x in tree.atoms(sympy.Float)})


def _digits(tree: Any) -> float:
    """An upper bound on the decimal digits of the largest number that computing an expression could meet."""
    if isinstance(tree, sympy.Rational):
        return math.log10(max(abs(tree.p), tree.q))
    arguments = [_digits(x) for x in getattr(tree, "args", ()) if isinstance(x, sympy.Basic)]
    largest = max(arguments, default=1.0)
    if isinstance(tree, sympy.Pow):
        base, exponent = arguments
        own = base * _magnitude(exponent) if tree.base.is_number and tree.exp.is_number else largest
    elif isinstance(tree, sympy.exp):
        own = _magnitude(largest) if tree.args[0].is_number else largest
    elif isinstance(tree, sympy.factorial | sympy.factorial2 | sympy.gamma | sympy.binomial | sympy.subfactorial):
        own = _magnitude(largest) * largest if all(x.is_number for x in tree.args) else largest
    elif isinstance(tree, sympy.Mul):
        own = sum(arguments)
    else:
        own = largest + (1 if tree.args else 0)
    return max(own, largest)


def _magnitude(digits: float) -> float:
    return 10.0**digits if digits < 300 else math.inf


def _is_collection(x: Any) -> bool:
    return isinstance(x, sympy.Set | sympy.Tuple | sympy.MatrixBase) or not isinstance(x, sympy.Expr)


def _same(a: Any, b: Any) -> bool:
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if not symbols:
        return _same_number(a, b)
    if sympy.expand(a - b) == 0:
        return True
    seen = 0
    for point in _points(symbols):
        same = _same_at(a.subs(point), b.subs(point))
        if same is False:
            return False
        seen += same is True
        if seen == 4:
            return True
    return bool(sympy.simplify(a - b) == 0)


def _same_at(a: Any, b: Any) -> bool | None:
    """None: at least one of them is not defined there."""
    return None if _value(a) is None or _value(b) is None else _same_number(a, b)


def _same_number(a: Any, b: Any) -> bool:
    if a.is_Rational and b.is_Rational:
        return bool(a == b)
    x, y = _value(a), _value(b)
    if x is None or y is None:
        return bool(a == b)
    larger = max(abs(x), abs(y))
    if larger < AGREEMENT:  # an exact zero has no digits to compare
        return bool(sympy.simplify(a - b) == 0)
    return bool(abs(x - y) <= larger * AGREEMENT) and _vanishes(a - b)


def _vanishes(difference: Any) -> bool:
    """Whether a number that is small beside its terms is 0: 1,000 digits do not tell it from 0. e^{-200} is small, not 0."""
    if difference.has(sympy.factorial, sympy.gamma, sympy.binomial):  # of fractions they take seconds to so many digits
        return True
    parts = difference.evalf(15, maxn=1000).as_real_imag()
    return all(part.is_zero or (part.is_Float and part._prec == 1) for part in parts)


def _value(x: Any) -> Any:
    """A finite number to `PRECISION` digits, complex perhaps; None where there is none."""
    if not x.is_number or x.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return None
    value = x.evalf(PRECISION)
    return value if all(part.is_Float or part.is_Rational for part in value.as_real_imag()) else None


def _rounded(a: Any, b: Any, unit: Any) -> bool:
    """One is a decimal, the other a number that no decimal equals: they differ by less than one in the last place."""
    if a.free_symbols or b.free_symbols or _is_collection(a) or _is_collection(b):
        return False
    if all(_terminates(x) for x in (a, b)):
        return _same_number(a, b)
    difference = _value(a - b)
    return bool(difference is not None and difference.is_real and abs(difference) < unit)


def _terminates(x: Any) -> bool:
    return bool(x.is_Rational) and terminates(Fraction(x.p, x.q))


def _constant_ratio(a: Any, b: Any) -> Any:
    """The number that a / b is everywhere, or None."""
    ratio = None
    seen = 0
    for point in _points(sorted(a.free_symbols, key=str)):
        x, y = _value(a.subs(point)), _value(b.subs(point))
        if x is None or y is None or not (x.is_real and y.is_real) or abs(x) < AGREEMENT or abs(y) < AGREEMENT:
            continue
        here = x / y
        if ratio is not None and abs(here - ratio) > abs(ratio) * AGREEMENT:
            return None
        ratio, seen = here, seen + 1
        if seen == 4:
            return ratio
    return None


def _points(symbols: Sequence[Any]) -> Iterator[dict[Any, Any]]:
    """Values for the symbols: fractions of both signs, then whole numbers, for what is only defined there."""
    for k in range(8):
        yield {s: sympy.Rational((-1) ** (k + j) * (137 + 41 * k + 59 * j), 100 + 7 * j) for j, s in enumerate(symbols)}
    for k in range(6):
        yield {s: sympy.Integer(2 + k + 3 * j) for j, s in enumerate(symbols)}
