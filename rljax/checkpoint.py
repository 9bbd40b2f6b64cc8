"""Checkpoints through orbax: the train state in its shardings, and everything the host needs, as JSON."""

from __future__ import annotations

import errno
import json
import logging
import os
import pathlib
import platform
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

log = logging.getLogger(__name__)
# A folder gets its final name when all of these are in it; one that was copied in part lacks some.
PARTS = ("_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt", "host/metadata")
TELLING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS)
UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a folder that is being written
HANDLERS = {"state": ocp.StandardCheckpointHandler(), "host": ocp.JsonCheckpointHandler()}


class Misfit(ValueError):
    """A checkpoint of another model or optimizer."""


def machine() -> dict[str, Any]:
    """What bit-for-bit resume depends on: processor, CPU and device count, device kind, XLA's flags and version."""
    return {
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jax": jax.__version__,
    }


def _processor() -> str:
    """The processor's model where the system says it: two models of one architecture round differently."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return " ".join([platform.machine(), *models[:1]])


def is_whole(folder: pathlib.Path) -> bool:
    """Whether `folder` is a checkpoint with every part; one that a crash or a cut-off copy left is not."""
    return folder.name.isdigit() and all((folder / part).is_file() for part in PARTS)


def newest(path: pathlib.Path) -> pathlib.Path | None:
    """The newest whole checkpoint of `path`: a checkpoint itself, a folder of them, or a run's directory; or None."""
    if is_whole(path):
        return path
    for parent in (path, path / "checkpoints"):
        whole = [folder for folder in parent.iterdir() if is_whole(folder)] if parent.is_dir() else []
        if whole:
            return max(whole, key=lambda folder: int(folder.name))
    return None


def read_host(folder: pathlib.Path) -> dict[str, Any]:
    """The host's part of a checkpoint; ValueError naming the file where it cannot be read."""
    file = folder / "host" / "metadata"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {error}; move {folder} away to go on from an earlier one") from error


def restore(folder: pathlib.Path, shapes: Any, shardings: Any, *, part: bool = False) -> tuple[Any, dict[str, Any]]:
    """(state, host) of one checkpoint, a tree like `shapes` on `shardings`; the mesh may differ from the one that saved
    it. With `part` the checkpoint may hold more, which is not read.

    `shapes` gives shape and dtype of every leaf. ValueError names each leaf that is missing, extra or of another
    shape, and the folder where it cannot be read. A difference in what `machine` says is logged: from there on the
    run need not be bit-equal to the uninterrupted one.
    """
    host = read_host(folder)
    _check_machine(host.pop("machine", {}))
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    handlers, arguments = HANDLERS, ocp.args.StandardRestore(target)
    if part:
        handlers = {**HANDLERS, "state": ocp.PyTreeCheckpointHandler()}
        how = ocp.checkpoint_utils.construct_restore_args(target)
        arguments = ocp.args.PyTreeRestore(target, restore_args=how, partial_restore=True)
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers)) as reader:
            saved = _leaf_shapes(reader.metadata(folder.absolute()).item_metadata["state"].tree)
            _check_leaves(folder, saved, target, part)
            loaded = reader.restore(folder.absolute(), ocp.args.Composite(state=arguments))
    except Misfit:
        raise
    except (OSError, ValueError) as error:  # tensorstore's, which ends in pages of its own settings
        reason = str(error).partition(" [tensorstore_spec")[0]
        raise ValueError(f"{folder}: cannot be read: {reason}; move it away to go on from an earlier one") from error
    return loaded["state"], host


def _check_machine(saved: dict[str, Any]) -> None:
    now = machine()
    for key in now:
        if saved.get(key) != now[key]:
            log.warning("resuming under another %s: %r when saved, %r now; the run will not be bit-equal to the "
                        "uninterrupted one", key, saved.get(key), now[key])


def _leaf_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}


def _check_leaves(folder: pathlib.Path, saved: dict[str, tuple[int, ...]], target: Any, part: bool) -> None:
    wanted = _leaf_shapes(target)
    problems = [f"missing {name} {list(wanted[name])}" for name in wanted if name not in saved]
    problems += [f"unexpected {name} {list(saved[name])}" for name in saved if name not in wanted and not part]
    problems += [f"{name} has shape {list(saved[name])}, expected {list(shape)}" for name, shape in wanted.items()
                 if saved.get(name, shape) != shape]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise Misfit(f"{folder}: {len(problems)} leaves do not fit this model and optimizer: "
                     + "; ".join(problems[:8]) + more)


class Checkpoints:
    """The checkpoints that one run writes: a directory with one folder for each saved rollout count."""

    def __init__(self, directory: pathlib.Path, *, keep: int = 3, async_save: bool = True):
        """`keep` newest are kept. What a crash left unfinished is put away, with a warning."""
        self.directory = directory.absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._put_away()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=async_save)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def _put_away(self) -> None:
        for folder in sorted(path for path in self.directory.iterdir() if path.is_dir()):
            if UNFINISHED in folder.name:
                log.warning("%s is a checkpoint that was being written when its run ended: removed", folder)
                shutil.rmtree(folder)
            elif folder.name.isdigit() and not is_whole(folder):
                lacking = [part for part in PARTS if not (folder / part).is_file()]
                aside = folder.with_name(f"{folder.name}.incomplete")
                log.warning("%s is incomplete (no %s) and is not used: renamed to %s", folder, lacking[0], aside.name)
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)

    def save(self, rollouts: int, state: Any, host: dict[str, Any]) -> None:
        """Save after `rollouts` rollouts; returns once the values are copied. OSError (a full disk, say) of this or
        an earlier save says where, and which checkpoint is the newest whole one. Where `rollouts` is saved already,
        the state is the same by definition and `host` replaces the host's part."""
        host = {**host, "machine": machine()}
        self.wait()
        if is_whole(folder := self.directory / str(rollouts)):
            return self._replace_host(folder, host)
        try:
            self._manager.save(
                rollouts, args=ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host))
            )
        except (OSError, ValueError) as error:  # tensorstore reports a full disk as a ValueError
            raise self._failed(error) from error
        return None

    def _replace_host(self, folder: pathlib.Path, host: dict[str, Any]) -> None:
        file = folder / "host" / "metadata"
        if json.loads(file.read_text(encoding="utf-8")) != json.loads(json.dumps(host)):
            written = self.directory / f"host{UNFINISHED}"
            written.write_text(json.dumps(host), encoding="utf-8")
            os.replace(written, file)  # at once, so that a crash leaves the old or the new one

    def wait(self) -> None:
        """Until the last save is on the disk; raises as `save` does."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> OSError:
        whole = newest(self.directory)
        newest_one = "there is no whole one yet" if whole is None else f"the newest whole one is {whole}"
        text = " ".join(str(error).split())  # tensorstore wraps the system's words into paths and codes
        reason = next((words for words in map(os.strerror, TELLING) if words in text), text[:500])
        return OSError(f"saving a checkpoint in {self.directory} failed: {reason}; {newest_one}")

    def close(self) -> None:
        """Wait for the last save and release the manager."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
