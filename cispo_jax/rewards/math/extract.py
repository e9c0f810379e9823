r"""Where the answer is in what a model wrote.

1. Reasoning between `<think>` (`<thinking>`, `<reasoning>`, `<thought>`) and its end does not count; what never ends it answers nothing.
   An end without a beginning is fine: the prompt may have opened it.
2. The last mark in the rest counts: `\boxed{...}` (`\fbox`), braces balanced; `<answer>...</answer>`; `Answer:`, `Final answer:`,
   `the answer is`; `####`. Boxes with nothing but separators between them are one list. A box that is never closed answers nothing.
3. Without a mark: the last line if it is mathematics, else the last formula between dollars, pair in brackets or number.
"""

from __future__ import annotations

import re

from cispo_jax.rewards.math.grammar import prose
from cispo_jax.rewards.math.normal import canonical, normalise

_HEDGES = {"either", "maybe", "perhaps", "possibly", "probably", "alternatively", "otherwise", "else", "not"}
MAX_BOXES = 32  # next to each other
TAIL = 4_000  # characters in which an answer without a mark is looked for, and of a line after one
_REASONING = ("think", "thinking", "reasoning", "thought")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_MARKER = re.compile(r"\b(?:final\s+)?answer(?:\s+is)?[\s*]*:|\banswer\s+is(?![A-Za-z])|####", re.IGNORECASE)
_ANSWER_LINE = re.compile(r"\banswer[\s*]*:[\s*]*([^\n]*)", re.IGNORECASE)
_BETWEEN = re.compile(r"(?:[\s,;.$&]|\\[()\[\],; ]|\\(?:text|mathrm)\s*\{\s*(?:and|or)\s*\}|\\quad|\\qquad|and|or)*")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BRACKETS = re.compile(r"[(\[][^()\[\]\n]{1,200},[^()\[\]\n]{1,200}[)\]]")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?![\d,]\d)|\d+)(?:\.\d+)?|\.\d+"
_LAST_NUMBER = re.compile(rf"(?<![\w.])[-\u2212]?\\?\$?(?:(?:{_DIGITS})(?:\s*/\s*\d+)?)\s*\\?%?(?: ?[a-z]+(?:\^?\d)?)?")


def after_reasoning(response: str) -> str | None:
    """What follows the reasoning, None if that was never closed."""
    lowered = response.lower()
    start = 0
    for tag in _REASONING:
        closed, opened = lowered.rfind(f"</{tag}>"), lowered.rfind(f"<{tag}>")
        if opened > closed:
            return None
        if closed >= 0:
            start = max(start, closed + len(tag) + 3)
    return response[start:]


def final_answer(response: str) -> str | None:
    """The text of the answer by the rule above, None if there is none."""
    text = after_reasoning(response)
    if text is None:
        return None
    boxes = list(_BOX.finditer(text))
    markers = list(_MARKER.finditer(text))
    tag_end = text.lower().rfind("</answer>")
    last_tag = text.lower().rfind("<answer>", 0, tag_end) if tag_end >= 0 else -1
    last_box, last_marker = (found[-1].start() if found else -1 for found in (boxes, markers))
    if last_box > max(last_marker, last_tag):
        return _boxed(text, boxes)
    if last_tag > last_marker:
        return _opened(text[last_tag + len("<answer>") : tag_end])
    if last_marker >= 0:
        return _after_marker(text[markers[-1].end() :])
    return _unmarked(text)


def gold_answer(gold: str) -> str:
    """The reference itself, out of its box if it comes in one."""
    boxes = list(_BOX.finditer(gold))
    inside = _boxed(gold, boxes) if boxes else None
    return gold if inside is None else inside


def answer_line(response: str) -> str | None:
    """What follows the last `Answer:` on its line (the format that DAPO's prompt asks for), None without one."""
    text = after_reasoning(response)
    found = list(_ANSWER_LINE.finditer(text)) if text is not None else []
    line = _opened(found[-1][1]) if found else None
    return line if line and line.strip(" .*$") else None


def _opened(text: str) -> str | None:
    boxes = list(_BOX.finditer(text))
    return _boxed(text, boxes) if boxes else text


def _boxed(text: str, boxes: list[re.Match[str]]) -> str | None:
    """The content of the last box, with those that stand next to it."""
    contents: list[str] = []
    start = None
    for box in reversed(boxes[-MAX_BOXES:]):
        content, end = _content(text, box.end())
        if content is None:
            return ", ".join(contents) if contents else None
        if start is not None and (end > start or not _BETWEEN.fullmatch(text, end, start)):
            if end <= start:
                break
            continue  # a box around the box
        inner = list(_BOX.finditer(content))
        opened = _boxed(content, inner) if inner else content
        if opened is not None and canonical(opened) not in map(canonical, contents):
            contents.insert(0, opened)
        start = box.start()
    return ", ".join(contents) if any(c.strip() for c in contents) else None


def _content(text: str, start: int) -> tuple[str | None, int]:
    if start >= len(text):
        return None, start
    if text[start] != "{":
        match = re.compile(r"[^\s$\\]+").match(text, start)
        return (match[0], match.end()) if match else (None, start)
    depth, index = 0, start
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start + 1 : index], index + 1
        index += 1
    return None, start


def _after_marker(rest: str) -> str | None:
    rest = rest[: 2 * TAIL].lstrip(" \t\r\n*:=")
    if rest.startswith((r"\[", "$$")):
        closing = r"\]" if rest.startswith(r"\[") else "$$"
        inside, found, _ = rest[2:].partition(closing)
        if found:
            return inside
    line = rest[:TAIL].split("\n")[0].strip()
    return _mathematics(line) or _last(line) or line or None


def _unmarked(text: str) -> str | None:
    text = text.strip()[-TAIL:]
    if not text:
        return None
    line = text.split("\n")[-1].strip()
    if not prose(normalise(line)):
        return line
    return _last(text) or line


def _mathematics(line: str) -> str | None:
    """As much of a line as is mathematics: up to its first word, or the end of its first sentence."""
    formula = _FORMULA.match(line)
    if formula:
        after = line[formula.end() :].lstrip()
        if not re.match(r",|and\b|or\b", after):
            return next(group for group in formula.groups() if group is not None)
    line = re.split(r"(?<=[\w)}\]*$])\.\s+(?=\S)", line)[0]
    word = prose(
        re.sub(r"\\(?:text|mathrm|mbox|textbf|begin|end|operatorname)\s*\{[^{}]*\}", lambda m: " " * len(m[0]), line)
    )
    if word is None or re.fullmatch(r"[A-Za-z' -]+", line.strip(" .*")):
        return line
    head = line[: word.start()].strip(" ,;:(*")
    if word[0].lower() in _HEDGES or re.search(r"(?<![A-Za-z])or$", head):
        return line  # `5 or maybe 6`: no answer
    head = re.sub(r"(?<![A-Za-z])and$", "", head).strip()
    if not head or head.endswith(("=", "+", "-", "/", "<", ">")):
        return None
    is_unit = re.fullmatch(r"[-+\d.,\s]+", head) and word[0].islower()  # 72 clips, and what follows a number otherwise
    return f"{head} {word[0]}" if is_unit else head


def _last(text: str) -> str | None:
    """The last formula, pair in brackets or number, whichever comes later."""
    formulas, numbers = list(_FORMULA.finditer(text)), list(_LAST_NUMBER.finditer(text))
    formula = formulas[-1] if formulas else None
    number = numbers[-1] if numbers else None
    if formula is not None and (number is None or number.start() < formula.end()):
        return next(group for group in formula.groups() if group is not None)
    brackets = list(_BRACKETS.finditer(text))
    if brackets and number is not None and number.start() < brackets[-1].end():
        return brackets[-1][0]
    return number[0] if number is not None else None
