"""Stage 4 of 7: advantage estimators, one file each.

An estimator's module defines `advantages(samples, algo) -> list of float32 [m]`, one value for each of the m
response tokens of each sample; `algo` is the config's section. A path `package.module:function` works as well.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

import numpy as np

from rljax.sample import Sample

Estimator = Callable[..., list[np.ndarray]]


def find(name: str) -> Estimator:
    """The estimator `name`: a module of this folder, or `package.module:function`. ValueError listing what exists."""
    module, colon, function = name.partition(":")
    known = sorted(m.name for m in pkgutil.iter_modules(__path__))
    if not colon and name not in known:
        raise ValueError(f"algo.advantage_estimator {name!r}: there are {', '.join(known)}, or package.module:function")
    try:
        return getattr(importlib.import_module(module if colon else f"{__name__}.{name}"), function or "advantages")
    except (ImportError, AttributeError) as error:
        raise ValueError(f"algo.advantage_estimator {name!r}: {error}; built in are {', '.join(known)}") from error


def per_token(samples: list[Sample], scalars: np.ndarray) -> list[np.ndarray]:
    """One scalar for each sample, on each of its trained tokens (0 on the others): list of float32 [m]."""
    return [
        np.where(np.asarray(sample.loss_mask) > 0, np.float32(scalar), np.float32(0))
        for sample, scalar in zip(samples, scalars, strict=True)
    ]
