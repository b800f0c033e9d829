"""Lets engines decode the same prompts beside each other, each for a slice of time, whoever has written least going next.

A machine is fast and slow by turns, within seconds too. Engines whose slices are short meet the same weather, so the ratios of their
speeds say more than those of runs one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hispec_ray.config import Settings, SpeculationSettings
from hispec_ray.llm import LLM
from hispec_ray.request import GenerationRequest, SamplingParams

_SLICE = 0.02
"""Seconds after which another engine goes on: what it finds cold of its own is small beside that."""


@dataclass(slots=True)
class Decoded:
    """What an engine made of the prompts, which wait in its queue.

    seconds: of all steps in which every place had a sequence with a token that went on, which leaves no place for one that reads its
    prompt. tokens: that those steps wrote; passes: that they ran, see `Timings`. answers: token ids.
    """

    seconds: float = 0.0
    tokens: int = 0
    answers: list[list[int]] = field(default_factory=list)
    passes: list[tuple[int, int, float, float]] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens a second; 0 where no step counts."""
        return self.tokens / self.seconds if self.tokens else 0.0


class _Entrant:
    """An engine at work on the prompts."""

    def __init__(self, llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        self.engine = llm.engine
        self.places = min(llm.settings.scheduler.max_sequences, len(prompts))
        self.written = 0
        self.ended = 0
        self.answers: dict[str, list[int]] = {}
        self.decoded = Decoded()
        for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            self.engine.add(GenerationRequest(f"contest-{number}", tuple(prompt), param))
            self.answers[f"contest-{number}"] = []
        self.decoded.answers = list(self.answers.values())

    def step(self) -> None:
        begun = time.perf_counter()
        deltas = self.engine.step()
        spent = time.perf_counter() - begun
        tokens = sum(len(delta.token_ids) for delta in deltas)
        if len(deltas) == self.places and all(self.answers[delta.request_id] for delta in deltas):
            self.decoded.seconds += spent
            self.decoded.passes += self.engine.timings.passes
            self.decoded.tokens += tokens
        self.written += tokens
        for delta in deltas:
            self.answers[delta.request_id] += delta.token_ids
            self.ended += delta.finish_reason is not None


def contest(
    llms: Sequence[LLM],
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    ended: Callable[[int], None] = lambda count: None,
) -> list[Decoded]:
    """Let each engine decode all prompts, whoever has written least going on next. ended: is told of so many further answers."""
    entrants = [_Entrant(llm, prompts, params) for llm in llms]
    while running := [entrant for entrant in entrants if entrant.engine.has_work]:
        entrant = min(running, key=lambda entrant: entrant.written)
        before, until = entrant.ended, time.perf_counter() + _SLICE
        entrant.step()
        while entrant.engine.has_work and time.perf_counter() < until:
            entrant.step()
        if entrant.ended > before:
            ended(entrant.ended - before)
    return [entrant.decoded for entrant in entrants]


def engine_for(settings: Settings, speculation: SpeculationSettings, batch: int, tokens: int, like: LLM) -> LLM:
    """Return a fresh engine, for what a lookup remembers of the same prompts would be no measure.

    speculation: a plan, with the exits of the settings. batch: sequences that run at a time; others wait. tokens: of the longest text
    with its prompt; its cache has room for twice a batch of those. like: whose weights it shares.
    """
    exits = speculation.exits.model_copy(update={"heads": settings.speculation.exits.heads})
    pool = {"blocks": 2 * batch * -(-tokens // settings.cache.block_size), "prefix_caching": False}
    update = {
        "speculation": speculation.model_copy(update={"exits": exits}),
        "scheduler": settings.scheduler.model_copy(update={"max_sequences": batch, "max_queued": 1 << 20}),
        "cache": settings.cache.model_copy(update=pool),
    }
    return LLM(settings.model_copy(update=update), like=like)
