"""The host's page tables: no page in two hands, lowest first, prompts shared and forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.sampler.decode import EngineConfig
from rljax.sampler.pages import PageTables, Pool

SLOTS, SIZE = 6, 4


def tables(own=20, prompt=9, members=2):
    return PageTables(SLOTS, own, prompt, (8, 3), members, SIZE)


def check(made):
    """Every page is free or has one owner; a stored prompt's pages stand in its readers' tables."""
    own = made.own[made.own >= 0].tolist()
    stored = [page for prompt in made.prompts for page in prompt.pages]
    for pool, used in ((made.own_pool, own), (made.prompt_pool, stored)):
        assert sorted(used + pool._free) == list(range(pool.pages))
    for prompt in made.prompts:
        assert len(prompt.pages) == -(-len(prompt.tokens) // SIZE)
        for number, slot in enumerate(prompt.members):
            if slot is not None:
                assert made.prompt[slot, : len(prompt.pages)].tolist() == prompt.pages
                assert (made.prompt[slot, len(prompt.pages) :] < 0).all()
                assert made.member[slot] == number and made.prompt_len[slot] == len(prompt.tokens)
    part = made.of([4, 1], 3)
    assert part.own[0].tolist() == made.own[4].tolist() and part.prompt[1].tolist() == made.prompt[1].tolist()
    assert (part.own[2] < 0).all() and (part.prompt[2] < 0).all() and part.own_len[2] == part.prompt_len[2] == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["enter", "grow", "leave"]), st.integers(0, SLOTS - 1), st.integers(0, 11)),
                max_size=80))
def test_any_order_of_entering_growing_and_leaving(moves):
    made, busy = tables(), set()
    for move, slot, length in moves:
        tokens = (7,) * length
        if move == "enter" and slot not in busy:
            prompt = made.find(tokens) or made.store(tokens)
            if prompt is not None:
                made.join(slot, prompt)
                busy.add(slot)
        elif move == "grow" and slot in busy and made.own_len[slot] < 8 * SIZE - 2:
            free = len(made.own_pool)
            if made.grow(slot):
                assert made.own[slot, made.own_len[slot] // SIZE] >= 0 and free - len(made.own_pool) in (0, 1)
                made.own_len[slot] += 2
            else:
                assert free == 0
        elif move == "leave" and slot in busy:
            made.leave(slot)
            made.drop()
            busy.remove(slot)
        check(made)
    for slot in busy:
        made.leave(slot)
    made.drop()
    assert (len(made.own_pool), len(made.prompt_pool), made.prompts) == (20, 9, [])


def test_a_prompt_is_stored_again_when_its_members_are_full():
    made = tables(members=2)
    prompt = made.store((1, 2, 3))
    for slot in (0, 1):
        made.join(slot, prompt)
    assert made.find((1, 2, 3)) is None and prompt.readers == 2
    again = made.store((1, 2, 3))
    assert made.find((1, 2, 3)) is again and again.pages != prompt.pages
    made.leave(1)
    assert made.find((1, 2, 3)) is prompt
    made.drop(keep={(1, 2, 3)})
    assert len(made.prompts) == 2
    made.drop()
    assert made.prompts == [prompt]


def test_the_lowest_pages_are_taken_first_and_too_few_are_none():
    pool = Pool(5)
    assert pool.take(3) == [0, 1, 2]
    pool.give(np.asarray([1]))
    assert pool.take(2) == [1, 3] and len(pool) == 1
    with pytest.raises(IndexError):
        pool.take(2)
    made = tables(prompt=2)
    assert made.store((1,) * 9) is None and made.store((1,) * 8).pages == [0, 1]


@given(st.integers(1, 40), st.integers(1, 20), st.integers(1, 64), st.integers(1, 16), st.integers(0, 200))
def test_any_budget_that_holds_one_sample_holds_one_in_each_pool(own, prompt, slots, members, more):
    """A response that outgrows the pool of its own would give way to itself for ever."""
    shape = EngineConfig(slots, cache_len=(own + prompt) * 8, prompt_buckets=(prompt * 8,), prefill_rows=1,
                         steps_per_dispatch=8, stop_ids=(), vocab_known=2, new_tokens=own * 8, members=members,
                         cache_tokens=(own + prompt + more) * 8, page_len=8)
    assert shape.columns == (own, prompt)
    own_pages, prompt_pages = shape.pages(1)
    assert own_pages >= own and prompt_pages >= prompt and own_pages + prompt_pages <= own + prompt + more
