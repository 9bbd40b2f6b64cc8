"""Kernels for a CPU: `cpu_*.cc`, compiled for the machine at hand by its own C++ compiler, once."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

FOLDER = pathlib.Path(__file__).resolve().parent
HEADERS = FOLDER / "cpu.h", FOLDER / "cpu_attend.h"
SOURCES = tuple(FOLDER / f"cpu_{name}.cc" for name in ("product", "attention", "prefill", "hold"))
CACHE = "~/.cache/rljax/kernels"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w")
HANDLERS = {"rljax_product": "RljaxProduct", "rljax_attention": "RljaxAttention", "rljax_prefill": "RljaxPrefill",
            "rljax_hold": "RljaxHold"}

log = logging.getLogger(__name__)


def _compiler() -> list[str]:
    """The command; OSError where there is none."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for name in chosen[:1] or COMPILERS:
        if found := shutil.which(name):
            return [found, *chosen[1:]]
    raise OSError(f"CXX={chosen[0]}: there is no such program" if chosen else
                  f"there is no C++ compiler ({', '.join(COMPILERS)}, or what CXX names)")


def _run(command: Sequence[str]) -> bytes:
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise OSError(f"{command[0]} failed: {done.stderr.decode(errors='replace').strip()[:2000]}")
    return done.stdout


def _library(cache: pathlib.Path) -> pathlib.Path:
    """The library, compiled unless `cache` holds it whole; OSError that says why where it cannot be."""
    compiler = _compiler()
    command = [*compiler, *FLAGS, f"-I{jax.ffi.include_dir()}"]
    # What the compiler defines says for which processor it compiles: a home may be shared by different ones.
    target = _run([*compiler, *FLAGS[:3], "-dM", "-E", "-x", "c++", os.devnull])
    how = repr((command, jax.lib.__version__, platform.libc_ver())).encode()
    digest = hashlib.sha256(b"".join([how, target, *(path.read_bytes() for path in (*HEADERS, *SOURCES))])).hexdigest()
    library, checksum = cache / f"cpu-{digest[:16]}.so", cache / f"cpu-{digest[:16]}.sha256"
    try:
        if hashlib.sha256(library.read_bytes()).digest() == checksum.read_bytes():
            return library
    except FileNotFoundError:
        pass
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:  # whole or not at all, whoever else compiles it
        made, summed = pathlib.Path(folder) / library.name, pathlib.Path(folder) / checksum.name
        _run([*command, *map(str, SOURCES), "-o", str(made)])
        summed.write_bytes(hashlib.sha256(made.read_bytes()).digest())
        made.replace(library)
        summed.replace(checksum)
    return library


@functools.cache
def available() -> bool:
    """Whether XLA knows the kernels, which the first call sees to; where it cannot be, that is logged once."""
    try:
        library = ctypes.CDLL(str(_library(pathlib.Path(os.path.expanduser(CACHE)))))
    except OSError as error:
        log.warning("the sampler takes XLA's slower way: %s", error)
        return False
    for name, symbol in HANDLERS.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return True


def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """x [N, in] float32 times a matrix [out, in], float32 or int8, transposed: [N, out] float32. A row's bits depend on
    nothing else.

    Raises ValueError for other dtypes and for widths that differ.
    """
    if x.dtype != jnp.float32 or matrix.dtype not in (jnp.float32, jnp.int8) or x.shape[1] != matrix.shape[1]:
        raise ValueError(f"float32 [N, in] and float32 or int8 [out, in]: got {x.dtype} {list(x.shape)} and "
                         f"{matrix.dtype} {list(matrix.shape)}")
    shape = jax.ShapeDtypeStruct((x.shape[0], matrix.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("rljax_product", shape)(x, matrix)


def attention(q: jax.Array, prompt, own, staged, tables, position: jax.Array, step: jax.Array, *, scale: float,
              softcap: float, window: int) -> jax.Array:
    """Attention of one decoding step of S slots over all their keys: [S, K, g, h] float32.

    q [S, K, g, h] float32; prompt, own: the `Pages` of a layer, float32 or int8, which a slot reads as the `Tables` say
    (`sampler/cache.py`); staged: the same of S pages of T positions, float32, of which `step` + 1 are filled. position
    [S] int32 is the query's, of which `window` keys at most are seen, its own included (0 = all). A slot that sees none
    has 0.

    Raises ValueError for other dtypes and shapes.
    """
    floats = [leaf.dtype for leaf in (q, staged.keys, staged.values)]
    stored = [leaf.dtype for leaf in (prompt.keys, prompt.values, own.keys, own.values)]
    if set(floats) != {jnp.dtype(jnp.float32)} or set(stored) not in ({jnp.dtype(jnp.float32)}, {jnp.dtype(jnp.int8)}):
        raise ValueError(f"float32, and pages all float32 or all int8: got {', '.join(map(str, floats + stored))}")
    heads, width = q.shape[1], q.shape[3]
    for pages in (prompt, own, staged):
        if pages.keys.shape[1:3] != (heads, width) or pages.values.shape[1::2] != (heads, width):
            raise ValueError(f"pages of {heads} heads of {width}: got keys {list(pages.keys.shape)} and values "
                             f"{list(pages.values.shape)}")
    none = jnp.zeros(0, jnp.float32)
    pools = [none if leaf is None else leaf for pages in (prompt, own)
             for leaf in (pages.keys, pages.values, pages.key_scale, pages.value_scale)]
    call = jax.ffi.ffi_call("rljax_attention", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(q, *pools, staged.keys, staged.values, tables.prompt, tables.prompt_len, tables.own, tables.own_len,
                position, step, scale=np.float32(scale), softcap=np.float32(softcap), window=np.int64(window))


def prompt_attention(q: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array, *, scale: float,
                     softcap: float, window: int) -> jax.Array:
    """Causal attention of T positions of R prompts from `start` on: [R, T, H, h] float32.

    q [R, T, H, h]; keys [R, K, h, L] and values [R, K, L, h], H a multiple of K, are filled up to start + T, which is
    at most L; start int32. At most `window` keys are seen, the query's own included (0 = all). All float32.

    Raises ValueError for other dtypes and shapes.
    """
    if {leaf.dtype for leaf in (q, keys, values)} != {jnp.dtype(jnp.float32)}:
        raise ValueError(f"all float32: got {q.dtype}, {keys.dtype}, {values.dtype}")
    rows, positions, heads, width = q.shape
    if (keys.shape[0], keys.shape[2]) != (rows, width) or values.shape != (*keys.shape[:2], keys.shape[3], width) or (
            positions > keys.shape[3]):
        raise ValueError(f"q [R, T, H, h], keys [R, K, h, L] and values [R, K, L, h] with T <= L: got {list(q.shape)}, "
                         f"{list(keys.shape)} and {list(values.shape)}")
    grouped = q.reshape(rows, positions, keys.shape[1], heads // keys.shape[1], width)
    call = jax.ffi.ffi_call("rljax_prefill", jax.ShapeDtypeStruct(grouped.shape, jnp.float32))
    return call(grouped, keys, values, start, scale=np.float32(scale), softcap=np.float32(softcap),
                window=np.int64(window)).reshape(q.shape)


def hold(x: jax.Array) -> jax.Array:
    """x itself, made once: XLA's CPU makes what is cheap to write, as a cosine, again for each of its uses."""
    return jax.ffi.ffi_call("rljax_hold", jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={0: 0})(x)
