"""A plan tried without the model: the round itself, over a recorded text, on a clock that adds up what passes cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hispec_ray.config import SpeculationSettings
from hispec_ray.core.plan import Drafts, DraftStarts, IntArray, LevelCounts, Rows, SequencePlan, StepPlan
from hispec_ray.shard.shard import drafter_for, levels_for, round_for
from hispec_ray.speculation.choice import Choices
from hispec_ray.speculation.drafters import Drafter, Guess
from hispec_ray.tuning.costs import Costs, Work
from hispec_ray.tuning.recording import Recording

_SIZE = 16
_SPARE = 8  # blocks for branches


class _Stage:
    """The decoder's place in a replay: a hidden row is the index of what is said after it.

    After a text that the model did not write nothing is recorded, and the index is negative, one for each position. There an exit
    says nobody's token, the same as the other exits as often as it agrees with the full depth elsewhere, and is as sure as elsewhere.
    """

    block_size = _SIZE

    def __init__(self, costs: Costs, layers: int) -> None:
        self.costs = costs
        self.work = Work()
        self._layers = self._depth = layers

    def seconds(self) -> float:
        return self.costs.seconds(self.work)

    def take(self, recording: Recording) -> None:
        """Go on with another text."""
        self.recording = recording
        self._good = recording.prompt  # positions of the recorded text that stand in the cache, from the first
        self._tokens: dict[int, int] = {}  # by slot
        self._agreement = {depth: sum(right) / len(right) for depth in recording.said if (right := recording.agreement(depth))}

    def empty_rows(self, count: int) -> torch.Tensor:
        return torch.empty(count, 1, dtype=torch.float64)

    def embed(self, rows: Rows) -> torch.Tensor:
        said = []
        for token, position, line, slot in zip(
            rows.tokens.tolist(), rows.positions.tolist(), rows.table.tolist(), rows.slots.tolist(), strict=False
        ):
            self._tokens[slot] = token
            right = position <= self._good and position < len(self.recording.tokens) and token == self.recording.tokens[position]
            if line == 0 and position <= self._good:
                self._good = position + 1 if right else position
            said.append(position - self.recording.prompt + 1 if right else -1 - position)
        return torch.tensor(said, dtype=torch.float64)[:, None]

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        self.work.in_passes += self.costs.begin + (last - first) * self.costs.layer.of(len(rows))
        return hidden

    def logits(self, depth: int, hidden: torch.Tensor) -> torch.Tensor:
        self.work.in_passes += self.costs.heads[depth].of(len(hidden))
        self.work.passes += 1
        self._depth = depth
        return hidden

    def vocabulary(self, depth: int) -> None:
        return None

    def whole(self, depth: int, logits: torch.Tensor) -> tuple[torch.Tensor, None]:
        return logits, None

    def copy_slots(self, source: IntArray, target: IntArray) -> None:
        for a, b in zip(source.tolist(), target.tolist(), strict=True):
            token = self._tokens.get(a)
            if token is None:
                continue
            self._tokens[b] = token
            if b < len(self.recording.tokens) and b <= self._good:  # a branch takes its place in the sequence
                self._good = b + 1 if token == self.recording.tokens[b] else b

    def draft(self, depth: int, starts: DraftStarts, held: torch.Tensor, stop: float, choose: object = None) -> Drafts:
        guesses: list[int] = []
        seconds: list[int] = []
        gaps: list[float] = []
        token, position = int(starts.tokens[0]), int(starts.positions[0])
        while True:
            place = np.array([position])
            row = self.embed(Rows(np.array([token]), place, np.array([0]), starts.tables, place, np.array([0])))
            held[int(starts.homes[0, len(guesses)])] = row[0]
            if len(guesses) == int(starts.steps[0]) or (gaps and (gaps[-1] < stop or token in starts.ends[0])):
                break
            self._depth = depth
            chosen = self.choose(row, (), (), ())
            (token,), (second,), (gap,) = chosen.ids, chosen.seconds, chosen.gaps
            guesses.append(token)
            seconds.append(second)
            gaps.append(gap)
            position += 1
        self.work.in_passes += self.costs.runs[depth].of(len(guesses))
        self.work.passes += 1
        return Drafts([guesses], [seconds], [gaps])

    def choose(
        self,
        logits: torch.Tensor,
        temperatures: Sequence[float],
        seeds: Sequence[int],
        positions: Sequence[int],
        vocabulary: torch.Tensor | None = None,
    ) -> Choices:
        said = self.recording.said[self._depth]
        chosen = Choices([], [], [])
        for index in map(int, logits[:, 0].tolist()):
            if 0 <= index < len(said.ids):
                chosen.ids.append(said.ids[index])
                chosen.seconds.append(said.seconds[index])
                chosen.gaps.append(said.gaps[index])
            else:
                alike = index * 2654435761 % 1000 < 1000 * self._agreement[self._depth]
                chosen.ids.append(-1 if alike else -2 - self._depth)
                chosen.seconds.append(-1000)
                chosen.gaps.append(said.gaps[index % len(said.gaps)])
        return chosen


class _Counted:
    """A drafter whose lookups are counted as work."""

    def __init__(self, drafter: Drafter, work: Work) -> None:
        self.begin, self.committed = drafter.begin, drafter.committed
        self._drafter, self._work = drafter, work

    def propose(self, id: int, tentative: Sequence[int], most: int, least: float, each: float = 0.0) -> list[Guess]:
        self._work.lookups += 1
        return self._drafter.propose(id, tentative, most, least, each)


def replay(
    speculation: SpeculationSettings, recordings: Sequence[Recording], costs: Costs, layers: int
) -> tuple[float, list[LevelCounts], Work]:
    """Decode the recorded texts as the settings say, one after the other.

    Returns expected tokens a second, what each source did, and the work that it was.
    """
    window = levels_for(speculation, layers)[-1].window
    stage = _Stage(costs, layers)
    work, drafter = stage.work, drafter_for(speculation)
    # what the drafter and the pace have learned goes on from text to text
    counted = _Counted(drafter, work) if drafter else None
    round_ = round_for(speculation, stage, layers, stage.choose, counted, costs.own, stage.seconds)
    totals = [LevelCounts() for _ in round_.sources]
    paced = speculation.method != "plain" and speculation.pace == "auto"
    for number, recording in enumerate(recordings):
        stage.take(recording)
        known = recording.prompt + 1
        blocks = tuple(range((len(recording.tokens) + window) // _SIZE + 1))
        told, ended = False, (number,) if number else ()
        ends = frozenset(recording.tokens[-1:]) if recording.ended else frozenset()
        while known < len(recording.tokens):
            room = window if recording.ended else min(window, len(recording.tokens) - known - 1)  # a limit is known beforehand, an end not
            needed = (known - 1 + room) // _SIZE + 1
            plan = SequencePlan(
                number + 1, (recording.tokens[known - 1],), known - 1, (*blocks[:needed], *range(10**6, 10**6 + _SPARE)), True, room,
                recording.temperature, recording.seed, None if told else recording.tokens[: known - 1], ends=ends,
            )  # fmt: skip
            result = round_.run(StepPlan((plan,), ended))
            told, ended = True, ()
            for total, counts in zip(totals, result.levels, strict=True):
                total.add(counts)
            written = len(result.sequences[0].tokens)
            known += written  # past an end in the last round, where nobody guessed it
            work.rounds += 1
            work.paced += paced
            work.tokens += written
        work.tokens -= known - len(recording.tokens)
    return work.tokens / stage.seconds(), totals, work
