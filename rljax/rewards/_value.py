"""Math grading's values: trees of `_expression.py` evaluated exactly, or to 150 digits at sample points.

Every power, factorial and product is bounded before it is computed, so that no answer costs more than a moment or a
megabyte. Symbolic equality is decided at sample points, where both sides are real unless one of them names i: no
simplification that might not end.
"""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction
from typing import Any

import mpmath

from rljax.rewards._expression import Tree, Unreadable, constants, variables

MAX_BITS = 40_000  # of an exact number
MAX_FACTORIAL = 3000
_DIGITS, _TOLERANCE_DIGITS = 150, 100
_POINTS = 5
_CONTEXT = mpmath.MPContext()  # its functions change it: one thread at a time, see `_equal.py`
_CONTEXT.dps = _DIGITS
_TOLERANCE = _CONTEXT.mpf(10) ** -_TOLERANCE_DIGITS


def equal_trees(left: Tree, right: Tree) -> bool:
    """Equal in value: exactly where both are rational, else to 100 digits at every sample point that both allow."""
    names = sorted(variables(left) | variables(right))
    if not names:
        return _close(evaluate(left), evaluate(right))
    is_complex = "i" in constants(left) | constants(right)
    pairs = [pair for point in _points(names) if (pair := _both(left, right, point)) is not None]
    real = [pair for pair in pairs if all(_is_real(value) for value in pair)]
    judged = pairs if is_complex or not real else real
    return bool(judged) and all(_close(*pair) for pair in judged)


def proportional(left: Tree, right: Tree) -> bool:
    """right = c * left for a constant c other than 0: two equations, each brought to `tree = 0`, say the same."""
    names = sorted(variables(left) | variables(right))
    pairs = [pair for point in _points(names) if (pair := _both(left, right, point)) is not None]
    if len(pairs) < 2 or any(_is_zero(value) for pair in pairs for value in pair):
        return False
    first = _ratio(*pairs[0])
    return all(_close(_ratio(*pair), first) for pair in pairs[1:])


def rational(tree: Tree) -> Fraction | None:
    """The exact value of a tree without variables, or None where it is irrational or has some."""
    if variables(tree):
        return None
    value = evaluate(tree)
    return value if isinstance(value, Fraction) else None


def approximates(decimal: Fraction, places: int, value: Tree) -> bool:
    """A decimal of `places` digits after the point is `value` rounded or cut there, and no shorter decimal would do.

    Only for a value that no decimal equals: 1/7, but not 1/8.
    """
    exact = evaluate(value)
    if isinstance(exact, Fraction) and _terminates(exact):
        return False
    difference = abs(_number(exact) - _number(decimal))
    unit = _number(Fraction(1, 10**places))
    return bool(difference <= unit / 2 or (difference < unit and abs(_number(decimal)) < abs(_number(exact))))


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _points(names: list[str]) -> list[dict[str, Any]]:
    """Sample points: positive ones, negative ones and mixed ones, the same in every process."""
    points = []
    for index in range(_POINTS):
        point = {}
        for name in names:
            digest = hashlib.sha256(f"{index} {name}".encode()).digest()
            size = Fraction(int.from_bytes(digest[:6]), 1 << 47) + Fraction(1, 3)
            negative = index in (2, 3) or index >= 4 and digest[6] % 2
            point[name] = _number(-size if negative else size)
        points.append(point)
    return points


def _both(left: Tree, right: Tree, point: dict[str, Any]) -> tuple[Any, Any] | None:
    """Both values at a point, or None where one of them has none there."""
    try:
        return evaluate(left, point), evaluate(right, point)
    except ZeroDivisionError:
        return None


def _number(value: Any) -> Any:
    return _CONTEXT.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _is_real(value: Any) -> bool:
    if isinstance(value, Fraction):
        return True
    return abs(value.imag) <= abs(value) * _TOLERANCE


def _is_zero(value: Any) -> bool:
    return value == 0 if isinstance(value, Fraction) else abs(value) < _TOLERANCE


def _ratio(left: Any, right: Any) -> Any:
    exact = isinstance(left, Fraction) and isinstance(right, Fraction)
    return right / left if exact else _number(right) / _number(left)


def _close(left: Any, right: Any) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = _number(left), _number(right)
    if _CONTEXT.isinf(left) or _CONTEXT.isinf(right):
        return bool(left == right)
    return bool(abs(left - right) <= max(abs(left), abs(right)) * _TOLERANCE)


def evaluate(tree: Tree, point: dict[str, Any] | None = None) -> Any:
    """The value of a tree at a point: a Fraction where it is one, else an mpmath number.

    ZeroDivisionError where it has none there; Unreadable where computing it would cost too much.
    """
    kind = tree[0]
    if kind == "num":
        return _bounded(tree[1])
    if kind == "var":
        return (point or {})[tree[1]]
    if kind == "const":
        return _constant(tree[1])
    values = [evaluate(part, point) for part in tree[1:] if isinstance(part, tuple)]
    if kind in ("fn", "fn2"):
        return _bounded(_FUNCTIONS[tree[1]](*values))
    if kind == "pow":
        return _bounded(_power(*values))
    if not all(isinstance(value, Fraction) for value in values):
        values = [_number(value) for value in values]
    return _bounded(_arithmetic(kind, *values))


def _arithmetic(kind: str, left: Any, right: Any = None) -> Any:
    if kind == "neg":
        return -left
    if kind == "add":
        return left + right
    return left * right if kind == "mul" else left / right


def _bounded(value: Any) -> Any:
    """Check a result's size; the next operation starts from values of bounded size."""
    if isinstance(value, Fraction):
        if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
            raise Unreadable(f"a number of more than {MAX_BITS} bits")
    elif _CONTEXT.isnan(value):
        raise ZeroDivisionError("no value here")
    return value


def _constant(name: str) -> Any:
    return {"pi": +_CONTEXT.pi, "e": +_CONTEXT.e, "i": _CONTEXT.mpc(0, 1), "infty": _CONTEXT.inf}[name]


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if size > 1 and abs(exponent) * size > MAX_BITS:
            raise Unreadable("a power of too many digits")
        return base ** int(exponent)
    base, exponent = _number(base), _number(exponent)
    if base == 0:
        if not exponent.real > 0:
            raise ZeroDivisionError("0 to a negative power")
        return Fraction(0)
    if _CONTEXT.isinf(base) or _CONTEXT.isinf(exponent):
        raise Unreadable("infinity in a power")
    if abs(exponent) * (abs(_CONTEXT.log(base)) + 1) > MAX_BITS:
        raise Unreadable("a power of too many digits")
    odd_root = _odd_root(base, exponent)
    return base**exponent if odd_root is None else odd_root


def _odd_root(base: Any, exponent: Any) -> Any:
    """The real cube root and its like of a negative number, which is what school means by it."""
    if base.imag or exponent.imag or base.real >= 0:
        return None
    for degree in (3, 5, 7):
        if abs(exponent * degree - 1) < _CONTEXT.mpf(10) ** -50:
            return -((-base) ** exponent)
    return None


def _root(value: Any) -> Any:
    if isinstance(value, Fraction) and value >= 0:
        top, bottom = (mpmath.libmp.isqrt(part) for part in (value.numerator, value.denominator))
        if top * top == value.numerator and bottom * bottom == value.denominator:
            return Fraction(int(top), int(bottom))
    return _CONTEXT.sqrt(_number(value))


def _factorial(value: Any) -> Any:
    if isinstance(value, Fraction) and value.denominator == 1:
        if not 0 <= value <= MAX_FACTORIAL:
            raise Unreadable(f"a factorial outside 0 to {MAX_FACTORIAL}")
        return Fraction(int(mpmath.libmp.ifac(int(value))))
    if abs(value) > 100:
        raise Unreadable("the factorial of a large number")
    return _analytic("gamma")(value + 1)


def _binomial(top: Any, bottom: Any) -> Any:
    return _factorial(top) / _factorial(bottom) / _factorial(top - bottom)


def _rounded(name: str) -> Any:
    def function(value: Any) -> Any:
        if isinstance(value, Fraction):
            return Fraction(math.floor(value) if name == "floor" else math.ceil(value))
        return getattr(_CONTEXT, name)(value)

    return function


def _analytic(name: str) -> Any:
    """A function of mpmath by its name, for arguments that it can reduce quickly."""

    def function(value: Any) -> Any:
        value = _number(value)
        if _CONTEXT.isinf(value) or abs(value) > 10**5 and name not in ("log", "log10", "atan"):
            raise Unreadable(f"{name} of a large number")
        if value == 0 and name in ("log", "log10", "cot", "csc"):
            raise ZeroDivisionError(f"{name} of 0")
        return getattr(_CONTEXT, name)(value)

    return function


_FUNCTIONS = {
    "abs": abs,
    "sqrt": _root,
    "factorial": _factorial,
    "binom": _binomial,
    "floor": _rounded("floor"),
    "ceil": _rounded("ceil"),
    "ln": _analytic("log"),
    "log": _analytic("log10"),
    "arcsin": _analytic("asin"),
    "arccos": _analytic("acos"),
    "arctan": _analytic("atan"),
    **{name: _analytic(name) for name in "sin cos tan cot sec csc sinh cosh tanh exp".split()},
}
