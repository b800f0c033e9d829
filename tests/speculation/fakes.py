"""A model of tokens alone: what each depth says is a hash of the tokens so far, and how often depths agree is a number."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hispec_ray.core.plan import Drafts, DraftStarts, IntArray, Rows, SequencePlan, StepPlan, StepResult
from hispec_ray.model.decoder import ChooseGuess, by_rule, draft_by_passes
from hispec_ray.request import Shape
from hispec_ray.speculation.choice import choose_torch
from hispec_ray.speculation.levels import Level
from hispec_ray.speculation.round import Round

VOCABULARY = 8
SIZE = 4  # tokens a block holds

Say = Callable[[tuple[int, ...], int], Sequence[float]]
"""(tokens so far, depth) -> VOCABULARY logits."""


def digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "little")


@functools.cache
def agreeing(share: float, full: int) -> Say:
    """Logits of a model whose every exit below `full` has the full depth's logits in a `share` of the contexts, others elsewhere."""

    @functools.cache
    def say(tokens: tuple[int, ...], depth: int) -> list[float]:
        agrees = depth == full or digest("agree", depth, tokens) % 1000 < 1000 * share
        salt = full if agrees else depth
        return [digest(salt, tokens, token) % 4096 / 1024 for token in range(VOCABULARY)]

    return say


class FakeModel:
    """A decoder of `say`. Each layer keeps the tokens that were written into its cache, and a hidden row is what the row read there.

    So a row that a segment missed, ran in the wrong order, or read from a wrong block gives another context, or none at all. Hidden
    rows are `[R, 2]`: the context's number and the layer that the row goes to next. They are written in place, as a decoder may.

    exit_layers: see `Decoder`. ran, passes: rows that each layer has run, and in how many passes.
    """

    block_size = SIZE

    def __init__(self, say: Say, exit_layers: dict[int, int] | None = None) -> None:
        self._say = say
        self.exit_layers = exit_layers or {}
        self.ran: Counter[int] = Counter()
        self.passes: Counter[int] = Counter()
        self.drafts = 0  # runs of them
        self._cache: dict[int, dict[int, int]] = {}
        self._contexts: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {(): 0}

    def beside(self) -> FakeModel:
        """The same model in another process: hidden rows are the same, the cache is its own."""
        other = FakeModel(self._say, self.exit_layers)
        other._contexts, other._numbers = self._contexts, self._numbers
        return other

    def embed(self, rows: Rows) -> torch.Tensor:
        return torch.zeros(len(rows), 2, dtype=torch.float64)

    def run(self, first: int, last: int, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        depth = next((depth for depth, own in self.exit_layers.items() if own == first), first)
        assert (hidden[:, 1] == depth).all(), "a row skipped a layer or went through one twice"
        assert len(set(rows.slots.tolist())) == len(rows.slots), "two rows of a pass share a slot"
        assert rows.slots.flags.c_contiguous, "native code reads along"
        assert rows.slot_rows.flags.c_contiguous, "native code reads along"
        for layer in range(first, last):
            self.ran[layer] += len(rows)
            self.passes[layer] += 1
            cache = self._cache.setdefault(layer, {})
            cache.update(zip(rows.slots.tolist(), rows.tokens[rows.slot_rows].tolist(), strict=True))
            for row in range(len(rows)):
                table = rows.tables[rows.table[row]]
                context = tuple(cache[int(table[at // SIZE]) * SIZE + at % SIZE] for at in range(int(rows.positions[row]) + 1))
                assert layer == 0 or self._contexts[int(hidden[row, 0])] == context, "two layers hold different tokens"
                hidden[row, 0] = self._numbers.setdefault(context, len(self._contexts))
                if len(self._contexts) < len(self._numbers):
                    self._contexts.append(context)
        hidden[:, 1] = last
        return hidden

    def logits(self, depth: int, hidden: torch.Tensor) -> torch.Tensor:
        assert (hidden[:, 1] == self.exit_layers.get(depth, depth - 1) + 1).all(), "an exit reads a row of another layer"
        return torch.tensor([self._say(self._contexts[int(number)], depth) for number in hidden[:, 0]], dtype=torch.float32)

    def empty_rows(self, count: int) -> torch.Tensor:
        return torch.full((count, 2), -1, dtype=torch.float64)

    def vocabulary(self, depth: int) -> torch.Tensor | None:
        return None

    def whole(self, depth: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return logits, None

    def copy_slots(self, source: IntArray, target: IntArray) -> None:
        for cache in self._cache.values():
            for a, b in zip(source.tolist(), target.tolist(), strict=True):
                if a in cache:
                    cache[b] = cache[a]
                else:
                    cache.pop(b, None)

    def draft(self, depth: int, starts: DraftStarts, held: torch.Tensor, stop: float, choose: ChooseGuess | None = None) -> Drafts:
        self.drafts += 1
        return draft_by_passes(self, choose or by_rule(choose_torch, starts), depth, starts, held, stop)


class Text:
    """A sequence that a test decodes: what it has and how it is drawn."""

    def __init__(self, id: int, prompt: Sequence[int], limit: int, temperature: float = 0.0, seed: int = 0) -> None:
        self.id = id
        self.tokens = list(prompt)
        self.limit = limit
        self.temperature = temperature
        self.seed = seed
        self.full = 0
        self.told = False
        self.moves = 0
        self.levels: list[int] = []
        self.shape: Shape | None = None
        self.ends: frozenset[int] = frozenset()
        # blocks of its own, in an order of its own
        self.blocks = tuple(np.random.default_rng(id).permutation(16) + 16 * id)

    def lose(self) -> None:
        """Lose all but full blocks, as one that is preempted: what stood in the others is another's by now."""
        kept = self.full // SIZE
        self.full, self.told = kept * SIZE, False
        self.moves += 1
        fresh = tuple(1000 * self.moves + block for block in self.blocks)
        self.blocks = (*self.blocks[:kept], *fresh[kept:])

    def plan(self, chunk: int, room: int) -> SequencePlan:
        """The next chunk of what is not run, or the last token with a window of at most `room`."""
        unrun = len(self.tokens) - self.full
        rows = min(unrun, chunk)
        room = min(room, self.limit - len(self.tokens) - 1) if unrun == 1 else 0
        tokens = tuple(self.tokens[self.full : self.full + rows])
        history, self.told = None if self.told else tuple(self.tokens[: self.full]), True
        law = (self.temperature, self.seed, history, self.shape)
        return SequencePlan(self.id, tokens, self.full, self.blocks, rows == unrun, room, *law, ends=self.ends)

    def take(self, plan: SequencePlan, tokens: list[int], levels: list[int]) -> None:
        self.full += len(plan.tokens) + (len(tokens) - 1 if plan.samples else 0)
        self.tokens += tokens
        self.levels += levels


def step(round_: Round, texts: Sequence[Text], chunk: int, room: int, ended: tuple[int, ...] = ()) -> tuple[StepPlan, StepResult]:
    """One round for the texts; what was planned and what came back."""
    plan = StepPlan(tuple(text.plan(chunk, room) for text in texts), ended)
    result = round_.run(plan)
    for text, part, done in zip(texts, plan.sequences, result.sequences, strict=True):
        assert done.id == text.id
        text.take(part, done.tokens, done.levels)
    return plan, result


def finish(round_: Round, texts: Sequence[Text], levels: Sequence[Level], chunk: int = 5) -> list[tuple[StepPlan, StepResult]]:
    """Decode texts together up to their limits, as a scheduler would; every round's plan and result."""
    steps = []
    while open_texts := [text for text in texts if len(text.tokens) < text.limit]:
        steps.append(step(round_, open_texts, chunk, levels[-1].window))
    return steps


def plainly(say: Say, full: int, prompt: Sequence[int], limit: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """What the full depth alone writes, token by token, without a round."""
    tokens = list(prompt)
    while len(tokens) < limit:
        logits = torch.tensor([say(tuple(tokens), full)], dtype=torch.float32)
        tokens += choose_torch(logits, [temperature], [seed], [len(tokens)]).ids
    return tokens
