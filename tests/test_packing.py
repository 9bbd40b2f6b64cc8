"""packing.py: partitions against brute force, packed rows token by token, and a loss that packing does not move."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import cases

from rljax import packing, partition

ROWS = cases("numerics") + cases("reliability")
FLOATS = ("loss_weight", "advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")


def quantities(*names):
    return [row for row in ROWS if row["input"].get("quantity") in names]


def scenario(row_id):
    """A case that is a situation; skips the test where the case files are missing."""
    found = [row for row in ROWS if row["id"] == row_id]
    if not found:
        pytest.skip(f"case {row_id} is missing")
    return found[0]["input"], found[0]["expected"]


def make_item(tokens, prompt_len, mask=None, **fields):
    """A PackItem whose other arrays are zeros."""
    zeros = np.zeros(len(tokens) - prompt_len, np.float32)
    mask = np.ones(len(zeros), int) if mask is None else np.asarray(mask)
    arrays = {name: fields.pop(name, zeros) for name in FLOATS}
    return packing.PackItem(np.asarray(tokens), prompt_len, mask, **arrays, **fields)


def random_items(rng, lengths, extras=("confidence",)):
    """Items of these lengths in which every response token holds numbers of its own, with non-finite ones masked."""
    items = []
    for length in lengths:
        prompt_len = int(rng.integers(1, length + 1))
        mask = rng.integers(0, 2, length - prompt_len)
        values = {name: rng.normal(size=len(mask)).astype(np.float32) for name in (*FLOATS, *extras)}
        values["rollout_logprobs"][mask == 0] = np.nan
        kept = {name: values.pop(name) for name in FLOATS}
        items.append(make_item(rng.integers(1, 1000, length), prompt_len, mask, extras=values, **kept))
    return items


def sums(lengths, parts):
    return [sum(lengths[index] for index in part) for part in parts]


def assert_split(lengths, parts, num_partitions, capacity):
    assert len(parts) == num_partitions
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert max(sums(lengths, parts)) <= capacity
    assert sum(bool(part) for part in parts) == min(len(lengths), num_partitions)


def fewest_parts(lengths, capacity):
    """By dynamic programming over all subsets: (parts, room used in the last one), the least for each subset."""
    best = {0: (1, 0)}
    for subset in range(1, 1 << len(lengths)):
        options = []
        for index, length in enumerate(lengths):
            if subset >> index & 1:
                parts, used = best[subset ^ (1 << index)]
                options.append((parts, used + length) if used + length <= capacity else (parts + 1, length))
        best[subset] = min(options)
    return best[(1 << len(lengths)) - 1][0]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.integers(0, 14))
def test_partitions_exist_exactly_where_brute_force_finds_one(lengths, extra):
    capacity = max(1, *lengths) + extra
    fewest = fewest_parts(lengths, capacity)
    assert fewest <= packing.min_partitions(lengths, capacity) <= 11 * fewest / 9 + 1
    for num_partitions in range(fewest, len(lengths) + 2):
        assert_split(lengths, packing.balanced_partitions(lengths, num_partitions, capacity), num_partitions, capacity)
    if fewest > 1:
        with pytest.raises(ValueError, match=rf"into {fewest - 1} parts of at most {capacity}\b"):
            packing.balanced_partitions(lengths, fewest - 1, capacity)


@pytest.mark.parametrize(
    ("parts", "capacity", "waste", "pieces"),
    [(4, 20, 0, 4), (10, 1000, 0, 3), (16, 1000, 3, 4), (12, 9216, 200, 3), (16, 10**9, 0, 3), (40, 100, 1, 5)],
)
def test_a_hidden_split_is_found(parts, capacity, waste, pieces):
    rng = np.random.default_rng(parts)
    for _ in range(4):
        lengths = []
        for _ in range(parts):
            full = capacity - int(rng.integers(0, waste + 1))
            cuts = np.sort(rng.choice(np.arange(1, min(full, 10**6)), pieces - 1, replace=False)) * (full // 10**6 or 1)
            lengths += np.diff([0, *cuts, full]).tolist()
        rng.shuffle(lengths)
        assert_split(lengths, packing.balanced_partitions(lengths, parts, capacity), parts, capacity)


def test_partitions_by_hand():
    # Karmarkar-Karp gives 7 and 5 here.
    assert sums([3, 3, 2, 2, 2], packing.balanced_partitions([3, 3, 2, 2, 2], 2, 6)) == [6, 6]
    assert sums([8, 7, 6, 5, 4], packing.balanced_partitions([8, 7, 6, 5, 4], 2, 100)) == [16, 14]
    # First-fit decreasing needs three parts and Karmarkar-Karp exceeds the capacity, but a split exists.
    for lengths, capacity in [([5, 6, 6, 6, 9, 5], 19), ([4, 5, 9, 9, 4, 3, 5], 20), ([3, 3, 7, 2, 4, 4, 7], 15)]:
        assert packing.min_partitions(lengths, capacity) == 3
        assert_split(lengths, packing.balanced_partitions(lengths, 2, capacity), 2, capacity)
    assert packing.balanced_partitions([], 2, 5) == [[], []]
    assert packing.min_partitions([], 5) == 0
    assert packing.balanced_partitions(np.array([4.0, 4.0], np.float32), 2, 4) in ([[0], [1]], [[1], [0]])


def test_parts_are_balanced():
    lengths = np.random.default_rng(0).integers(50, 3000, 256)
    filled = sums(lengths, packing.balanced_partitions(lengths, 8, 1 << 20))
    assert max(filled) - min(filled) <= 4


def test_what_no_search_is_needed_to_refuse():
    for lengths, parts, capacity in [([5, 9, 2], 3, 8), ([4] * 5, 2, 9), ([501] * 41 + [3] * 60, 40, 1000)]:
        with pytest.raises(ValueError, match=rf"into {parts} parts of at most {capacity}\b"):
            packing.balanced_partitions(lengths, parts, capacity)
    with pytest.raises(ValueError, match="item 1 has length 9: the capacity is 8"):
        packing.min_partitions([5, 9, 2], 8)
    with pytest.raises(ValueError, match="num_partitions is 0 for 2 items"):
        packing.balanced_partitions([1, 1], 0, 8)


def test_a_search_that_gives_up_says_so(monkeypatch):
    monkeypatch.setattr(partition, "SEARCH_STEPS", 1)
    with pytest.raises(ValueError, match="found no split of 6 items .* into 2 parts of at most 19 in 1 steps"):
        packing.balanced_partitions([5, 6, 6, 6, 9, 5], 2, 19)


@pytest.mark.parametrize("row_id", ["PCK-004", "PCK-006"])
def test_partition_case(row_id):
    given_, expected = scenario(row_id)
    args = given_["args"]
    if "raises" in expected:
        with pytest.raises(ValueError) as error:
            packing.balanced_partitions(**args)
        assert all(str(number) in str(error.value) for number in expected["message_names"])
        fewest = packing.min_partitions(args["lengths"], args["capacity"])
        assert fewest == expected["min_partitions"]
        parts = packing.balanced_partitions(args["lengths"], fewest, args["capacity"])
        assert_split(args["lengths"], parts, fewest, args["capacity"])
    else:
        parts = packing.balanced_partitions(**args)
        assert_split(args["lengths"], parts, args["num_partitions"], args["capacity"])
        assert sum(bool(part) for part in parts) == expected["non_empty_parts"]


def test_uneven_samples_over_shards_case():
    given_, expected = scenario("PCK-005")
    items = random_items(np.random.default_rng(0), [length + 1 for length in given_["lengths"]])
    (batch,) = packing.pack(items, buckets=(16,), max_tokens_per_device=16, data_shards=given_["shards"])
    assert batch.tokens.shape == (4, 16)
    per_shard = [len(set(row[row >= 0])) for row in batch.sample_index]
    assert sorted(per_shard) == sorted(expected["samples_per_shard"])


@pytest.mark.parametrize("row", quantities("aggregate_loss", "step_loss"), ids=lambda row: row["id"])
def test_aggregation_case(row):
    args = row["input"]["args"]
    token_losses = args.get("token_losses", args.get("sample_losses"))
    weights = packing.loss_weights(args["loss_masks"], args["mode"], args.get("length"))
    total = 0.0
    for losses, mask, weight in zip(token_losses, args["loss_masks"], weights):
        assert weight.dtype == np.float32
        total += float(np.sum(weight * np.where(np.array(mask) == 1, np.array(losses, np.float32), 0.0)))
    np.testing.assert_allclose(total, row["expected"]["value"], rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=6), st.sampled_from(packing.LOSS_MODES))
def test_weights_sum_to_what_the_mode_says(masks, mode):
    weights = packing.loss_weights(masks, mode, length=8)
    trained = [mask for mask in masks if sum(mask)]
    expected = float(bool(trained))
    if mode == "constant":
        expected = sum(map(sum, trained)) / 8 / max(len(trained), 1)
    assert sum(weight.sum() for weight in weights) == pytest.approx(expected, rel=1e-5)
    assert [(weight > 0).tolist() for weight in weights] == [[value == 1 for value in mask] for mask in masks]


@pytest.mark.parametrize(
    ("masks", "mode", "length", "words"),
    [
        ([[1]], "mean", None, ("'mean'", "token_mean")),
        ([[1]], "constant", None, ("length", "None")),
        ([[1]], "constant", 0, ("length", "0")),
        ([[1], [1, 2]], "token_mean", None, ("sample 1", "2")),
    ],
)
def test_bad_weights_are_named(masks, mode, length, words):
    with pytest.raises(ValueError) as error:
        packing.loss_weights(masks, mode, length)
    assert all(word in str(error.value) for word in words)


def test_updates_are_contiguous_and_in_order():
    given_, expected = scenario("NUM-054b")
    updates = packing.split_updates(given_["samples"], given_["global_batch_size"])
    assert len(updates) == expected["updates"]
    assert list(itertools.chain(*updates)) == list(range(given_["samples"]))
    with pytest.raises(ValueError, match="global_batch_size is 0"):
        packing.split_updates(4, 0)


@pytest.mark.parametrize("row", quantities("micro_sizes"), ids=lambda row: row["id"])
def test_micro_sizes(row):
    sizes = [len(update) for update in packing.split_updates(*row["input"]["args"].values())]
    assert sizes == row["expected"]["value"]


@pytest.mark.parametrize("row", quantities("pack_row"), ids=lambda row: row["id"])
def test_row_case(row):
    args, expected = row["input"]["args"], row["expected"]["value"]
    items = [
        make_item(s["prompt"] + s["response"], len(s["prompt"]), advantages=np.full(len(s["response"]), advantage))
        for s, advantage in zip(args["samples"], args["advantages"])
    ]
    width = len(expected["tokens"])
    (batch,) = packing.pack(items, buckets=(width,), max_tokens_per_device=width, data_shards=1)
    for name, values in expected.items():
        assert getattr(batch, name)[0].tolist() == values


def test_segments_and_masks_of_the_scenarios():
    given_, expected = scenario("PCK-001")
    items = [make_item(tokens, 1) for tokens in given_["samples"]]
    (batch,) = packing.pack(items, buckets=(5,), max_tokens_per_device=5, data_shards=1)
    assert batch.positions[0].tolist() == expected["positions"]
    assert batch.segment_ids[0].tolist() == expected["segment_ids"]
    given_, expected = scenario("NUM-049")
    item = make_item(given_["prompt"] + given_["response"], len(given_["prompt"]))
    (batch,) = packing.pack([item], buckets=(len(given_["row"]),), max_tokens_per_device=1, data_shards=1)
    assert batch.tokens[0].tolist() == given_["row"]
    assert batch.loss_mask[0].tolist() == expected["loss_mask"]
    given_, expected = scenario("NUM-031")
    advantages = np.full(4, given_["advantage"])
    items = [make_item([9, *mask], 1, mask, advantages=advantages) for mask in given_["loss_masks"]]
    (batch,) = packing.pack(items, buckets=(5,), max_tokens_per_device=5, data_shards=2)
    rows = batch.advantages[np.argsort(batch.sample_index[:, 0])]
    assert rows[:, 1:].tolist() == expected["advantages"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=24),
    st.integers(1, 70),
    st.integers(1, 4),
    st.sampled_from([(16,), (8, 16, 32), (32, 16, 4)]),
)
def test_every_token_once_whole_and_aligned(lengths, budget, shards, buckets):
    items = random_items(np.random.default_rng(sum(lengths)), lengths)
    batches = packing.pack(items, buckets=buckets, max_tokens_per_device=budget, data_shards=shards)
    width = min(bucket for bucket in buckets if bucket >= max(lengths))
    rows = batches[0].tokens.shape[0]
    assert rows % shards == 0 and rows // shards <= max(1, budget // width)
    assert (len(batches) - 1) * rows < packing.min_partitions(lengths, width) <= len(batches) * rows
    seen = []
    for batch in batches:
        assert {np.shape(x) for x in (batch.tokens, batch.extras["confidence"])} == {(rows, width)}
        for row in range(rows):
            start = 0
            while start < width and batch.segment_ids[row, start]:
                index = batch.sample_index[row, start]
                seen.append(index)
                start = check_segment(batch, row, start, items[index])
            assert (batch.sample_index[row, start:] == -1).all()
            padded = (batch.tokens, batch.positions, batch.segment_ids, batch.loss_mask, batch.loss_weight)
            assert not any(array[row, start:].any() for array in padded)
    assert sorted(seen) == list(range(len(items)))


def check_segment(batch, row, start, item):
    """Asserts that the segment that begins at `start` is `item`; returns where it ends."""
    stop, response = start + len(item.tokens), slice(start + item.prompt_len, start + len(item.tokens))
    segment = batch.segment_ids[row, start]
    assert segment == (batch.segment_ids[row, start - 1] + 1 if start else 1)
    assert (batch.segment_ids[row, start:stop] == segment).all()
    assert batch.tokens[row, start:stop].tolist() == item.tokens.tolist()
    assert batch.positions[row, start:stop].tolist() == list(range(stop - start))
    assert batch.loss_mask[row, response].tolist() == item.loss_mask.tolist()
    expected = {name: getattr(item, name) for name in FLOATS} | item.extras
    for name, values in expected.items():
        array = batch.extras[name] if name in item.extras else getattr(batch, name)
        if name in ("loss_weight", "advantages"):
            values = np.where(item.loss_mask == 1, values, 0.0)
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array[row, response], np.nan_to_num(values, nan=0.0))
        assert not array[row, start : response.start].any()
    return stop


def test_rows_and_shards_are_balanced():
    lengths = np.random.default_rng(5).integers(4, 64, 100)
    items = [make_item(np.ones(length), 1) for length in lengths]
    batches = packing.pack(items, buckets=(64,), max_tokens_per_device=256, data_shards=4)
    assert batches[0].tokens.shape == (16, 64)
    used = sum((batch.segment_ids[:, 0] > 0).sum() for batch in batches)
    assert used <= packing.min_partitions(lengths, 64) + len(batches) * 4
    for batch in batches:
        per_shard = (batch.segment_ids > 0).reshape(4, -1).sum(axis=1)
        assert per_shard.max() - per_shard.min() <= 64


def test_rows_of_a_small_step_are_the_power_of_two_that_suffices():
    items = [make_item(np.ones(8), 1) for _ in range(5)]
    for shards, rows in [(1, 8), (2, 8), (4, 8), (8, 8)]:
        (batch,) = packing.pack(items, buckets=(8,), max_tokens_per_device=1024, data_shards=shards)
        assert batch.tokens.shape == (rows, 8)
    batches = packing.pack(items, buckets=(8,), max_tokens_per_device=24, data_shards=1)
    assert [batch.tokens.shape for batch in batches] == [(3, 8), (3, 8)]


def test_unpack_gives_each_sample_its_response():
    items = random_items(np.random.default_rng(7), [3, 9, 1, 16, 5, 5, 12, 2])
    batches = packing.pack(items, buckets=(16,), max_tokens_per_device=16, data_shards=2)
    assert len(batches) > 1
    for item, values in zip(items, packing.unpack(batches, [batch.tokens for batch in batches], items), strict=True):
        assert values.tolist() == item.tokens[item.prompt_len :].tolist()
    assert packing.unpack([], [], []) == []
    with pytest.raises(ValueError, match=r"shapes .*\(2, 3\).*\(2, 16\)"):
        packing.unpack(batches[:1], [np.zeros((2, 3))], items)
    with pytest.raises(ValueError, match="hold 53 tokens, the samples 50"):
        packing.unpack(batches, [batch.tokens for batch in batches], items[1:])


def test_loss_and_its_parts_do_not_depend_on_packing():
    rng = np.random.default_rng(6)
    masks = [rng.integers(0, 2, length) for length in rng.integers(1, 30, 40)]
    weights = packing.loss_weights(masks, "sample_mean")
    losses = [rng.normal(size=len(mask)).astype(np.float32) for mask in masks]
    expected = sum(np.sum(weight.astype(np.float64) * loss) for weight, loss in zip(weights, losses))
    items = [
        make_item(np.ones(len(mask) + 2), 2, mask, loss_weight=weight, extras={"loss": loss})
        for mask, weight, loss in zip(masks, weights, losses)
    ]
    for budget, shards, buckets in [(32, 1, (32,)), (64, 4, (32, 64)), (512, 8, (64,)), (4096, 1, (128,))]:
        batches = packing.pack(items, buckets=buckets, max_tokens_per_device=budget, data_shards=shards)
        total = sum(np.sum(batch.loss_weight.astype(np.float64) * batch.extras["loss"]) for batch in batches)
        np.testing.assert_allclose(total, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("items", "settings_", "words"),
    [
        ([make_item(np.ones(4), 1), make_item(np.ones(9), 1)], {}, ("sample 1", "9 tokens", "8")),
        ([make_item(np.ones(4), 1)], {"buckets": ()}, ("4 tokens", "0")),
        ([make_item(np.ones(4), 0)], {}, ("sample 0", "prompt_len is 0")),
        ([make_item(np.ones(4), 1, [1, 1])], {}, ("sample 0", "loss_mask has 2", "3 response")),
        ([make_item(np.ones(4), 1, extras={"a": np.ones(4)})], {}, ("a has 4", "3 response")),
        ([make_item(np.ones(4), 1, advantages=np.ones(2))], {}, ("advantages has 2", "3 response")),
        ([make_item(np.ones(4), 1), make_item(np.ones(4), 1, extras={"a": np.ones(3)})], {}, ("sample 1", "['a']")),
        ([make_item(np.ones(4), 1)], {"data_shards": 0}, ("max_tokens_per_device 8", "data_shards 0")),
    ],
)
def test_bad_samples_are_named(items, settings_, words):
    with pytest.raises(ValueError) as error:
        packing.pack(items, **{"buckets": (8,), "max_tokens_per_device": 8, "data_shards": 1, **settings_})
    assert all(word in str(error.value) for word in words)


def test_no_samples_give_no_batches():
    assert packing.pack([], buckets=(8,), max_tokens_per_device=8, data_shards=2) == []
