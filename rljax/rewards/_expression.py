"""Math grading's reader: an expression in LaTeX or plain text becomes a tree of nested tuples.

The whole text must be read; a command that is not known, a missing argument or a stray bracket raises Unreadable,
so that nothing is ever dropped from an answer. The tree is built of

    ("num", Fraction) ("var", name) ("neg", a) ("add" | "mul" | "div" | "pow", a, b) ("fn", name, a)
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

Tree = tuple[Any, ...]


class Unreadable(ValueError):
    """The text is no expression that this reader knows, or its value is out of bounds."""


MAX_CHARACTERS, MAX_TOKENS, MAX_DEPTH, MAX_DIGITS = 1500, 300, 40, 1000

_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+(?![\w.]))?)|\\(?P<command>[a-zA-Z]+)"
    r"|(?P<letter>[a-zA-Z])|(?P<operator>\*\*|[-+*/^!_()\[\]{}|])"
)
_FUNCTIONS = (
    "arcsin arccos arctan sinh cosh tanh sin cos tan cot sec csc ln log lg exp sqrt asin acos atan abs floor ceil"
).split()
_GREEK = set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau phi varphi "
    "chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell".split()
)
_WORDS = re.compile(rf"(?<![\\a-zA-Z])({'|'.join(_FUNCTIONS)}|pi|infty)(?=[^a-zA-Z]|$)")
_PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}|^[a-zA-Z]{3,}$")  # a word, whose letters are no factors
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_SYNONYMS = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
_FENCES = {"lfloor": ("rfloor", "floor"), "lceil": ("rceil", "ceil")}


def read(text: str) -> Tree:
    """The tree of `text`; Unreadable where there is none."""
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"{len(text)} characters, above {MAX_CHARACTERS}")
    text = _WORDS.sub(r"\\\1 ", text)
    if word := _PROSE.search(text):
        raise Unreadable(f"the word {word[0]!r}")
    return _Reader(_tokens(text)).whole()


def variables(tree: Tree) -> set[str]:
    """The names of the variables in a tree; e, i and pi are none."""
    if tree[0] == "var":
        return {tree[1]}
    return set().union(*(variables(part) for part in tree[1:] if isinstance(part, tuple)))


def constants(tree: Tree) -> set[str]:
    """The named constants in a tree, of `e`, `i`, `pi` and `infty`."""
    if tree[0] == "const":
        return {tree[1]}
    return set().union(*(constants(part) for part in tree[1:] if isinstance(part, tuple)))


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise Unreadable(f"character {text[at]!r}")
        at = match.end()
        if match.lastgroup != "space":
            tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
    if len(tokens) > MAX_TOKENS:
        raise Unreadable(f"{len(tokens)} tokens, above {MAX_TOKENS}")
    return tokens


def number(text: str) -> Fraction:
    """The exact value of a decimal, with or without an exponent of ten."""
    digits, _, exponent = text.lower().partition("e")
    if len(digits) > MAX_DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > MAX_DIGITS:
        raise Unreadable("a number with too many digits")
    return Fraction(digits) * Fraction(10) ** int(exponent or 0)


def _is_whole(tree: Tree) -> bool:
    return tree[0] == "num" and tree[1].denominator == 1


class _Reader:
    """Recursive descent: sum of products of signed powers; a product needs no sign between its factors."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.at, self.depth, self.bars = tokens, 0, 0, 0

    def peek(self, ahead: int = 0) -> tuple[str, str]:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ("end", "")

    def take(self, value: str | None = None) -> tuple[str, str]:
        token = self.peek()
        if value is not None and token[1] != value or token[0] == "end":
            raise Unreadable(f"{token[1]!r} where {value or 'more'} is needed")
        self.at += 1
        return token

    def whole(self) -> Tree:
        tree = self.sum()
        if self.at != len(self.tokens):
            raise Unreadable(f"unexpected {self.peek()[1]!r}")
        return tree

    def sum(self) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable(f"nested deeper than {MAX_DEPTH}")
        tree = self.product()
        while self.peek() in (("operator", "+"), ("operator", "-")):
            sign = self.take()[1]
            right = self.product()
            tree = ("add", tree, ("neg", right) if sign == "-" else right)
        self.depth -= 1
        return tree

    def product(self) -> Tree:
        tree = self.signed()
        while True:
            kind, value = self.peek()
            if kind == "operator" and value in "*/":
                self.take()
                tree = ("mul" if value == "*" else "div", tree, self.signed())
            elif self.starts_factor():
                if kind == "number" and self.peek(-1)[0] == "number":
                    tree = self.mixed_in_words(tree)
                else:
                    tree = self.mixed(tree)
            else:
                return tree

    def signed(self) -> Tree:
        negative = False
        while self.peek() in (("operator", "+"), ("operator", "-")):
            negative ^= self.take()[1] == "-"
        tree = self.power()
        return ("neg", tree) if negative else tree

    def starts_factor(self) -> bool:
        kind, value = self.peek()
        if kind == "operator":
            return value in "({[" or value == "|" and self.bars == 0
        return kind in ("number", "letter") or kind == "command" and value not in ("rfloor", "rceil")

    def mixed(self, tree: Tree) -> Tree:
        """A factor without a sign before it: a product, but 4\\frac{1}{2} is a sum, of whole numbers only."""
        fraction_follows = self.peek() == ("command", "frac")
        factor = self.power()
        whole = tree[1] if tree[0] == "neg" else tree
        if fraction_follows and factor[0] == "div" and all(map(_is_whole, (whole, *factor[1:]))):
            total = ("add", whole, factor)
            return ("neg", total) if tree[0] == "neg" else total
        return ("mul", tree, factor)

    def mixed_in_words(self, tree: Tree) -> Tree:
        """4 1/2; any other number after a number has no meaning."""
        whole = tree[1] if tree[0] == "neg" else tree
        top = self.take()[1]
        self.take("/")
        bottom = self.take()[1]
        if not (_is_whole(whole) and top.isdigit() and bottom.isdigit()):
            raise Unreadable("two numbers in a row")
        total = ("add", whole, ("div", ("num", number(top)), ("num", number(bottom))))
        return ("neg", total) if tree[0] == "neg" else total

    def power(self) -> Tree:
        tree = self.postfix(self.atom())
        if self.peek()[1] in ("^", "**"):
            self.take()
            tree = self.postfix(("pow", tree, self.exponent()))
        return tree

    def exponent(self) -> Tree:
        if self.peek()[1] in ("-", "+"):
            sign = self.take()[1]
            return ("neg", self.exponent()) if sign == "-" else self.exponent()
        return self.power() if self.peek()[1] in ("(", "{") or self.peek()[0] != "number" else self.argument(one_digit=False)

    def postfix(self, tree: Tree) -> Tree:
        while self.peek() == ("operator", "!"):
            self.take()
            tree = ("fn", "factorial", tree)
        return tree

    def group(self, end: str) -> Tree:
        self.take()
        bars, self.bars = self.bars, 0
        tree = self.sum()
        self.bars = bars
        self.take(end)
        return tree

    def argument(self, one_digit: bool = True) -> Tree:
        """What TeX takes as a command's argument: a group, or one token; of a number, its first digit."""
        kind, value = self.peek()
        if value == "{":
            return self.group("}")
        if kind == "number" and one_digit and len(value) > 1:
            self.tokens[self.at] = ("number", value[1:])
            return ("num", number(value[0]))
        if kind == "operator" and value != "(":
            raise Unreadable(f"{value!r} as an argument")
        return self.atom()

    def atom(self) -> Tree:
        kind, value = self.peek()
        if kind == "number":
            self.take()
            return ("num", number(value) + self.repeating(value))
        if kind == "letter":
            self.take()
            if value in ("e", "i") and self.peek()[1] != "_":
                return ("const", value)
            return self.variable(value)
        if kind == "command":
            self.take()
            return self.command(value)
        if value in ("(", "[", "{"):
            return self.group({"(": ")", "[": "]", "{": "}"}[value])
        if value == "|" and self.bars == 0:
            self.take()
            self.bars += 1
            tree = self.sum()
            self.bars -= 1
            self.take("|")
            return ("fn", "abs", tree)
        raise Unreadable(f"unexpected {value!r}")

    def repeating(self, digits: str) -> Fraction:
        """What the period adds in 0.1\\overline{6}; 0 without one."""
        if self.peek() != ("command", "overline") or "." not in digits:
            return Fraction(0)
        self.take()
        self.take("{")
        kind, period = self.take()
        self.take("}")
        if kind != "number" or not period.isdigit():
            raise Unreadable("a period that is no digits")
        places = len(digits.partition(".")[2])
        return number(period) / (10 ** len(period) - 1) / 10**places

    def variable(self, name: str) -> Tree:
        if self.peek()[1] != "_":
            return ("var", name)
        self.take()
        start = self.at
        self.argument()
        return ("var", name + "_" + "".join(value for _, value in self.tokens[start : self.at]).strip("{}"))

    def command(self, name: str) -> Tree:
        if name == "frac":
            return ("div", self.argument(), self.argument())
        if name == "binom":
            return ("fn2", "binom", self.argument(), self.argument())
        if name == "sqrt" and self.peek()[1] == "[":
            degree = self.group("]")
            return ("pow", self.argument(), ("div", ("num", Fraction(1)), degree))
        if name == "sqrt":
            return ("fn", "sqrt", self.argument(one_digit=False))  # TeX would take one digit, but nobody means that
        if name in ("pi", "infty"):
            return ("const", name)
        if name in _FENCES:
            end, function = _FENCES[name]
            self.at -= 1
            return ("fn", function, self.group(end))
        if name in _FUNCTIONS:
            return self.function(_SYNONYMS.get(name, name))
        if name in _GREEK:
            return self.variable(name)
        raise Unreadable(f"command {name!r}")

    def function(self, name: str) -> Tree:
        """sin x, sin(x), sin^2 x, sin^{-1} x, log_2 x. Without brackets the argument is the product that follows."""
        base, exponent = None, None
        while self.peek()[1] in ("_", "^"):
            if self.take()[1] == "_":
                base = self.argument()
            else:
                exponent = self.exponent()
        if self.peek()[1] in ("(", "[", "{"):
            inner = self.atom()
        else:
            inner = self.power()
            while self.starts_factor() and not (self.peek()[0] == "command" and self.peek()[1] in _FUNCTIONS):
                inner = ("mul", inner, self.power())
        if exponent == ("neg", ("num", Fraction(1))) and name in _INVERSE:
            return ("fn", _INVERSE[name], inner)
        tree: Tree = ("fn", name, inner)
        if base is not None:
            if name != "log":
                raise Unreadable(f"{name} with a base")
            tree = ("div", ("fn", "ln", inner), ("fn", "ln", base))
        return tree if exponent is None else ("pow", tree, exponent)
