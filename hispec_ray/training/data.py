"""What an exit learns from: lines of token ids, each with the place from which on it is to be learned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hispec_ray.training.student import IGNORED


@dataclass(frozen=True, slots=True)
class Line:
    """Token ids of one text. Those from index `learn_from` on are learned; what is before is read only."""

    ids: tuple[int, ...]
    learn_from: int = 1


NOTHING = Line((0, 0), 2)
"""A line that only fills a batch: nothing of it is learned or counted."""


class Batches(Protocol):
    """Where lines come from; a function of the step, so that a training that is resumed sees what it would have seen."""

    def batch(self, step: int) -> Sequence[Line]:
        """Return the lines of a step, the same number at every step."""

    def held_out(self) -> Sequence[Line]:
        """Return lines that no step has."""


class TextBatches:
    """Lines in a new random order in every epoch."""

    def __init__(self, lines: Sequence[Line], held_out: Sequence[Line], lines_per_step: int, seed: int) -> None:
        """Raises ValueError where there are fewer lines than a step takes, or none to hold out."""
        if len(lines) < lines_per_step or not held_out:
            raise ValueError(
                f"the data has {len(lines)} lines to train on and {len(held_out)} to hold out; a step takes {lines_per_step}, "
                "and at least one must be held out"
            )
        self._lines = lines
        self._held_out = held_out
        self._per_step = lines_per_step
        self._per_epoch = len(lines) // lines_per_step
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])

    def batch(self, step: int) -> Sequence[Line]:
        epoch, place = divmod(step, self._per_epoch)
        if self._order[0] != epoch:
            order = list(range(len(self._lines)))
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._order = epoch, order
        return [self._lines[i] for i in self._order[1][place * self._per_step : (place + 1) * self._per_step]]

    def held_out(self) -> Sequence[Line]:
        return self._held_out


def micro_batches(lines: Sequence[Line], parts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Split lines into `parts` batches of like length: (ids, targets), int64[lines / parts, T] each, padded at the end.

    Targets are the ids that follow, IGNORED before learn_from and behind the end. Raises ValueError where the lines do not divide.
    """
    if len(lines) % parts:
        raise ValueError(f"{len(lines)} lines a step do not divide into {parts} batches")
    ordered = sorted(lines, key=lambda line: len(line.ids))
    each = len(lines) // parts
    return [_padded(ordered[first : first + each]) for first in range(0, len(lines), each)]


def _padded(lines: Sequence[Line]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(line.ids) for line in lines) - 1
    ids = torch.zeros(len(lines), longest, dtype=torch.int64)
    targets = torch.full_like(ids, IGNORED)
    for row, line in enumerate(lines):
        values = torch.tensor(line.ids)
        ids[row, : len(values) - 1] = values[:-1]
        first = max(1, line.learn_from)
        targets[row, first - 1 : len(values) - 1] = values[first:]
    return ids, targets
