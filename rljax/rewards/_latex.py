"""The text rules of math grading: spellings that carry no meaning become one spelling, and structure is split.

Everything here is linear in the text, total, and knows nothing of values.
"""

from __future__ import annotations

import re

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "∗": "*",
        "π": "\\pi ", "θ": "\\theta ", "∞": "\\infty ", "√": "\\sqrt ", "°": "^\\circ ", "±": "\\pm ", "≤": "\\leq ",
        "≥": "\\geq ", "≠": "\\neq ", "∪": "\\cup ", "∈": "\\in ", "≈": "\\approx ", "…": "\\ldots ", "\u00a0": " ",
        "\u2009": " ", "\u202f": " ", "¼": "\\frac{1}{4}", "½": "\\frac{1}{2}", "¾": "\\frac{3}{4}", "％": "%",
        "，": ",", "（": "(", "）": ")", "：": ":", "＝": "=",
    }
    | {chr(0xFF10 + digit): str(digit) for digit in range(10)}
    | {character: f"^{digit}" for digit, character in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
)  # fmt: skip

# A command and the spelling that stands for it: sizes, spaces and fonts mean nothing, and synonyms become one.
_SAME = {
    **dict.fromkeys(
        "left right big Big bigl bigr Bigl Bigr bigg Bigg biggl biggr displaystyle textstyle limits mathopen "
        "mathclose".split(),
        "",
    ),
    **dict.fromkeys("quad qquad enspace thinspace".split(), " "),
    **dict.fromkeys(["dfrac", "tfrac", "cfrac"], "\\frac"),
    **dict.fromkeys(["cdot", "times", "ast"], "*"),
    **dict.fromkeys(["dots", "cdots", "dotsc", "dotsb", "ldots"], "\\ldots "),
    **dict.fromkeys(["le", "leqslant", "leq"], "\\leq "),
    **dict.fromkeys(["ge", "geqslant", "geq"], "\\geq "),
    **dict.fromkeys(["ne", "neq"], "\\neq "),
    **dict.fromkeys(["lbrace"], "\\{"),
    **dict.fromkeys(["rbrace"], "\\}"),
    **dict.fromkeys(["lvert", "rvert", "vert", "mid"], "|"),
    **dict.fromkeys(["dbinom", "tbinom"], "\\binom"),
    "div": "/", "lt": "<", "gt": ">", "degree": "^\\circ ", "land": " and ", "lor": " or ", "emptyset": "\\varnothing ",
    "langle": "(", "rangle": ")", "colon": ":", "infin": "\\infty ",
}  # fmt: skip
_COMMAND = re.compile(r"\\([a-zA-Z]+)\*?")
_SPACING = re.compile(r"\\[,;:> ]|~")
_NEGATIVE_SPACE = re.compile(r"\\!\s*")  # as in 10,\! 000
_FONT = re.compile(r"\\(?:mathrm|mathbf|mathit|mathsf|mathnormal|boldsymbol|bm|rm|bf)\b\s*")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mbox|hbox|operatorname)\s*\{([^{}]*)\}")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*")
_DEGREES = re.compile(r"\^\s*(?:\\circ\b|\{\s*\\circ\s*\})\s*|\bdegrees?\b")
_REALS = re.compile(r"\\mathbb\s*(?:\{\s*R\s*\}|R)")
_CURRENCY = re.compile(r"\\\$|[$€£¥₹]")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?![\d,])")
_ENDS = (("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))
OPEN, CLOSE = "([{", ")]}"


def normal(text: str) -> str:
    """`text` with one spelling for what means the same. Text commands keep their words between double quotes."""
    text = strip_ends(" ".join(text.translate(_CHARACTERS).split()))
    text = text.replace("\\\\", "\n").replace("{,}", ",").replace("\\%", "%")  # \\ ends a matrix row: now a newline
    text = _CURRENCY.sub("", _NEGATIVE_SPACE.sub("", text))
    text = _SPACING.sub(" ", text)
    text = _FONT.sub("", text)
    text = _TEXT.sub(lambda match: f'"{match[1].strip()}"', text)
    text = _COMMAND.sub(lambda match: _SAME.get(match[1], match[0]), text)
    text = re.sub(r"\\\{\s*", "\\{", text)
    text = _REALS.sub(r"(-\\infty,\\infty)", text)
    text = _DEGREES.sub(" ", text)
    text = re.sub(r"[ \t]+", " ", text).strip()
    text = re.sub(r"^(?:=|\\approx\b)\s*", "", text)
    return re.sub(r"(?<=[^.])[.,;]$", "", text).strip()  # the end of a sentence


def strip_ends(text: str) -> str:
    """Without the math delimiters, bold marks and boxes around the whole."""
    while True:
        before = text = text.strip()
        for start, end in _ENDS:
            if text.startswith(start) and text.endswith(end) and len(text) > len(start) + len(end):
                text = text[len(start) : -len(end)]
        if len(text) > 2 and text[0] == text[-1] == "$":
            text = text.strip("$")
        match = _BOX.match(text)
        if match and text[match.end() :].startswith("{") and closing(text).get(match.end()) == len(text) - 1:
            text = text[match.end() + 1 : -1]
        if text == before:
            return text


def closing(text: str) -> dict[int, int]:
    """For every `{` that is closed, where its `}` stands. Escaped braces are text."""
    pairs, open_at, skip = {}, [], False
    for index, character in enumerate(text):
        if skip:
            skip = False
        elif character == "\\":
            skip = True
        elif character == "{":
            open_at.append(index)
        elif character == "}" and open_at:
            pairs[open_at.pop()] = index
    return pairs


def boxes(text: str) -> list[str]:
    r"""The contents of every closed `\boxed{...}` or `\fbox{...}`, in the order of their ends."""
    pairs = closing(text)
    found = [(pairs[match.end()], match.end()) for match in _BOX.finditer(text) if match.end() in pairs]
    return [text[start + 1 : end].strip() for end, start in sorted(found)]


def without_thousands(text: str) -> str:
    """65,500 and 65 500 as 65500. Inside brackets a comma always separates."""
    if "(" in text or "[" in text or "\\{" in text:
        return text
    return _THOUSANDS.sub(lambda match: re.sub("[, ]", "", match[0]), text)


def compact(text: str) -> str:
    """What is compared as text: no spaces but between digits, no quotes, no braces round one character."""
    text = re.sub(r'(?<!\d)[\s"]+|[\s"]+(?!\d)', "", text)
    return re.sub(r"\{([^{}\\])\}", r"\1", text)


def cut(text: str, end: re.Pattern[str]) -> str:
    """`text` up to the first match of `end` outside all brackets and quotes."""
    depths = _depths(text)
    return next((text[: match.start()] for match in end.finditer(text) if depths[match.start()] == 0), text)


def split(text: str, separator: re.Pattern[str]) -> list[tuple[str, str]]:
    """(separator before it, part) for the parts of `text` between separators outside all brackets and quotes."""
    depths = _depths(text)
    parts, start, before = [], 0, ""
    for match in separator.finditer(text):
        if depths[match.start()] == 0:
            parts.append((before, text[start : match.start()].strip()))
            start, before = match.end(), match[0].strip()
    return [*parts, (before, text[start:].strip())]


def _depths(text: str) -> list[int]:
    """How many brackets, or quotes, stand open before each character."""
    depth, quoted, depths = 0, False, []
    for character in text:
        if character in CLOSE:
            depth = max(0, depth - 1)
        depths.append(depth + quoted)
        depth += character in OPEN
        quoted ^= character == '"'
    return depths


def enclosed(text: str) -> tuple[str, str, str] | None:
    r"""(opening bracket, inside, closing bracket) where one pair of brackets holds all of `text`, else None.

    The pairs are ( ) and [ ], also mixed as in an interval, and \{ \}.
    """
    if text.startswith("\\{") and text.endswith("\\}"):
        inside = text[2:-2].strip()
        return ("\\{", inside, "\\}") if "\\{" not in inside else None
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    depths = _depths(text)
    if min(depths[1:-1], default=1) < 1:
        return None
    return text[0], text[1:-1].strip(), text[-1]
