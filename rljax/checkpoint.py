"""Checkpoints through orbax: the train state in its shardings, and everything the host needs, as JSON."""

from __future__ import annotations

import logging
import os
import pathlib
import platform
from typing import Any

import jax
import orbax.checkpoint as ocp

from rljax.types import TrainState

log = logging.getLogger(__name__)
MARKER = "_CHECKPOINT_METADATA"  # orbax writes it last, before the directory gets its final name


def machine() -> dict[str, Any]:
    """What bit-for-bit resume depends on: processor, device kind and count, and XLA's flags."""
    return {
        "processor": platform.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jax": jax.__version__,
    }


class Checkpoints:
    """The checkpoints of one run: a directory with one folder for each saved rollout count."""

    def __init__(self, directory: pathlib.Path, *, keep: int = 3, async_save: bool = True):
        """`keep` newest are kept. Folders that a crash left incomplete are put aside, with a warning."""
        self.directory = directory.absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._put_aside()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=async_save)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def _put_aside(self) -> None:
        for folder in sorted(self.directory.iterdir()):
            if folder.name.isdigit() and not (folder / MARKER).exists():
                log.warning("%s is incomplete (no %s) and is not used; moved to %s.incomplete", folder, MARKER, folder)
                folder.rename(folder.with_name(f"{folder.name}.incomplete"))

    def latest(self) -> int | None:
        """The newest whole checkpoint, as a number of rollouts, or None."""
        return self._manager.latest_step()

    def save(self, rollouts: int, state: TrainState, host: dict[str, Any]) -> None:
        """Save after `rollouts` rollouts; returns once the values are copied. OSError (a full disk, say) of this or
        an earlier save says where, and which checkpoint is the newest whole one."""
        if self._manager.latest_step() == rollouts:
            return
        host = {**host, "machine": machine()}
        try:
            self._manager.save(
                rollouts, args=ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host))
            )
        except OSError as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Until the last save is on the disk; raises as `save` does."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:  # tensorstore reports a full disk as a ValueError
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> OSError:
        whole = [int(p.name) for p in self.directory.iterdir() if p.name.isdigit() and (p / MARKER).exists()]
        newest = f"{self.directory / str(max(whole))} is whole and the newest" if whole else "there is no whole one yet"
        return OSError(f"saving a checkpoint in {self.directory} failed: {error}; {newest}")

    def restore(self, rollouts: int, state: TrainState, shardings: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """(state, host) of one checkpoint, onto `shardings`; the mesh may differ from the one that saved it.

        `state` gives shapes and dtypes (arrays or ShapeDtypeStruct). A difference in what `machine` says is logged:
        from there on the run need not be bit-equal to the uninterrupted one.
        """
        target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
        loaded = self._manager.restore(
            rollouts, args=ocp.args.Composite(state=ocp.args.StandardRestore(target), host=ocp.args.JsonRestore())
        )
        host = dict(loaded["host"])
        saved, now = host.pop("machine"), machine()
        for key in saved.keys() | now.keys():
            if saved.get(key) != now.get(key):
                log.warning("resuming under another %s: %r when saved, %r now; the run will not be bit-equal to the "
                            "uninterrupted one", key, saved.get(key), now.get(key))
        return loaded["state"], host

    def close(self) -> None:
        """Wait for the last save and release the manager."""
        self.wait()
        self._manager.close()
