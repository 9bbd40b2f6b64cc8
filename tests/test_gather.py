"""Which groups are kept: the clock decides, not the workers' speed; every prompt is accounted for exactly once."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import random
import types

from hypothesis import given, settings
from hypothesis import strategies as st

from rljax.gather import VERDICT_LAG, Gathering, Prompts, interrupt, make_group, prepare
from rljax.rewards.pool import RewardResult
from rljax.sample import ABORTED, COMPLETED, PENDING, Sample


class Source:
    """Prompts 0, 1, 2, ... for ever."""

    def __init__(self):
        self.at = 0

    def take(self, count):
        self.at += count
        return [Sample(uid=0, group=0, prompt=str(n), prompt_tokens=[n]) for n in range(self.at - count, self.at)]

    def state(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]


class Pool:
    """Scores at once: a sample by `rewards(uid)`."""

    def __init__(self, rewards):
        self.rewards = rewards

    def submit(self, sample):
        future = concurrent.futures.Future()
        future.set_result(RewardResult(self.rewards(sample.uid), {}))
        return future

    def submit_group(self, samples):
        future = concurrent.futures.Future()
        future.set_result([RewardResult(self.rewards(sample.uid), {"size": len(samples)}) for sample in samples])
        return future


def rollout(prompts, wanted, in_flight, limit, lengths, rewards, verdict=None, slots=4,
            together=False):
    """Decode one token of each slot at a time; `lengths` and `rewards` by uid."""
    gathering, queue = Gathering(prompts.take, wanted, in_flight, limit, verdict), []
    queue += gathering.admit()
    while not gathering.finished:
        for sample in queue[:slots]:
            sample.response_tokens.append(1)
            sample.versions.append(0)
        for sample in [s for s in queue[:slots] if len(s.response_tokens) >= lengths(s.uid)]:
            queue.remove(sample)
            sample.status = COMPLETED
            gathering.ended(sample, Pool(rewards), together)
        gathering.tick()
        queue += gathering.admit()
    return gathering.close()


def test_without_a_filter_all_are_kept_in_order_of_their_ends():
    found = rollout(Prompts(Source(), 2), 3, 3, 3, lambda uid: [9, 1, 2, 2, 1, 1][uid], lambda uid: float(uid))
    assert [group[0].group for group in found.kept] == [1, 2, 0]
    assert found.left == [] and found.drops == {} and found.taken == 3
    assert [sample.reward for group in found.kept for sample in group if sample.group == 0] == [0.0, 1.0]


def test_groups_that_end_together_are_kept_in_order_of_their_number():
    found = rollout(Prompts(Source(), 1), 2, 4, 4, lambda uid: 1, lambda uid: 0.0)
    assert [group[0].group for group in found.kept] == [0, 1]
    assert [group[0].group for group in found.left] == [2, 3]
    assert all(sample.reward == 0.0 for group in found.left for sample in group)


def test_the_verdict_falls_a_fixed_number_of_dispatches_later():
    gathering = Gathering(Prompts(Source(), 1).take, 1, 1, 1, lambda group: "")
    (sample,) = gathering.admit()
    late = concurrent.futures.Future()
    gathering.ended(sample, types.SimpleNamespace(submit=lambda sample: late))
    for _ in range(VERDICT_LAG - 1):
        gathering.tick()  # does not wait
        assert not gathering.kept
    late.set_result(RewardResult(1.0, {"part": 2.0}))
    gathering.tick()
    assert gathering.kept == [[sample]] and sample.reward == 1.0 and sample.rewards == {"part": 2.0}


def test_a_group_is_scored_at_once_when_all_of_it_has_ended():
    found = rollout(Prompts(Source(), 3), 2, 2, 2, lambda uid: 1 + uid, lambda uid: float(uid), together=True)
    assert [sample.reward for group in found.kept for sample in group] == [0, 1, 2, 3, 4, 5]
    assert all(sample.rewards == {"size": 3} for group in found.kept for sample in group)


def test_drops_are_replaced_and_counted_up_to_the_limit():
    found = rollout(Prompts(Source(), 1), 4, 4, 12, lambda uid: 1 + uid % 3, lambda uid: float(uid % 4 == 0),
                    lambda group: "" if group[0].reward else "wrong")
    assert [group[0].group for group in found.kept] == [0, 4, 8] and found.drops == {"wrong": 9} and found.taken == 12


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(0, 5), st.integers(1, 3), st.booleans(), st.booleans())
def test_every_prompt_is_accounted_for_exactly_once(seed, wanted, more, size, partial, filtered):
    draw = random.Random(seed)
    lengths, rewards = [draw.randint(1, 12) for _ in range(997)], [float(draw.random() < 0.5) for _ in range(991)]
    verdict = (lambda group: "" if group[0].reward else "wrong") if filtered else None

    def run():
        prompts, seen = Prompts(Source(), size), []
        for number in range(6):
            prepare(prompts.waiting, number, 0, False)
            before = json.loads(json.dumps(prompts.state()))
            found = rollout(prompts, wanted, wanted + more, 3 * (wanted + more), lambda uid: lengths[uid % 997],
                            lambda uid: rewards[uid % 991], verdict)
            dropped = sum(found.drops.values())
            assert found.taken == len(found.kept) + len(found.left) + dropped
            interrupt(found.left, partial)
            prompts.give_back(found.left)
            seen.append(([sample.uid for group in found.kept for sample in group], dropped))
            again = Prompts(Source(), size)  # resumes as if nothing had been interrupted
            again.restore(before)
            assert again.state() == before
        kept = list(itertools.chain.from_iterable(uids for uids, _ in seen))
        waiting = [sample.uid for group in prompts.waiting for sample in group]
        assert len(set(kept + waiting)) == len(kept + waiting)
        assert (len(kept) + len(waiting)) // size + sum(count for _, count in seen) == prompts.groups
        if not partial:
            assert all(not s.response_tokens and s.reward is None for group in prompts.waiting for s in group)
        return seen

    assert run() == run()


def test_interrupted_samples_go_on_or_start_again():
    group = make_group(Sample(uid=0, group=0, prompt_tokens=[5]), 3, 3)
    for sample, tokens in zip(group, ([1, 2], [], [4])):
        count = len(tokens)
        sample.response_tokens, sample.logprobs = list(tokens), [-1.0] * count
        sample.loss_mask, sample.versions = [1] * count, [2] * count
    group[2].status, group[2].reward = COMPLETED, 1.0
    interrupt([group], True)
    assert [sample.status for sample in group] == [ABORTED, PENDING, COMPLETED]
    assert prepare([group], 3, 1, True) == 0
    assert [sample.loss_mask for sample in group] == [[0, 0], [], [0]]  # a finished one too
    assert prepare([group], 4, 1, False) == 2  # both are two versions old now
    assert [(sample.status, sample.response_tokens, sample.reward) for sample in group] == [(PENDING, [], None)] * 3
    assert [sample.uid for sample in group] == [9, 10, 11] and group[0].prompt_tokens == [5]
