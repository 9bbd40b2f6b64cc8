"""Stage 2's clock: groups in flight, judged a fixed number of dispatches after they ended, accepted in one order.

The clock counts dispatches, never time: a group's verdict takes effect `VERDICT_LAG` dispatches after its last sample
ended, and the loop waits for rewards that are late. So which groups are kept does not depend on how fast a worker
answered, and a replay makes the same decisions.
"""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rljax.data import Mixture, PromptSource
from rljax.rewards.pool import RewardPool
from rljax.sample import ABORTED, COMPLETED, FAILED, PENDING, TRUNCATED, Sample

VERDICT_LAG = 2  # dispatches: hides rewards that take no longer than these
DONE = (COMPLETED, TRUNCATED, FAILED)  # a sample in one of these states is drawn no further
Group = list[Sample]
Verdict = Callable[[Group], str]  # "" keeps the group, anything else is why it is dropped


def make_group(prompt: Sample, group: int, size: int) -> list[Sample]:
    """`size` samples of one prompt instance; uid = group * size + index."""
    samples = []
    for index in range(size):
        sample = copy.deepcopy(dataclasses.replace(prompt, prompt_tokens=[]))
        sample.prompt_tokens = list(prompt.prompt_tokens)  # numbers need no deep copy, which is slow
        sample.group, sample.uid = group, group * size + index
        samples.append(sample)
    return samples


class Prompts:
    """Groups of samples in the order they are to be drawn: those that were interrupted first, then new prompts."""

    def __init__(self, source: PromptSource | Mixture, size: int):
        """`size` samples of each prompt."""
        self.source, self.size = source, size
        self.groups = 0  # prompt instances handed out
        self.waiting: collections.deque[Group] = collections.deque()

    def take(self, count: int) -> list[Group]:
        """The next groups."""
        taken = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        fresh = self.source.take(count - len(taken))
        taken += [make_group(prompt, self.groups + offset, self.size) for offset, prompt in enumerate(fresh)]
        self.groups += len(fresh)
        return taken

    def give_back(self, groups: Sequence[Group]) -> None:
        """Groups that the next rollout begins with."""
        self.waiting.extend(groups)

    def state(self) -> dict[str, Any]:
        """Where this stands, as JSON values."""
        return {"source": self.source.state(), "groups": self.groups,
                "waiting": [[sample.to_json() for sample in group] for group in self.waiting]}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.source.restore(state["source"])
        self.groups = state["groups"]
        self.waiting = collections.deque([Sample(**fields) for fields in group] for group in state["waiting"])


@dataclasses.dataclass
class Gathered:
    """What one rollout gave."""

    kept: list[Group]  # in order of (clock, group)
    left: list[Group]  # taken but not used: interrupted, or ended too late; in order of group
    drops: dict[str, int]  # groups dropped, by reason
    taken: int  # groups, over all rounds


class Gathering:
    """One rollout's groups: which are drawn, judged, kept and left."""

    def __init__(self, take: Callable[[int], list[Group]], wanted: int, in_flight: int, limit: int,
                 verdict: Verdict | None = None):
        """`take(n)` gives n groups; `in_flight` of them are kept under way until `wanted` have been kept or `limit`
        were taken."""
        self.take, self.wanted, self.in_flight, self.limit, self.verdict = take, wanted, in_flight, limit, verdict
        self.clock = self.taken = 0
        self.open: dict[int, Group] = {}
        self.missing: dict[int, int] = {}  # samples of an open group that have not ended
        self.due: dict[int, int] = {}  # group -> clock of its verdict
        # By group: samples and what gives their rewards, one result or a list of them.
        self.scoring: dict[int, list[tuple[Group, concurrent.futures.Future[Any]]]] = {}
        self.kept: list[Group] = []
        self.drops: collections.Counter[str] = collections.Counter()

    @property
    def finished(self) -> bool:
        """Whether enough were kept, or nothing more can come."""
        return len(self.kept) >= self.wanted or (not self.open and self.taken >= self.limit)

    def admit(self) -> list[Sample]:
        """New groups up to `in_flight`, as long as they may be needed; their samples that are still to be drawn."""
        room = min(self.in_flight - len(self.open) - len(self.kept), self.limit - self.taken)
        fresh = self.take(room) if room > 0 else []
        self.taken += len(fresh)
        waiting = []
        for group in fresh:
            number = group[0].group
            undone = [sample for sample in group if sample.status not in DONE]
            self.open[number], self.missing[number] = group, len(undone)
            if not undone:
                self.due[number] = self.clock + VERDICT_LAG
            waiting += undone
        return waiting

    def ended(self, sample: Sample, pool: RewardPool, together: bool = False) -> None:
        """`sample` was drawn to its end in the dispatch just counted: score it, or (`together`) its group once all of
        it has ended."""
        self.missing[sample.group] -= 1
        whole = not self.missing[sample.group]
        if whole:
            self.due[sample.group] = self.clock + VERDICT_LAG
        if not together:
            self.scoring.setdefault(sample.group, []).append(([sample], pool.submit(sample)))
        elif whole:
            group = self.open[sample.group]
            self.scoring[sample.group] = [(group, pool.submit_group(group))]

    def tick(self) -> None:
        """Count one dispatch, and judge the groups that are due, in order of their number."""
        self.clock += 1
        for number in sorted(number for number, clock in self.due.items() if clock <= self.clock):
            if len(self.kept) == self.wanted:
                return
            del self.due[number], self.missing[number]
            group = self.open.pop(number)
            reason = ""
            if self.verdict:
                self.settle(number)
                reason = self.verdict(group)
            if reason:
                self.drops[reason] += 1
            else:
                self.kept.append(group)

    def settle(self, number: int) -> None:
        """Wait for the rewards of those samples of a group that are being scored."""
        for samples, future in self.scoring.pop(number, ()):
            found = future.result()
            for sample, result in zip(samples, found if isinstance(found, list) else [found], strict=True):
                sample.reward, sample.rewards = result.reward, dict(result.parts)

    def close(self) -> Gathered:
        """Settle what ended but was not kept, and hand everything over."""
        left = [self.open[number] for number in sorted(self.open)]
        for number in list(self.scoring):
            self.settle(number)
        return Gathered(self.kept, left, dict(self.drops), self.taken)


def restart(sample: Sample) -> None:
    """Forget what was drawn; uid, group and prompt stay, so that the same tokens are drawn under the same weights."""
    sample.response_tokens, sample.logprobs, sample.loss_mask, sample.versions = [], [], [], []
    sample.status, sample.end_reason, sample.text = PENDING, "", ""
    sample.reward, sample.rewards, sample.train_metadata = None, {}, {}


def interrupt(groups: Sequence[Group], partial: bool) -> None:
    """Make groups that were not used ready for the next rollout: as they are (`partial`), or from the start, for
    otherwise short answers would be favoured."""
    for group in groups:
        for sample in group:
            if not partial:
                restart(sample)
            elif sample.status not in DONE:
                sample.status = ABORTED if sample.response_tokens else PENDING


def prepare(groups: Sequence[Group], version: int, max_version_lag: int, mask_old: bool) -> int:
    """Before interrupted samples go on under the weights `version`: one that has a token older than max_version_lag
    versions (0 = no limit) starts again, and with `mask_old` what was drawn before is not trained. Returns how many
    started again."""
    again = 0
    for group in groups:
        for sample in group:
            if max_version_lag and sample.versions and version - min(sample.versions) > max_version_lag:
                restart(sample)
                again += 1
            if mask_old:
                sample.loss_mask = [mask * (one >= version) for mask, one in zip(sample.loss_mask, sample.versions)]
    return again
