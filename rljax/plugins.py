"""Functions by name: a built-in one, or the user's own by `package.module:function`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any


def find(knob: str, name: str, package: str, known: Sequence[str], default: str) -> Callable[..., Any]:
    """What the value `name` of a knob means: function `default` of the module `package.name`, for one of `known`; or
    `package.module:function`, found from the working directory.

    Raises ValueError naming the knob and listing what exists.
    """
    module, colon, function = name.partition(":")
    there = ", ".join(known)
    if not colon and name not in known:
        raise ValueError(f"{knob} {name!r}: there are {there}, or package.module:function")
    if module.endswith(".py") or "/" in module:
        raise ValueError(f"{knob} {name!r}: give a module's name, not a file's: my_file:function for my_file.py in "
                         f"the working directory")
    if colon and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # as for rewards; `python -m` has it there already
    try:
        found = getattr(importlib.import_module(module if colon else f"{package}.{name}"), function or default)
    except Exception as error:  # the boundary to a user's module: anything may go wrong while it is imported
        raise ValueError(f"{knob} {name!r}: {error}; built in are {there}") from error
    if not callable(found):
        raise ValueError(f"{knob} {name!r}: {function} is no function but of type {type(found).__name__}")
    return found
