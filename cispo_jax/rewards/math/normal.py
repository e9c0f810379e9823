r"""One way to write what people write in many: LaTeX, Unicode and plain text as the same string, in linear time.

What comes out has `\frac{1}{2}` with braces, no `\left`, no spacing, no `$`; words that stood in `\text{...}` stand between WORDS_OPEN
and WORDS_CLOSE, braces of a set are SET_OPEN and SET_CLOSE, matrices (whatever their
brackets) stand between MATRIX_OPEN and MATRIX_CLOSE, with NEW_ROW between rows.
"""

from __future__ import annotations

import re

WORDS_OPEN, WORDS_CLOSE, SET_OPEN, SET_CLOSE = "\ue000", "\ue001", "\ue002", "\ue003"
MATRIX_OPEN, NEW_ROW, MATRIX_CLOSE = "\ue004", "\ue005", "\ue006"
FUNCTIONS = "arcsin arccos arctan arccot sinh cosh tanh sin cos tan cot sec csc ln log lcm gcd max min det".split()
# Words that are mathematics, not prose.
SPOKEN = {"pi", "sqrt", "exp", "infinity", "inf", "oo", "theta", "alpha", "beta", "and", "or", *FUNCTIONS}

_UNICODE = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u2012": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": "/",
        "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b1": r"\pm ",
        "\u222a": r"\cup ", "\u2208": r"\in ", "\u00b0": "", "\u03b8": r"\theta ", "\u03b1": r"\alpha ", "\u03b2": r"\beta ",
        "\u00b2": "^{2}", "\u00b3": "^{3}", "\u00bd": r"\frac{1}{2}", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2032": "'",
        "\u27e8": "(", "\u27e9": ")", "\u201c": '"', "\u201d": '"', "\u2019": "'", "\u20ac": "", "\u00a3": "", "\u211d": r"\mathbb{R}",
        WORDS_OPEN: None, WORDS_CLOSE: None, SET_OPEN: None, SET_CLOSE: None,
        MATRIX_OPEN: None, NEW_ROW: None, MATRIX_CLOSE: None,
    }
)  # fmt: skip
_WORDS = re.compile(
    r"\\(?:text|mbox|hbox|textrm|textnormal|textbf|textit|textsf|texttt|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|operatorname\*?|rm|bf)"
    r"(?![A-Za-z])\s*\{([^{}]*)\}"
)
_SILENT = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|bigg|Bigg|displaystyle|textstyle|scriptstyle|limits|nolimits|mathstrut"
    r"|quad|qquad|hfill|dots(?=\s*$)|$)(?![A-Za-z])"
)
_SAME = [
    (re.compile(r"\\begin\s*\{(?:[pbB]?matrix|array)\}(?:\s*\{[lcr| ]*\})?"), MATRIX_OPEN),
    (re.compile(r"\\end\s*\{(?:[pbB]?matrix|array)\}"), MATRIX_CLOSE),
    (re.compile(r"\\cr(?![A-Za-z])"), NEW_ROW),
    (re.compile(r"\\hline(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:leqslant|leq)(?![A-Za-z])"), r"\\le "),
    (re.compile(r"\\(?:geqslant|geq)(?![A-Za-z])"), r"\\ge "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"\\(?:langle|lparen)(?![A-Za-z])"), "("),
    (re.compile(r"\\(?:rangle|rparen)(?![A-Za-z])"), ")"),
    (re.compile(r"\\(?:lbrack)(?![A-Za-z])"), "["),
    (re.compile(r"\\(?:rbrack)(?![A-Za-z])"), "]"),
    (re.compile(r"\\(?:\{|lbrace(?![A-Za-z]))"), SET_OPEN),
    (re.compile(r"\\(?:\}|rbrace(?![A-Za-z]))"), SET_CLOSE),
    (re.compile(r"\\(?:lvert|rvert|mid|vert)(?![A-Za-z])"), "|"),
    (re.compile(r"\\(?:varnothing|emptyset)(?![A-Za-z])"), SET_OPEN + SET_CLOSE),
    (re.compile(r"\\(?:colon)(?![A-Za-z])"), ":"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:iff|Longrightarrow|Rightarrow|implies|approx|rightarrow|to)(?![A-Za-z])"), r" \g<0> "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\\$|\$|\\[()\[\]]"), " "),
    (re.compile(r"(?<=\d)(?:\{,\}|\\[,!; ]|\\thinspace )(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<=\d),\s*\\!\s*(?=\d{3})"), ","),
    (re.compile(r"\\[,;:! ]|~|\\(?:thinspace|medspace|enspace)(?![A-Za-z])"), " "),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"!="), r"\\ne "),
    (re.compile(r"\+/-|\+-"), r"\\pm "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\*"), r"\\cdot "),
    (re.compile(r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"(?<![A-Za-z\\])(pi|theta|alpha|beta)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(rf"(?<![A-Za-z\\])({'|'.join(FUNCTIONS)})(?=\s*[(\d^_]|\s+[a-z\\])"), r"\\\1 "),
    (re.compile(r"\\frac(?![A-Za-z])\s*([A-Za-z\d])\s*([A-Za-z\d])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*([A-Za-z\d])\s*(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*([A-Za-z\d])"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*([A-Za-z\d])"), r"\\sqrt{\1}"),
    (re.compile(r"\\binom\s*(\d)\s*(\d)"), r"\\binom{\1}{\2}"),
    (re.compile(r"\^\s*(-?\d+(?:\.\d+)?)"), r"^{\1}"),
]  # fmt: skip
_CALLS = (("sqrt", r"\sqrt{", "}"), ("exp", "e^{", "}"), ("abs", "|", "|"))


def normalise(text: str) -> str:
    """The one way to write `text`; it is not evaluated and may be nonsense still."""
    text = text.strip().strip("`").strip()
    while len(text) > 4 and text.startswith("**") and text.endswith("**"):
        text = text[2:-2].strip()
    text = text.strip("*").strip()
    text = text.translate(_UNICODE).replace("\\\\", NEW_ROW)
    text = _SILENT.sub("", re.sub(r"\\(?:left|right)\s*\.", "", text))
    for _ in range(2):  # \textbf{\text{...}}
        text = _WORDS.sub(_words, text)
    for pattern, replacement in _SAME:
        text = pattern.sub(replacement, text)
    for name, opening, closing in _CALLS:
        text = _call(text, name, opening, closing)
    text = _call(text, "^", "^{", "}")
    text = " ".join(text.split())
    return text.rstrip(".,;:!? ").strip() if not text.endswith("!") else text.strip()


def canonical(text: str) -> str:
    """For a comparison letter by letter."""
    return re.sub(r"\s+", "", normalise(text))


def with_matrices(text: str) -> str:
    """The normal form with its matrices in LaTeX again."""
    names = ((MATRIX_OPEN, r"\begin{pmatrix}"), (NEW_ROW, r"\\"), (MATRIX_CLOSE, r"\end{pmatrix}"))
    for mark, latex in names:
        text = text.replace(mark, latex)
    return text


def _words(match: re.Match[str]) -> str:
    content = match[1].strip()
    bare = content.strip("() .,").lower()
    if bare in ("and", "or", "") or content in (",", ";"):
        return " , " if content else " "
    if re.match(r"[\d.+\-(\[]*\d", content) or len(bare) == 1:  # \text{13}, \text{(B)}, \mathrm{e}
        return content
    if bare in FUNCTIONS:
        return f"\\{bare} "
    return f" {WORDS_OPEN}{content}{WORDS_CLOSE} "


def _call(text: str, name: str, opening: str, closing: str) -> str:
    r"""`name(...)` as `opening...closing`: sqrt(2) as \sqrt{2}, x^(a+b) as x^{a+b}."""
    pieces, at = [], 0
    pattern = re.escape(name) + r"\s*\(" if name == "^" else rf"(?<![A-Za-z\\]){name}\s*\("
    open_calls: list[int] = []  # depths at which one was opened
    depth = 0
    for match in re.finditer(rf"{pattern}|[()]", text):
        token = match[0]
        if token == ")":
            if open_calls and open_calls[-1] == depth:
                open_calls.pop()
                pieces += [text[at : match.start()], closing]
                at = match.end()
            depth -= 1
        else:
            depth += 1
            if token != "(":
                open_calls.append(depth)
                pieces += [text[at : match.start()], opening]
                at = match.end()
    if open_calls:
        return text  # not balanced: as it was
    return "".join([*pieces, text[at:]])
