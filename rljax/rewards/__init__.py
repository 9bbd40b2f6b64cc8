"""Stage 3 of 7: verifiers. Each file here that defines `reward` is one, and so is any `package.module:function`.

A reward function is `fn(sample) -> float | dict[str, float] | None`, sync or async; `pool.py` runs it in workers.
To add one, put a file with a function `reward` into this folder. Nothing here imports JAX.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

_MACHINERY = {"pool", "worker"}  # the modules of this folder that are no verifiers


def names() -> list[str]:
    """The built-in rewards: the public modules of this folder."""
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in found if not name.startswith("_") and name not in _MACHINERY)


def find(name: str) -> Callable[..., Any]:
    """The reward function called `name`: a built-in one, or `package.module:function`.

    ValueError where there is none: it lists what exists, or says what the import failed with.
    """
    if ":" not in name:
        if name not in names():
            raise ValueError(f"no reward {name!r}: there are {', '.join(names())}, or give package.module:function")
        return _attribute(f"{__name__}.{name}", "reward", name)
    module, _, attribute = name.partition(":")
    if module.endswith(".py") or "/" in module:
        raise ValueError(f"reward {name!r}: give a module's name, not a file's: my_file:function for my_file.py in "
                         f"the working directory")
    return _attribute(module, attribute, name)


def _attribute(module_name: str, attribute: str, name: str) -> Callable[..., Any]:
    try:
        found: Any = importlib.import_module(module_name)
    except BaseException as error:  # the boundary to a user's module: anything may go wrong while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"reward {name!r}: importing {module_name!r} failed with {reason}") from error
    if not callable(getattr(found, attribute, None)):
        have = sorted(key for key, value in vars(found).items() if callable(value) and not key.startswith("_"))
        only = ", ".join(have) or "none"
        raise ValueError(f"reward {name!r}: {module_name} has no function {attribute!r}, only {only}")
    return getattr(found, attribute)
