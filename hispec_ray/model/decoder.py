"""What every decoder offers: one model, driven by its own config, run a run of layers at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import numpy as np
import torch

from hispec_ray.core.plan import Drafts, DraftStarts, IntArray, Rows
from hispec_ray.model.architecture import Architecture

ChooseGuess = Callable[[torch.Tensor, list[int], list[list[int]], list[int], torch.Tensor | None], Any]
"""(logits of a step, which of the N sequences its rows are, each sequence's guesses so far, positions, vocabulary) -> `Choices`."""


class Decoder(Protocol):
    """A model's layers, its exits' heads and its paged key-value cache, on one device.

    Hidden rows are `[R, width]` in a dtype of the decoder's own choosing. A row's result is the same to the bit
    whichever rows stand beside it (on a CPU). Layers are numbered from 0; an exit at depth k reads what layer k - 1 wrote.

    An exit may have a layer to itself, which `run` takes as it takes the model's. Its head then reads what that layer makes of the rows
    at its depth, and each of these rows must be run through it once, for later rows attend to its keys too.
    """

    architecture: Architecture
    blocks: int  # of the cache
    block_size: int  # tokens a block holds
    exit_layers: dict[int, int]  # by depth, the layer that is the exit's own, numbered on from the model's

    def twin(self, blocks: int) -> Self:
        """Return a decoder on the same weights with a cache of its own of so many blocks."""

    def empty_rows(self, count: int) -> torch.Tensor:
        """Return room for hidden rows `[count, width]`."""

    def embed(self, rows: Rows) -> torch.Tensor:
        """Return the hidden rows `[R, width]` that enter layer 0."""

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Run layers [first, last) on hidden `[R, width]`, write their keys and values at the rows' slots, return `[R, width]`.

        May write into `hidden`. All rows' keys are written before any row attends, so that rows of one pass see each other.
        """

    def logits(self, depth: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits `[R, V']` of the exit at `depth` for hidden `[R, width]`; hidden stays as it is.

        hidden: of the depth, or where the exit has a layer of its own, of that.
        """

    def vocabulary(self, depth: int) -> torch.Tensor | None:
        """Return the ids that the exit's logits stand for, int64[V'] ascending on the CPU, None where they are 0 .. V - 1.

        Where several ranks share the vocabulary, those of this rank's columns.
        """

    def whole(self, depth: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits of all ranks' columns, in order of the ids, for this rank's at `depth`, and the vocabulary of those."""

    def copy_slots(self, source: IntArray, target: IntArray) -> None:
        """Copy keys and values of slots int64[N] to other slots, in all layers."""

    def draft(self, depth: int, starts: DraftStarts, held: torch.Tensor, stop: float, choose: ChooseGuess | None = None) -> Drafts:
        """Let the exit at `depth` guess on, token by token, for a batch of sequences.

        Each guess runs the row of the token before it through layers [0, depth) and leaves it at its home in `held` `[*, width]`;
        a copy goes through the exit's own layer where it has one. The last guess's own row is run too: the next level wants it.
        A sequence stops after a guess whose gap (see `Choices`) is smaller than `stop`. The same numbers as passes one by one.
        choose: who chooses, in place of the choice rule alone.
        """


def by_rule(choose: Callable[..., Any], starts: DraftStarts) -> ChooseGuess:
    """Return the choice rule for guesses: `choose` with each sequence's temperature and seed."""

    def chosen(logits: torch.Tensor, lines: list[int], _: list[list[int]], positions: list[int], vocabulary: torch.Tensor | None) -> Any:
        return choose(logits, [starts.temperatures[s] for s in lines], [starts.seeds[s] for s in lines], positions, vocabulary)

    return chosen


def draft_by_passes(decoder: Any, choose: ChooseGuess, depth: int, starts: DraftStarts, held: torch.Tensor, stop: float) -> Drafts:
    """`Decoder.draft` out of single passes, where there is nothing faster."""
    count = len(starts.tokens)
    guesses: list[list[int]] = [[] for _ in range(count)]
    seconds: list[list[int]] = [[] for _ in range(count)]
    gaps: list[list[float]] = [[] for _ in range(count)]
    current = starts.tokens.copy()
    open_ = guessing = [s for s in range(count) if starts.steps[s] > 0]
    while open_:
        hidden = _run_next(decoder, depth, open_, [len(guesses[s]) for s in open_], current, starts, held)
        positions = [int(starts.positions[s]) + len(guesses[s]) + 1 for s in open_]
        chosen = choose(decoder.logits(depth, hidden), open_, guesses, positions, decoder.vocabulary(depth))
        for s, guess, second, gap in zip(open_, chosen.ids, chosen.seconds, chosen.gaps, strict=True):
            guesses[s].append(guess)
            seconds[s].append(second)
            gaps[s].append(gap)
            current[s] = guess
        open_ = [s for s in open_ if len(guesses[s]) < starts.steps[s] and gaps[s][-1] >= stop and guesses[s][-1] not in starts.ends[s]]
    if guessing:
        _run_next(decoder, depth, guessing, [len(guesses[s]) for s in guessing], current, starts, held)
    return Drafts(guesses, seconds, gaps)


def _run_next(
    decoder: Any, depth: int, sequences: list[int], made: list[int], tokens: IntArray, starts: DraftStarts, held: torch.Tensor
) -> torch.Tensor:
    """Run the next row of some sequences, leave it at its home, and return what the exit's head reads of it. made: guesses of each."""
    lines = np.array(sequences)
    positions = starts.positions[lines] + made
    blocks = starts.tables[starts.table[lines], positions // decoder.block_size]
    slots = blocks * decoder.block_size + positions % decoder.block_size
    rows = Rows(tokens[lines], positions, starts.table[lines], starts.tables, slots, np.arange(len(sequences)))
    hidden: torch.Tensor = decoder.run(0, depth, decoder.embed(rows), rows)
    held[torch.from_numpy(starts.homes[lines, made])] = hidden
    own = decoder.exit_layers.get(depth)
    if own is not None:
        hidden = decoder.run(own, own + 1, hidden, rows)
    return hidden
