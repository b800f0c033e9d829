"""What crosses from the scheduler to the shards and back, once a round, and what a round hands to a decoder: small plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hispec_ray.request import Shape, TokenLogprob

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Told:
    """Tokens of the prompt whose log-probabilities are wanted.

    first: the row of the plan after which the first of the tokens comes; the others come after the rows that follow.
    count: how many likeliest tokens to tell at each.
    """

    first: int
    tokens: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence's part in a round.

    tokens: the known tokens whose rows have not been run through the full depth: a chunk of the prompt, or the one token committed last.
    start: position of tokens[0]; equals the sequence's `full` watermark.
    blocks: the block table; covers at least start + len(tokens) + room positions; blocks behind those are spare.
    history: every token before tokens[0], where whoever runs the plan has not seen them: in a sequence's first plan after it was admitted;
        None in the others.
    samples: False for a chunk that does not reach the end of the known tokens (no token is chosen after it).
    room: most tentative tokens the window may hold this round (0 = plain decoding). Always 0 where len(tokens) > 1.
    temperature, seed: of the choice rule. shape: what is done to the logits before it; None for nothing.
    logprobs: how many likeliest tokens to tell at each committed one; None for no log-probabilities.
    told: what to tell of the prompt; None for nothing.
    ends: tokens that end the sequence, so that nobody guesses on behind one.
    """

    id: int
    tokens: tuple[int, ...]
    start: int
    blocks: tuple[int, ...]
    samples: bool
    room: int
    temperature: float
    seed: int
    history: tuple[int, ...] | None = None
    shape: Shape | None = None
    logprobs: int | None = None
    told: Told | None = None
    ends: frozenset[int] = frozenset()


@dataclass(slots=True)
class Timings:
    """What a round took, in seconds on the clock of who measured it.

    passes: (number of the cost in the pace, rows, seconds of one, how many of them, a fraction for a part of one).
    asked: what a lookup took to say what it guesses. learning: what the pace took to learn from rounds before this one, before its start.
    upkeep: what rows took in exits' own layers that had waited for them, in this round or since the last one.
    """

    start: float = 0.0
    end: float = 0.0
    asked: float = 0.0
    learning: float = 0.0
    upkeep: float = 0.0
    passes: list[tuple[int, int, float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the last stage has said to one sequence's window, for the stages before it.

    tokens: committed; seconds: the full depth's second choice at each. adopted: number of the branch that was gone on from, among those
    that were asked about; None for none. seen, kept: guesses looked at, up to the first that was not kept, and those that were kept.
    """

    tokens: list[int]
    seconds: list[int]
    adopted: int | None
    seen: int
    kept: int


@dataclass(frozen=True, slots=True)
class Done:
    """How a round came out, for those who need it before the next: what it took, and where stages lie above the first, their verdicts."""

    timings: Timings
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One round for a batch of sequences. ended: ids of those that were planned before and will not be again, or only with a history.

    done: rounds that came to their end since the last plan, the oldest first, where several processes must go by the same; None where
        there is one process, which knows.
    """

    sequences: tuple[SequencePlan, ...]
    ended: tuple[int, ...] = ()
    done: tuple[Done, ...] | None = None


@dataclass(frozen=True, slots=True)
class Tentative:
    """What the first stage asks the last about one sequence, beside its plan's tokens.

    tokens: the window; origins[i]: the source of tokens[i]. branches: (index, token, origin, line, home, block), see `state.Branch`.
    """

    tokens: list[int]
    origins: list[int]
    branches: list[tuple[int, int, int, int, int, int]]


@dataclass(slots=True)
class SequenceResult:
    """Tokens that the full depth committed after the plan's own; levels[i] is the index of the source that chose tokens[i] first.

    logprobs: one for each token, where the plan asks for them; prompt_logprobs: one for each of the plan's `told`.
    failed: how many of the tokens still follow the sequence's grammar, where it went beyond its limits behind them; None where it did not.
    Sources are a drafter that is no level, where there is one, then the round's levels, shallow to deep.
    """

    id: int
    tokens: list[int]
    levels: list[int]
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    failed: int | None = None


@dataclass(slots=True)
class LevelCounts:
    """What one source did in a round.

    passes: each reads the source's head once; layers: layer passes in them, and of rows that had waited for its exit's own layer, whatever
    their rows; rows: run through its own segment.
    seen, accepted: proposals that it looked at and that it kept; own: tokens of its own.
    seen_at, accepted_at: the same by place in the window, up to the first that it did not keep.
    """

    passes: int = 0
    layers: int = 0
    rows: int = 0
    seen: int = 0
    accepted: int = 0
    own: int = 0
    seen_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def looked(self, proposals: int, kept: int) -> None:
        """Note a look at a window of so many proposals of which the first `kept` were kept."""
        for place in range(min(kept + 1, proposals)):
            if place == len(self.seen_at):
                self.seen_at.append(0)
                self.accepted_at.append(0)
            self.seen_at[place] += 1
            self.accepted_at[place] += place < kept

    def add(self, other: LevelCounts) -> None:
        self.passes += other.passes
        self.layers += other.layers
        self.rows += other.rows
        self.seen += other.seen
        self.accepted += other.accepted
        self.own += other.own
        for mine, theirs in ((self.seen_at, other.seen_at), (self.accepted_at, other.accepted_at)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for place, count in enumerate(theirs):
                mine[place] += count


@dataclass(slots=True)
class StepResult:
    """The shards' answer to a StepPlan: one SequenceResult for each sequence in it, in its order."""

    sequences: list[SequenceResult]
    levels: list[LevelCounts] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one pass, ragged and without padding.

    tokens, positions: int64[R].
    table: int64[R], the line of `tables` that the row attends through.
    tables: int64[T, B], block tables; entries past a sequence's last block are never read.
    slots, slot_rows: int64[S], S >= R; the key and value of row slot_rows[i] are written at slot
        slots[i] = block * block_size + offset. A chain has one slot a row; a row from which several
        branches descend has one in each branch's own block.
    """

    tokens: IntArray
    positions: IntArray
    table: IntArray
    tables: IntArray
    slots: IntArray
    slot_rows: IntArray

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class DraftStarts:
    """Where the guessing begins, for N sequences.

    tokens, positions: int64[N], the token after which to guess and its position; its row has not been run.
    table, tables: int64[N] and [T, B], as in `Rows`. steps: int64[N], most guesses of each, none at 0; not all 0.
    homes: int64[N, max(steps) + 1], lines of `held`: of the rows that guesses are made from, then of the last guess.
    temperatures, seeds: of the choice rule. ends: of each, guesses after which it guesses no further.
    """

    tokens: IntArray
    positions: IntArray
    table: IntArray
    tables: IntArray
    steps: IntArray
    homes: IntArray
    temperatures: Sequence[float]
    seeds: Sequence[int]
    ends: Sequence[frozenset[int]]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses, runners-up and gaps of each sequence, as many as it made."""

    guesses: list[list[int]]
    seconds: list[list[int]]
    gaps: list[list[float]]
