"""Attention of one decoding step over a pool of pages, page by page: Pallas kernels for TPU and, by Triton, for GPU.

Legend: W pages, K key/value heads, M members of a page, g query heads of a key/value head, h head width, P page length,
R = M*g rows of queries, those of a member side by side.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

MASKED = -1e30  # the largest score of a row that sees no key
BLOCK_BYTES = 2**20  # keys and values of one TPU grid step: enough to hide the step's fixed cost, if pages are small
LANES = 128  # of a TPU's vector registers
VMEM_BYTES = 48 * 2**20  # of a TPU core that the kernel may take
GPU_ROWS = 64  # of one GPU program, at most: accumulator and scores stay in registers
GPU_CHUNK_BYTES = 2**14  # of keys that a GPU program takes at a time: a few such chunks fit its shared memory


def page_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first: jax.Array,
    last: jax.Array,
    *,
    scale: float,
    softcap: float = 0.0,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    platform: str,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`ops.page_attention` on `platform` "tpu" or "gpu": the same arguments and results.

    A page that no member sees costs neither products nor, on a GPU or where its whole TPU block is unseen, reads.
    `interpret` runs the kernel on any backend. Raises ValueError for another platform and for pages too large for VMEM.
    """
    if platform not in ("tpu", "gpu"):
        raise ValueError(f'platform is "{platform}"; there are kernels for "tpu" and "gpu"')
    pages, kv_heads, members, group, width = q.shape
    rows = members * group
    low, high = (jnp.repeat(x.astype(jnp.int32), group, axis=1) for x in (first, last))
    scales = [] if key_scale is None else [key_scale, value_scale]
    run = _tpu if platform == "tpu" else _gpu
    constants = dict(scale=scale, softcap=softcap)
    q = q.reshape(pages, kv_heads, rows, width)
    out, top, total = run(q, keys, values, low, high, scales, constants, interpret)
    shape = (pages, kv_heads, members, group)
    return out.reshape(*shape, width), top.reshape(shape), total.reshape(shape)


def _attend(q, keys, values, low, high, scales, *, scale, softcap, swapped=(False, False)):
    """(out [..., R, h], top [..., R], total [..., R]), float32, of q [..., R, h], keys [..., h, P], values [..., P, h]
    (each with its last axes `swapped` or not), low and high [R, 1] and scales, none or two of [..., 1, P]; the leading
    axis, if any, is that of the heads."""
    scores = _product(q, keys.astype(q.dtype), swapped[0]) * scale
    if scales:
        scores = scores * scales[0]
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    at = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    seen = (at >= low) & (at < high)
    scores = jnp.where(seen, scores, MASKED)
    top = scores.max(-1)
    weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
    total = weights.sum(-1)
    if scales:
        weights = weights * scales[1]
    return _product(weights.astype(q.dtype), values.astype(q.dtype), swapped[1]), top, total


def _product(a, b, swapped):
    """a [..., n, m] times b [..., m, p], or [..., p, m] if `swapped`, in float32."""
    batch = tuple(range(a.ndim - 2))
    dimensions = ((a.ndim - 1,), (b.ndim - (1 if swapped else 2),)), (batch, batch)
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _cost(q, keys, values):
    """What a compiler should expect if every page is seen."""
    scores = math.prod(q.shape[:3]) * keys.shape[-1]
    moved = q.nbytes + keys.nbytes + values.nbytes + q.size * 4
    return pl.CostEstimate(flops=4 * scores * q.shape[-1], transcendentals=scores, bytes_accessed=moved)


def _tpu(q, keys, values, low, high, scales, constants, interpret):
    """Blocks of several pages, all heads: q [W, K, R, h], low and high [W, R]."""
    pages, kv_heads, rows, width = q.shape
    cost = _cost(q, keys, values)
    padding = (0, -rows % 8)
    q = jnp.pad(q, ((0, 0), (0, 0), padding, (0, 0)))
    limits = jnp.pad(jnp.stack([low, high], axis=1), ((0, 0), (0, 0), padding)).astype(jnp.float32)
    # An array whose last axis is not of whole registers, while the one before is, has that one as its last in memory.
    swapped = [bool(x.shape[-1] % LANES and not x.shape[-2] % LANES) for x in (keys, values)]
    keys, values = (x.swapaxes(2, 3) if swap else x for x, swap in zip((keys, values), swapped))
    inputs = [limits, q, keys, values, *(x[:, :, None] for x in scales)]
    results = [(kv_heads, q.shape[2], width), (kv_heads, q.shape[2]), (kv_heads, q.shape[2])]
    block = _pages_of_a_block(inputs, results, pages)
    live, source = _live_blocks(low, high, block)

    def spec(shape, index):
        return pl.BlockSpec((block, *shape), lambda i, *prefetched: (index(i, *prefetched), *(0 for _ in shape)))

    outputs = pl.pallas_call(
        functools.partial(_tpu_kernel, constants=dict(constants, swapped=swapped)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(source.shape[0],),
            in_specs=[spec(x.shape[1:], lambda i, _, source: source[i]) for x in inputs],
            out_specs=[spec(shape, lambda i, *_: i) for shape in results],
        ),
        out_shape=[jax.ShapeDtypeStruct((pages, *shape), jnp.float32) for shape in results],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        cost_estimate=cost,
        name="page_attention",
    )(live, source, *inputs)
    return [x[:, :, :rows] for x in outputs]


def _live_blocks(low, high, block):
    """(whether anyone sees each page [blocks * block], which block's data each block gets [blocks]), int32. A block
    that nobody sees gets that of the block before, which is there already; unseen blocks at the start get the first
    seen one."""
    live = jnp.any(high > low, axis=1)
    live = jnp.pad(live, (0, -live.shape[0] % block))
    seen = live.reshape(-1, block).any(1)
    newest = jax.lax.cummax(jnp.where(seen, jnp.arange(seen.shape[0], dtype=jnp.int32), -1))
    source = jnp.where(newest < 0, jnp.argmax(seen).astype(jnp.int32), newest)
    return live.astype(jnp.int32), source


def _pages_of_a_block(inputs, results, pages):
    """How many pages a grid step takes: up to `BLOCK_BYTES` of keys and values; ValueError where one does not fit."""
    read = [_tiled_bytes(x.shape[1:], x.dtype) for x in inputs]
    page = sum(read) + sum(_tiled_bytes(shape, jnp.float32) for shape in results)
    if 3 * page > VMEM_BYTES:  # two buffers, and the values of the page in work
        raise ValueError(f"a page with its queries takes {page} bytes; three times that exceeds {VMEM_BYTES} of VMEM")
    return max(1, min(pages, BLOCK_BYTES // (read[2] + read[3]), VMEM_BYTES // (3 * page)))


def _tiled_bytes(shape, dtype):
    """Bytes of one page's part of an array in VMEM, where the last two axes are in tiles of 8 words by 128."""
    size = jnp.dtype(dtype).itemsize
    *outer, second, lanes = shape
    return math.prod(outer) * pl.cdiv(second * size, 32) * 32 * pl.cdiv(lanes, LANES) * LANES


def _tpu_kernel(live, source, limits, q, keys, values, *rest, constants):
    """One block of pages; live [pages] in scalar memory, all else with the block's pages in front."""
    del source
    *scales, out, top, total = rest
    block = q.shape[0]
    start = pl.program_id(0) * block

    def one_page(page, _):
        seen = live[start + page] > 0

        @pl.when(seen)
        def _():
            diagonal = _diagonal(q.shape[2])
            low, high = (_into_sublanes(limits[page, i : i + 1], diagonal).astype(jnp.int32) for i in (0, 1))
            out[page], largest, summed = _attend(
                q[page], keys[page], values[page], low, high, [x[page] for x in scales], **constants
            )
            top[page], total[page] = _into_lanes(largest, diagonal), _into_lanes(summed, diagonal)

        @pl.when(jnp.logical_not(seen))
        def _():
            _nothing_seen(out.at[page], top.at[page], total.at[page])

    jax.lax.fori_loop(0, block, one_page, None)


def _diagonal(size):
    square = (size, size)
    return jax.lax.broadcasted_iota(jnp.int32, square, 0) == jax.lax.broadcasted_iota(jnp.int32, square, 1)


def _into_lanes(x, diagonal):
    """x [K, R], its rows spread over sublanes, as a vector of lanes for each head: the diagonal of its copies."""
    return jnp.where(diagonal, x[..., None], 0.0).sum(-2)


def _into_sublanes(x, diagonal):
    """x [1, R] as [R, 1]."""
    return jnp.where(diagonal, x, 0.0).sum(-1, keepdims=True)


def _nothing_seen(out, top, total):
    """Writes the results of rows that see no key."""
    for ref, value in ((out, 0.0), (top, MASKED), (total, 0.0)):
        ref[...] = jnp.full(ref.shape, value, jnp.float32)


def _gpu(q, keys, values, low, high, scales, constants, interpret):
    """One program for a page, a head and up to `GPU_ROWS` rows: q [W, K, R, h], low and high [W, R]."""
    pages, kv_heads, rows, width = q.shape
    length = keys.shape[-1]
    # Triton's arrays have powers of two, its products at least 16; what lies beyond the true sizes is masked.
    n, wide, chunk = (max(16, pl.next_power_of_2(x)) for x in (min(rows, GPU_ROWS), width, length))
    while chunk > 16 and chunk * wide * q.dtype.itemsize > GPU_CHUNK_BYTES:
        chunk //= 2
    long = pl.cdiv(length, chunk) * chunk
    limit = pl.BlockSpec((None, n), lambda page, head, part: (page, part))
    row = pl.BlockSpec((None, None, n), lambda page, head, part: (page, head, part))
    query = pl.BlockSpec((None, None, n, wide), lambda page, head, part: (page, head, part, 0))
    of_page = [
        pl.BlockSpec((None, None, *shape), lambda page, head, part, shape=shape: (page, head, *(0 for _ in shape)))
        for shape in [(wide, long), (long, wide), *([(long,)] * len(scales))]
    ]
    return pl.pallas_call(
        functools.partial(_gpu_kernel, rows=rows, width=width, length=length, chunk=chunk, constants=constants),
        grid=(pages, kv_heads, pl.cdiv(rows, n)),
        in_specs=[limit, limit, query, *of_page],
        out_specs=[query, row, row],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q.shape, q.shape[:3], q.shape[:3])],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        cost_estimate=_cost(q, keys, values),
        name="page_attention",
    )(low, high, q, keys, values, *scales)


def _gpu_kernel(low, high, q, keys, values, *rest, rows, width, length, chunk, constants):
    """One program: low and high [n], q [n, h], keys [h, P], values [P, h], scales [P], all padded. Goes by chunks of
    keys, from the first to the last that a row sees: none where none is seen."""
    *scales, out, top, total = rest
    n, wide = q.shape
    true_row = pl.program_id(2) * n + jnp.arange(n) < rows
    true_width = jnp.arange(wide) < width
    true_query = true_row[:, None] & true_width[None, :]
    low = plgpu.load(low, mask=true_row, other=0)
    high = plgpu.load(high, mask=true_row, other=0)
    begin = jnp.min(jnp.where(low < high, low, length)) // chunk
    end = (jnp.max(jnp.where(low < high, high, 0)) + chunk - 1) // chunk
    q = plgpu.load(q, mask=true_query, other=0)

    def one_chunk(index, carry):
        part = pl.ds(index * chunk, chunk)
        true_key = index * chunk + jnp.arange(chunk) < length
        found = _attend(
            q,
            plgpu.load(keys.at[:, part], mask=true_width[:, None] & true_key[None, :], other=0),
            plgpu.load(values.at[part, :], mask=true_key[:, None] & true_width[None, :], other=0),
            low[:, None] - index * chunk,
            high[:, None] - index * chunk,
            [plgpu.load(x.at[part], mask=true_key, other=0)[None, :] for x in scales],
            **constants,
        )
        return _merge(carry, found)

    nothing = jnp.zeros((n, wide), jnp.float32), jnp.full(n, MASKED, jnp.float32), jnp.zeros(n, jnp.float32)
    found = jax.lax.fori_loop(begin, end, one_chunk, nothing)
    plgpu.store(out, found[0], mask=true_query)
    plgpu.store(top, found[1], mask=true_row)
    plgpu.store(total, found[2], mask=true_row)


def _merge(one, other):
    """The results of two sets of keys as those of both."""
    top = jnp.maximum(one[1], other[1])
    a, b = jnp.exp(one[1] - top), jnp.exp(other[1] - top)
    return one[0] * a[:, None] + other[0] * b[:, None], top, one[2] * a + other[2] * b
