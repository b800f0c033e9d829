"""How hidden rows go from stage to stage: point to point, with a note of what they are rows of."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hispec_ray.core.plan import Tentative

_NOTE = 1024
"""Bytes of the first message: a note that fits into it needs no second."""
_LENGTH = 8
_ROUNDS = 2
"""In flight at most (`Executor.lanes`): what was sent for an earlier one has been received."""


class Line:
    """A member's ends of the line: where it receives from and whom it sends to, on the process group of all members.

    Every rank of a stage has all rows: rank r receives from rank r modulo the lower stage's ranks.
    sent_bytes: that have gone on to the next stage.
    """

    def __init__(self, ranks: Sequence[int], stage: int, rank: int, device: str) -> None:
        """ranks: of each stage. device: where hidden rows are."""
        starts = [sum(ranks[:s]) for s in range(len(ranks))]
        self._below = starts[stage - 1] + rank % ranks[stage - 1] if stage else None
        above = range(ranks[stage + 1]) if stage + 1 < len(ranks) else range(0)
        self._above = [starts[stage + 1] + other for other in above if other % ranks[stage] == rank]
        self._device = device
        self._sending: deque[list[tuple[Any, torch.Tensor]]] = deque()  # by round, with what is kept until it has been sent
        self.sent_bytes = 0

    def send(self, asked: list[Tentative], hidden: torch.Tensor) -> None:
        """Send to the next stage, where there is one, without waiting until it takes it."""
        if not self._above:
            return
        while len(self._sending) >= _ROUNDS:
            for work, _ in self._sending.popleft():  # received long ago; gloo keeps a send until somebody has waited for it
                work.wait()
        hidden = hidden.contiguous()
        words = pickle.dumps((asked, tuple(hidden.shape), hidden.dtype))
        note = torch.zeros(max(_NOTE, _LENGTH + len(words)), dtype=torch.uint8)
        note[:_LENGTH] = torch.frombuffer(bytearray(len(words).to_bytes(_LENGTH, "little")), dtype=torch.uint8)
        note[_LENGTH : _LENGTH + len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        parts = [note[:_NOTE], *([note[_NOTE:]] if len(note) > _NOTE else []), hidden]
        self._sending.append([(dist.isend(part, other), part) for other in self._above for part in parts])
        self.sent_bytes += len(self._above) * sum(part.nbytes for part in parts)

    def receive(self) -> tuple[list[Tentative], torch.Tensor]:
        """Wait for what the stage below sends. Raises RuntimeError where it has gone."""
        note = torch.empty(_NOTE, dtype=torch.uint8)
        dist.recv(note, self._below)
        length = int.from_bytes(note[:_LENGTH].numpy().tobytes(), "little")
        words = note[_LENGTH : _LENGTH + length].numpy().tobytes()
        if len(words) < length:
            rest = torch.empty(length - len(words), dtype=torch.uint8)
            dist.recv(rest, self._below)
            words += rest.numpy().tobytes()
        asked, shape, dtype = pickle.loads(words)
        hidden = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(hidden, self._below)
        return asked, hidden
