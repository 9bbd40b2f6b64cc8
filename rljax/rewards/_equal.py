"""Math grading's comparison of two normalised answers: by structure first, then by value.

Lists, sets, tuples, intervals, unions, relations, matrices and ratios are taken apart here and compared part by part,
so that no part is ever left out; what is left is an expression, and its value decides.
"""

from __future__ import annotations

import collections
import re
import threading
from collections.abc import Callable

from rljax.rewards import _latex as latex
from rljax.rewards._expression import Tree, Unreadable, number, read, variables
from rljax.rewards._value import approximates, equal_trees, proportional

_MAX_ITEMS, _MAX_DEPTH = 40, 8
_MAX_WORK = 20_000  # items times characters, where items in any order are compared by value
_LOCK = threading.Lock()  # the arithmetic is not safe in two threads at once, and bounded, so nobody waits long
_LIST = re.compile(r"\s*(?:[,;]\s*(?:(?:and|or)\b)?|\b(?:and|or)\b)\s*")
_QUOTED_AND = re.compile(r'"\s*,?\s*(?:and|or)\s*"')
_UNION = re.compile(r"\\cup\b\s*")
_RELATION = re.compile(r"\\leq\b|\\geq\b|\\neq\b|\\in\b|[<>=]")
_RATIO = re.compile(r"\s*:\s*")
_PLUS_MINUS = re.compile(r"\\(pm|mp)\b")
_NAME = re.compile(r'"[^"]*"|(?:\\[a-zA-Z]+ ?)?[a-zA-Z]{0,4}(?:_\{?\w+\}?)?\'*(?:\([\w, ]*\))?|\\[a-zA-Z]+')
_MATRIX = re.compile(r"\\begin\{([a-zA-Z]?matrix|array)\}(?:\{[clr| ]*\})?(.*)\\end\{\1\}", re.DOTALL)
_BASE = re.compile(r"(\d+)_\{?(\d+)\}?")
_CHOICE = re.compile(r"\(?([A-Z])\)?")
_CHOSEN = re.compile(r"\(([A-Z])\)|([A-Z])(?:[.):]|$)")
_BRACKETED = re.compile(r"(?<![A-Za-z])([A-Z])\)")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' .-]*")
_QUOTED_UNIT = re.compile(r'(.*\S)\s*"([^"]*)"\s*(\^\s*\{?\d\}?)?', re.DOTALL)
_PLAIN_UNIT = re.compile(r"(.*[\d}%)])\s+((?!and\b|or\b)[A-Za-z]{2,}[A-Za-z ./]*)(\^\s*\{?\d\}?)?")
_PERCENT = re.compile(r'\s*(?:%|"?\s*per ?cent\s*"?)$')
_DECIMAL = re.compile(r"[-+]?\d*\.(\d+)")
_MIRROR = {"<": ">", ">": "<", "\\leq": "\\geq", "\\geq": "\\leq", "=": "=", "\\neq": "\\neq", "\\in": "\\ni"}
_LOWER_FIRST = {"<": ("(", ")"), "\\leq": ("[", "]")}


def same(gold: str, answer: str, depth: int = 0) -> bool:
    """Whether two normalised texts state the same answer. Total; False where this cannot be told."""
    if latex.compact(gold) == latex.compact(answer):
        return True
    if depth > _MAX_DEPTH or not gold or not answer:
        return False
    for rule in _RULES:
        verdict = rule(gold, answer, depth + 1)
        if verdict is not None:
            return verdict
    return _by_value(gold, answer)


def _by_choice(gold: str, answer: str, depth: int) -> bool | None:
    """The letter of a choice, in brackets or followed by a stop or a bracket and the text of its option."""
    wanted = _CHOICE.fullmatch(gold.replace('"', ""))
    answer = answer.replace('"', "")
    given = _CHOSEN.match(answer)
    if len(set(_BRACKETED.findall(answer))) > 1:
        return None  # names several
    return (given[1] or given[2]) == wanted[1] if wanted and given else None


def _items(text: str) -> list[str]:
    """The parts of a plain list; an item with one plus-minus sign is two."""
    parts = [part for _, part in latex.split(_QUOTED_AND.sub(" and ", text), _LIST) if part]
    found = []
    for part in parts:
        if len(_PLUS_MINUS.findall(part)) == 1:
            found += [_PLUS_MINUS.sub(sign, part) for sign in "+-"]
        else:
            found.append(part)
    return found


def _by_list(gold: str, answer: str, depth: int) -> bool | None:
    """Every item of a list or part of a union has its partner; only with dots does the order matter."""
    left, right = ([part for one in _items(text) for _, part in latex.split(one, _UNION)] for text in (gold, answer))
    if len(left) < 2 and len(right) < 2:
        return None
    if len(left) == 1 or len(right) == 1:
        return _set_against_list(left, right, depth)
    return _all(left, right, depth) if "\\ldots" in gold + answer else _matched(left, right, depth)


def _set_against_list(left: list[str], right: list[str], depth: int) -> bool:
    braces = latex.enclosed(left[0] if len(left) == 1 else right[0])
    if braces is None or braces[0] != "\\{":
        return False
    inside = _items(braces[1])
    return _matched(inside, right, depth) if len(left) == 1 else _matched(left, inside, depth)


def _all(left: list[str], right: list[str], depth: int) -> bool:
    return len(left) == len(right) <= _MAX_ITEMS and all(same(*pair, depth) for pair in zip(left, right, strict=True))


def _matched(left: list[str], right: list[str], depth: int) -> bool:
    """Pairwise equal in some order."""
    if len(left) != len(right) or len(left) > _MAX_ITEMS:
        return False
    texts = collections.Counter(map(latex.compact, left)) & collections.Counter(map(latex.compact, right))
    left, rest = _without(left, texts), _without(right, texts)
    if len(rest) * sum(map(len, left + rest)) > _MAX_WORK:
        return False
    for one in left:
        partner = next((index for index, other in enumerate(rest) if same(one, other, depth)), None)
        if partner is None:
            return False
        del rest[partner]
    return True


def _without(parts: list[str], texts: collections.Counter[str]) -> list[str]:
    """`parts` less those, as often as they are counted, whose text is in `texts`."""
    left, rest = texts.copy(), []
    for part in parts:
        text = latex.compact(part)
        if left[text]:
            left[text] -= 1
        else:
            rest.append(part)
    return rest


def _by_relation(gold: str, answer: str, depth: int) -> bool | None:
    """x = 5 stands for 5, an inequality in one unknown for its interval, and an equation for its multiples."""
    left, right = latex.split(gold, _RELATION), latex.split(answer, _RELATION)
    if len(left) < 2 and len(right) < 2:
        return None
    if len(left) < 2 or len(right) < 2:
        left_value, right_value = _stated(left, depth), _stated(right, depth)
        return left_value is not None and right_value is not None and same(left_value, right_value, depth)
    intervals = _interval(left), _interval(right)
    if all(intervals):
        return _unknown(left) == _unknown(right) and same(str(intervals[0]), str(intervals[1]), depth)
    if _same_parts(left, right, depth) or _same_parts(left, _mirrored(right), depth):
        return True
    if [operator for operator, _ in left + right] == ["", "=", "", "="]:
        return _try(lambda: _same_equation(left, right))
    return _same_answer_of_chains(left, right, depth)


def _same_answer_of_chains(left: list[tuple[str, str]], right: list[tuple[str, str]], depth: int) -> bool:
    """x = 2 + 3 = 5 for x = 5: the same name at the start, and the same end."""
    only_equal = {operator for operator, _ in left[1:] + right[1:]} == {"="}
    chained = only_equal and len(left) != len(right) and bool(_NAME.fullmatch(left[0][1]))
    return chained and same(left[0][1], right[0][1], depth) and same(left[-1][1], right[-1][1], depth)


def _same_parts(left: list[tuple[str, str]], right: list[tuple[str, str]], depth: int) -> bool:
    if [operator for operator, _ in left] != [operator for operator, _ in right]:
        return False
    return _all([part for _, part in left], [part for _, part in right], depth)


def _mirrored(relation: list[tuple[str, str]]) -> list[tuple[str, str]]:
    operators = [""] + [_MIRROR[operator] for operator, _ in reversed(relation[1:])]
    return list(zip(operators, [part for _, part in reversed(relation)], strict=True))


def _unknown(relation: list[tuple[str, str]]) -> str:
    """The unknown of an inequality: its only part, or its middle one, that is a name."""
    names = [part for _, part in relation if _NAME.fullmatch(part) and "\\infty" not in part]
    return names[0] if len(names) == 1 else ""


def _interval(relation: list[tuple[str, str]]) -> str | None:
    """1 < x \\leq 4 as (1,4]; None where it is no inequality in one unknown that is a name."""
    if len(relation) > 1 and relation[1][0] in (">", "\\geq"):
        relation = _mirrored(relation)
    operators = [operator for operator, _ in relation[1:]]
    if not _unknown(relation) or any(operator not in _LOWER_FIRST for operator in operators):
        return None
    parts = [part for _, part in relation]
    at = parts.index(_unknown(relation))
    if len(parts) == 3 and at == 1:
        return f"{_LOWER_FIRST[operators[0]][0]}{parts[0]},{parts[2]}{_LOWER_FIRST[operators[1]][1]}"
    if len(parts) != 2:
        return None
    below, above = _LOWER_FIRST[operators[0]]
    return f"{below}{parts[0]},\\infty)" if at == 1 else f"(-\\infty,{parts[1]}{above}"


def _stated(relation: list[tuple[str, str]], depth: int) -> str | None:
    """The value that an answer states: itself, the other side of a name, the end of a true chain, an interval."""
    if len(relation) == 1:
        return relation[0][1]
    parts = [part for _, part in relation]
    operators = {operator for operator, _ in relation[1:]}
    if operators <= {"=", "\\in"}:
        if len(parts) == 2 and _NAME.fullmatch(parts[1]) and not _NAME.fullmatch(parts[0]):
            return parts[0]
        true = all(same(part, parts[-1], depth) for part in parts[1:-1])
        return parts[-1] if true and (_NAME.fullmatch(parts[0]) or same(parts[0], parts[-1], depth)) else None
    return _interval(relation)


def _same_equation(left: list[tuple[str, str]], right: list[tuple[str, str]]) -> bool:
    trees: list[Tree] = [("add", read(one[0][1]), ("neg", read(one[1][1]))) for one in (left, right)]
    return variables(trees[0]) == variables(trees[1]) != set() and proportional(*trees)


def _by_brackets(gold: str, answer: str, depth: int) -> bool | None:
    """A tuple or an interval with the same brackets in order, a set in any order; round brackets may hold one value."""
    left, right = latex.enclosed(gold), latex.enclosed(answer)
    if left is not None and right is not None and "\\{" in (left[0], right[0]):
        return left[0] == right[0] and _matched(_items(left[1]), _items(right[1]), depth)
    many = [side is not None and len(_items(side[1])) > 1 for side in (left, right)]
    if left is not None and right is not None and all(many):
        return (left[0], left[2]) == (right[0], right[2]) and _all(_items(left[1]), _items(right[1]), depth)
    if any(many):
        return False
    inner = [side[1] if side and side[0] + side[2] in ("()", "\\{\\}") else None for side in (left, right)]
    if inner == [None, None]:
        return None
    return same(inner[0] or gold, inner[1] or answer, depth)


def _by_matrix(gold: str, answer: str, depth: int) -> bool | None:
    """Cell by cell; a break after the last row adds none. A determinant is no matrix."""
    left, right = _MATRIX.fullmatch(gold), _MATRIX.fullmatch(answer)
    if left is None or right is None:
        return False if left or right else None
    if ("vmatrix" in (left[1].lower(), right[1].lower())) and left[1] != right[1]:
        return False
    rows = [[row.split("&") for row in match[2].split("\n") if row.strip()] for match in (left, right)]
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    cells = [[cell.strip() for row in side for cell in row] for side in rows]
    return _all(*cells, depth)


def _by_ratio(gold: str, answer: str, depth: int) -> bool | None:
    """3:4 and 9:30, every part; a ratio is no quotient."""
    left, right = ([part for _, part in latex.split(text, _RATIO)] for text in (gold, answer))
    return None if len(left) == len(right) == 1 else _all(left, right, depth)


def _by_base(gold: str, answer: str, depth: int) -> bool | None:
    """204_5: digits and base agree; an answer may leave out the base that the gold names."""
    left, right = _BASE.fullmatch(gold.replace(" ", "")), _BASE.fullmatch(answer.replace(" ", ""))
    if left is None:
        return False if right else None
    return left.groups() == right.groups() if right else left[1] == answer


def _by_words(gold: str, answer: str, depth: int) -> bool | None:
    """Words in any case; short ones, which may be products of variables, only in the case of the first letter."""
    left, right = gold.replace('"', "").strip(), answer.replace('"', "").strip()
    if not _WORDS.fullmatch(left) or not _WORDS.fullmatch(right) or max(len(left), len(right)) < 2:
        return None
    words = '"' in gold + answer or len(left) > 3 or left[1:] == right[1:]
    return True if words and left.casefold().split() == right.casefold().split() else None


def _by_unit(gold: str, answer: str, depth: int) -> bool | None:
    """A unit may be left out on one side, but not be another one."""
    (left, left_unit), (right, right_unit) = _without_unit(gold), _without_unit(answer)
    if (left, right) == (gold, answer):
        return None
    return (not left_unit or not right_unit or left_unit == right_unit) and same(left, right, depth)


def _without_unit(text: str) -> tuple[str, str]:
    """(value, unit in one spelling); a number that is set as text is a value."""
    if len(text) > 2 and text[0] == text[-1] == '"' and re.search(r"\d", text):
        return text[1:-1].replace('"', "").strip(), ""
    match = None if _PERCENT.search(text) else _QUOTED_UNIT.fullmatch(text) or _PLAIN_UNIT.fullmatch(text)
    if match is None:
        return text, ""
    power = re.sub(r"[\s{}]", "", match[3] or "")
    return match[1].strip(), re.sub(r"s?$", "", re.sub(r"[\s.]", "", match[2].casefold())) + power


def _by_value(gold: str, answer: str) -> bool:
    """Equal as expressions. A percentage equals its number with the sign left out, and its hundredth."""
    left, right = _PERCENT.sub("", gold), _PERCENT.sub("", answer)

    def verdict() -> bool:
        trees = [read(left), read(right)]
        if equal_trees(*trees) or _approximate(left, trees[1]) or _approximate(right, trees[0]):
            return True
        if (left != gold) == (right != answer):
            return False
        percent = 0 if left != gold else 1
        trees[percent] = ("div", trees[percent], ("num", number("100")))
        return equal_trees(*trees)

    return _try(verdict)


def _approximate(text: str, value: Tree) -> bool:
    """A decimal of at least six figures for a value that no decimal equals."""
    match = _DECIMAL.fullmatch(text.replace(" ", ""))
    if match is None or variables(value) or len(re.sub(r"[-+.]", "", match[0]).lstrip("0")) < 6:
        return False
    sign = -1 if match[0].startswith("-") else 1
    return approximates(sign * number(match[0].lstrip("+-")), len(match[1]), value)


def _try(verdict: Callable[[], bool]) -> bool:
    """The verdict, or False where the expressions cannot be read, have no value or would cost too much."""
    try:
        with _LOCK:
            return verdict()
    except (Unreadable, ArithmeticError, ValueError, TypeError):  # TypeError: complex numbers have no order
        return False


_RULES = (_by_choice, _by_unit, _by_list, _by_relation, _by_brackets, _by_matrix, _by_ratio, _by_base, _by_words)
