"""Stage 4 of 7: advantage estimators, one file each.

An estimator's module defines `advantages(samples, algo) -> list of float32 [m]`, one value for each of the m
response tokens of each sample; `algo` is the config's section. A path `package.module:function` works as well.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from rljax.sample import Sample

Estimator = Callable[..., list[np.ndarray]]


def find(name: str) -> Estimator:
    """The estimator `name`: a module of this folder, or `package.module:function`, found from the working directory.

    Raises ValueError listing what exists.
    """
    module, colon, function = name.partition(":")
    known = sorted(m.name for m in pkgutil.iter_modules(__path__))
    if not colon and name not in known:
        raise ValueError(f"algo.advantage_estimator {name!r}: there are {', '.join(known)}, or package.module:function")
    if module.endswith(".py") or "/" in module:
        raise ValueError(f"algo.advantage_estimator {name!r}: give a module's name, not a file's: my_file:function for my_file.py in "
                         f"the working directory")
    if colon and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # as for rewards; `python -m` has it there already
    try:
        found = getattr(importlib.import_module(module if colon else f"{__name__}.{name}"), function or "advantages")
    except Exception as error:  # the boundary to a user's module: anything may go wrong while it is imported
        raise ValueError(f"algo.advantage_estimator {name!r}: {error}; built in are {', '.join(known)}") from error
    if not callable(found):
        raise ValueError(f"algo.advantage_estimator {name!r}: {function} is no function but of type "
                         f"{type(found).__name__}")
    return found


def estimate(estimator: Estimator, samples: list[Sample], algo: Any) -> list[np.ndarray]:
    """`estimator(samples, algo)` as float32 [m] each, checked; ValueError where it does not fit the samples."""
    found = [np.asarray(values, np.float32) for values in estimator(samples, algo)]
    if len(found) != len(samples):
        raise ValueError(f"algo.advantage_estimator returned {len(found)} arrays for {len(samples)} samples")
    for sample, values in zip(samples, found, strict=True):
        if values.shape != (len(sample.response_tokens),):
            raise ValueError(f"algo.advantage_estimator returned shape {values.shape} for sample {sample.uid}, which "
                             f"has {len(sample.response_tokens)} response tokens")
    return found


def per_token(samples: list[Sample], scalars: np.ndarray) -> list[np.ndarray]:
    """One scalar for each sample, on each of its trained tokens (0 on the others): list of float32 [m]."""
    return [
        np.where(np.asarray(sample.loss_mask) > 0, np.float32(scalar), np.float32(0))
        for sample, scalar in zip(samples, scalars, strict=True)
    ]
