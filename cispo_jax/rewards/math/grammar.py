r"""The structure of an answer: numbers, lists, tuples, intervals, sets, matrices, relations, quantities, words; the rest is an expression.

Only structure is read here, in time linear in the text for a bounded depth. Whether two expressions are equal is `symbolic`'s to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from cispo_jax.rewards.math.normal import (
    MATRIX_CLOSE,
    MATRIX_OPEN,
    NEW_ROW,
    SET_CLOSE,
    SET_OPEN,
    SPOKEN,
    WORDS_CLOSE,
    WORDS_OPEN,
    normalise,
)

MAX_DEPTH = 12
MAX_ITEMS = 64
MAX_NUMBER = 4_000  # characters: Python refuses to read longer integers

_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]*)\s*(?P<digits>{_PLAIN})"
    r"(?:[eE](?P<e>[-+]?\d{1,3})|\s*(?:\\times|\\cdot|x)\s*10\s*\^\s*\{\s*(?P<ten>[-+]?\d{1,3})\s*\})?"
)
_FRACTION = re.compile(
    rf"(?P<sign>[-+]*)\s*(?P<whole>\d+\s*(?=\\frac)|\d+\s+(?=\d+\s*/))?"
    rf"(?:\\frac\s*\{{\s*(?P<a>-?(?:{_PLAIN}))\s*\}}\s*\{{\s*(?P<b>-?(?:{_PLAIN}))\s*\}}|(?P<c>{_PLAIN})\s*/\s*(?P<d>{_PLAIN}))"
)
_REPEATING = re.compile(
    r"(?P<sign>[-+]*)\s*(?P<whole>\d*)\.(?P<fixed>\d*)\\(?:overline|bar|dot)\s*\{?\s*(?P<again>\d+)\s*\}?"
)
_RELATION = re.compile(r"\\(?:le|ge|ne|in|equiv|approx)(?![A-Za-z])|[=<>]")
_NAME = re.compile(
    r"\\?[A-Za-z]+'*(?:_(?:\{[\w, ]+\}|\w))?(?:\s*\(\s*[A-Za-z0-9](?:\s*,\s*[A-Za-z0-9])*\s*\))?|\(\s*[A-Za-z]\s*(?:,\s*[A-Za-z]\s*)+\)"
)
_UNIT = re.compile(
    rf"(?P<value>[^{WORDS_OPEN}]*?[\d)}}|A-Za-z])\s*(?P<unit>{WORDS_OPEN}[^{WORDS_CLOSE}]*{WORDS_CLOSE}"
    r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)?|%)"
)
_WORDS_UNIT = re.compile(
    rf"(?P<value>[-+]?(?:{_PLAIN}))\s*(?P<unit>[A-Za-z]{{2,}}(?:[ /][A-Za-z]+)*(?:\s*\^\s*\{{\d\}})?)"
)
_COLON = re.compile(r"\d{1,9}(?:\s*:\s*\d{1,9})+")
_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}(?![A-Za-z])")
_OPEN, _CLOSE = f"([{{{SET_OPEN}{MATRIX_OPEN}", f")]}}{SET_CLOSE}{MATRIX_CLOSE}"
_JOINED = re.compile(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|&")
# Of two or three letters, words and units rather than products of variables.
SHORT = frozenset(
    "the of is in on at to an be by do go he if it me my no so up us we am are was has had but for not all any can her him his how its "
    "let may new now old one our out see she too two use way who you yes six ten red cm mm km kg mg ml lb oz ft hr sec mph deg sq".split()
)


@dataclass(frozen=True)
class Number:
    """An exact number; `unit` is that of the last place of a decimal that may have been rounded, otherwise 0."""

    value: Fraction
    source: str
    unit: Fraction = Fraction(0)


@dataclass(frozen=True)
class Expression:
    latex: str


@dataclass(frozen=True)
class Words:
    text: str


@dataclass(frozen=True)
class Quantity:
    value: Node
    unit: str


@dataclass(frozen=True)
class Collection:
    """`kind`: list (bare, in any order) | set | tuple (also intervals: `ends` are its brackets) | union | matrix | row | colon."""

    kind: str
    items: tuple[Node, ...]
    ends: str = ""


@dataclass(frozen=True)
class Relation:
    sides: tuple[Node, ...]
    texts: tuple[str, ...]
    operators: tuple[str, ...]


Node = Number | Expression | Words | Quantity | Collection | Relation


class TooComplex(ValueError):
    """Nested or listed beyond what an answer can be."""


def parse(text: str) -> Node | None:
    """The structure of an answer, None if there is nothing."""
    return _parse(normalise(text), 0)


def parse_list(number: Number) -> Node | None:
    """A number with commas once more, its commas as separators."""
    parts = number.source.split(",")
    return Collection("list", tuple(_required(part, 0) for part in parts)) if len(parts) > 1 else None


def prose(text: str) -> re.Match[str] | None:
    """The first word of a text that is no mathematics: `abc` may be a product, `the` and `even` are not."""
    words = ((match, match[0].lower()) for match in _PROSE.finditer(text))
    return next((match for match, word in words if word not in SPOKEN and (len(word) > 3 or word in SHORT)), None)


def _parse(text: str, depth: int) -> Node | None:
    text = _unwrapped(text.strip())
    if depth > MAX_DEPTH:
        raise TooComplex("nested too deep")
    if not text.strip(" .,;"):
        return None
    number = _number(text)
    if number is not None:
        return number
    words = _as_words(text)
    if words is not None:
        return words
    if _COLON.fullmatch(text):
        return Collection("colon", tuple(_required(part, depth) for part in text.split(":")))
    if text[0] == MATRIX_OPEN and _closes_at_end(text):
        return _matrix(text[1:-1], depth)
    items = [text] if _WORDS_UNIT.fullmatch(text) else _split_list(text)  # 1,000 people
    if len(items) > 1:
        return _list([_required(item, depth + 1) for item in items if item.strip()])
    relation = _relation(text, depth)
    if relation is not None:
        return relation
    union = _split(text, re.compile(r"\\cup(?![A-Za-z])"))
    if len(union) > 1:
        return Collection("union", tuple(_required(item, depth + 1) for item in union))
    bracketed = _bracketed(text, depth)
    if bracketed is not None:
        return bracketed
    if r"\pm" in text or r"\mp" in text:
        return _both_signs(text, depth)
    quantity = _UNIT.fullmatch(text) or _WORDS_UNIT.fullmatch(text)
    if quantity:
        unit = re.sub(rf"[\s{{}}{WORDS_OPEN}{WORDS_CLOSE}.]", "", quantity["unit"]).lower()
        value = _required(quantity["value"], depth + 1)
        return value if unit in ("degrees", "degree", "dollars", "usd") else Quantity(value, _unit_name(unit))
    plain = text.replace(WORDS_OPEN, " ").replace(WORDS_CLOSE, " ")
    if plain != text or prose(text):
        return Words(_folded(plain))
    return Expression(text)


def _required(text: str, depth: int) -> Node:
    node = _parse(text, depth)
    return Words("") if node is None else node


def _number(text: str) -> Number | None:
    if len(text) > MAX_NUMBER:
        return None
    match = _NUMBER.fullmatch(text)
    if match:
        digits = match["digits"].replace(",", "")
        exponent = int(match["e"] or match["ten"] or 0)
        scale = Fraction(10) ** exponent
        whole, point, rest = digits.partition(".")
        value = Fraction(int((whole + rest) or "0"), 10 ** len(rest)) * scale
        significant = len((whole + rest).lstrip("0"))
        long = bool(point) and len(rest) >= 6 and significant >= 6
        return Number(_sign(match) * value, text, Fraction(1, 10 ** len(rest)) * scale if long else Fraction(0))
    match = _FRACTION.fullmatch(text)
    if match:
        above, below = (_plain(match[x] or match[y]) for x, y in (("a", "c"), ("b", "d")))
        if below == 0:
            return None
        return Number(_sign(match) * (int(match["whole"] or 0) + above / below), "")
    match = _REPEATING.fullmatch(text)
    if match:
        fixed, again = match["fixed"], match["again"]
        value = Fraction(int(match["whole"] or 0)) + Fraction(int(fixed or 0), 10 ** len(fixed))
        value += Fraction(int(again), 10 ** len(fixed) * (10 ** len(again) - 1))
        return Number(_sign(match) * value, "")
    return None


def _plain(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def _sign(match: re.Match[str]) -> int:
    return -1 if match["sign"].count("-") % 2 else 1


def _as_words(text: str) -> Words | None:
    """Words alone, in `\\text` or bare."""
    plain = text.replace(WORDS_OPEN, " ").replace(WORDS_CLOSE, " ")
    if re.fullmatch(r"[A-Za-z' \"().,;:!?-]+", plain) and prose(plain):
        inside = re.sub(rf"{WORDS_OPEN}[^{WORDS_CLOSE}]*{WORDS_CLOSE}", "", text)
        # "19, cm and x" is a list with words in it; "Monday" and "a square, not a circle" are words.
        if not inside.strip(" .,;") or not re.search(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])\s*,", inside):
            return Words(_folded(plain))
    return None


def _folded(text: str) -> str:
    return " ".join(text.strip(" .\"'").split()).casefold()


def _unit_name(unit: str) -> str:
    return "%" if unit in ("percent", "\\%") else unit.rstrip("s") if len(unit) > 3 else unit


def _list(items: list[Node]) -> Node | None:
    if len(items) > MAX_ITEMS:
        raise TooComplex("too many items")
    flat: list[Node] = []
    for item in items:
        flat += item.items if isinstance(item, Collection) and item.kind == "list" else [item]
    return flat[0] if len(flat) == 1 else Collection("list", tuple(flat)) if flat else None


def _split_list(text: str) -> list[str]:
    """Items of a bare list: a comma between groups of three digits is a part of the number."""
    pieces = [piece for part in _split(text, _JOINED) for piece in _split(part, re.compile(r"[,;]\s+|;|,(?!\s)"))]
    joined: list[str] = []
    for piece in pieces:  # 1,234 came apart: together again if the whole is one number
        previous = joined[-1] if joined else ""
        in_groups = re.search(r"(?<![\d.])\d{1,3}(?:,\d{3})*$", previous) and re.fullmatch(r"\d{3}(?:\.\d+)?", piece)
        if in_groups and f"{previous},{piece}" in text:
            joined[-1] = f"{previous},{piece}"
        else:
            joined.append(piece)
    return joined


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """The parts between separators outside brackets."""
    if not separator.search(text):
        return [text]
    parts, start = [], 0
    for at in _outside(text, separator):
        parts.append(text[start : at.start()])
        start = at.end()
    return [*parts, text[start:]]


def _outside(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    level = [0]
    for character in text:
        level.append(level[-1] + (character in _OPEN) - (character in _CLOSE))
    words = 0
    inside_words = []
    for character in text:
        words += (character == WORDS_OPEN) - (character == WORDS_CLOSE)
        inside_words.append(words > 0)
    return [m for m in pattern.finditer(text) if level[m.start()] <= 0 and not inside_words[m.start()]]


def _relation(text: str, depth: int) -> Relation | None:
    found = _outside(text, _RELATION)
    if not found:
        return None
    texts, start = [], 0
    for match in found:
        texts.append(text[start : match.start()].strip())
        start = match.end()
    texts.append(text[start:].strip())
    if len(texts) > 8 or not texts[-1]:
        raise TooComplex("a chain of relations, or one without its end")
    sides = tuple(_required(side, depth + 1) for side in texts)
    return Relation(sides, tuple(texts), tuple(match[0] for match in found))


def is_name(relation: Relation) -> bool:
    """Whether the left side only names what the right side is: x, f(x), (x, y), Area; `x = ` and `x \\in `."""
    named = isinstance(relation.sides[0], Words) or _NAME.fullmatch(relation.texts[0]) is not None
    return named and all(operator in ("=", r"\in") for operator in relation.operators)


def _bracketed(text: str, depth: int) -> Node | None:
    opening, closing = text[0], text[-1]
    if len(text) < 2 or opening not in f"([{SET_OPEN}" or closing not in f")]{SET_CLOSE}" or not _closes_at_end(text):
        return None
    inner = text[1:-1]
    parts = _split(inner, re.compile(r"[,;]"))
    if opening == SET_OPEN and closing == SET_CLOSE:
        items = [_required(part, depth + 1) for part in parts if part.strip()]
        listed = _list(items) if items else None
        members = listed.items if isinstance(listed, Collection) and listed.kind == "list" else tuple(items)
        return Collection("set", members)
    if len(parts) == 1:
        return _parse(inner, depth + 1) if (opening, closing) == ("(", ")") else None
    if len(parts) > MAX_ITEMS:
        raise TooComplex("too many items")
    return Collection("tuple", tuple(_required(part, depth + 1) for part in parts), opening + closing)


def _closes_at_end(text: str) -> bool:
    level = 0
    for index, character in enumerate(text):
        level += (character in _OPEN) - (character in _CLOSE)
        if level == 0:
            return index == len(text) - 1
    return False


def _unwrapped(text: str) -> str:
    while len(text) > 1 and text[0] == "{" and text[-1] == "}" and _closes_at_end(text):
        text = text[1:-1].strip()
    return text


def _both_signs(text: str, depth: int) -> Node:
    if text.count(r"\pm") + text.count(r"\mp") > 3:
        raise TooComplex("too many signs")
    if text.count(r"\pm") > 1 and r"\mp" not in text:  # independent signs
        texts = [text]
        while r"\pm" in texts[0]:
            texts = [t.replace(r"\pm", sign, 1) for t in texts for sign in ("+", "-")]
    else:
        texts = [text.replace(r"\pm", a).replace(r"\mp", b) for a, b in (("+", "-"), ("-", "+"))]
    node = _list([_required(_bare_plus(t), depth + 1) for t in texts])
    assert node is not None
    return node


def _bare_plus(text: str) -> str:
    text = text.strip()
    return text[1:].strip() if text.startswith("+") else text


def _matrix(inner: str, depth: int) -> Node:
    rows = [row for row in _split(inner, re.compile(NEW_ROW)) if row.strip()]
    if len(rows) > MAX_ITEMS:
        raise TooComplex("too many rows")
    return Collection(
        "matrix",
        tuple(
            Collection("row", tuple(_required(cell, depth + 1) for cell in _split(row, re.compile("&"))))
            for row in rows
        ),
    )
