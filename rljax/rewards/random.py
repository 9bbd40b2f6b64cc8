"""A reward that says nothing: what a run learns from it is the bias of its algorithm."""

from __future__ import annotations

import hashlib

from rljax.sample import Sample


def reward(sample: Sample) -> float:
    """0.0 or 1.0, each as likely, decided by the sample's uid."""
    return float(hashlib.sha256(str(sample.uid).encode()).digest()[0] & 1)
