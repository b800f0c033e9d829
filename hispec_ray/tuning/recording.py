"""The model's own text, and what every depth would have said at each place in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hispec_ray.core.plan import Rows
from hispec_ray.llm import LLM
from hispec_ray.request import FinishReason, SamplingParams
from hispec_ray.speculation.choice import Choices, Choose

_ROWS = 256  # of a pass that reads a text


@dataclass(frozen=True, slots=True)
class Recording:
    """One text that the model wrote. tokens: prompt and answer; prompt: how many are the prompt's.

    ended: its last token ended it, and not its length.
    said[depth]: what that depth chooses after tokens[prompt - 1] and each token of the answer: ids, seconds and gaps, as in `Choices`.
    """

    tokens: tuple[int, ...]
    prompt: int
    temperature: float
    seed: int
    ended: bool
    said: dict[int, Choices]

    def agreement(self, depth: int) -> list[bool]:
        """Where the depth's choice is what the full depth wrote."""
        answer = self.tokens[self.prompt :]
        return [choice == token for choice, token in zip(self.said[depth].ids, answer, strict=False)]


def write_texts(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float) -> list[Recording]:
    """Let the full depth answer prompts, each cut to what leaves room for the answer; without what other depths say."""
    room = llm.engine.max_model_len - max_tokens
    cut = [tuple(prompt[-room:]) for prompt in prompts]
    params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=number) for number in range(len(cut))]
    found = []
    for prompt, param, completion in zip(cut, params, llm.generate(cut, params), strict=True):
        choice = completion.choices[0]
        ended = choice.finish_reason is FinishReason.STOP
        found.append(Recording((*prompt, *choice.token_ids), len(prompt), temperature, param.seed or 0, ended, {}))
    return [recording for recording in found if len(recording.tokens) > recording.prompt + 1]


def listen(llm: LLM, recordings: Sequence[Recording], depths: Sequence[int], choose: Choose) -> None:
    """Run each text through the layers once, and note what every one of the depths says along the answer.

    Uses the cache of an engine that has nothing else to do, from its first block on.
    """
    decoder = llm.engine.shard.decoder
    size = decoder.block_size
    layers = decoder.architecture.layers
    stops = sorted({*depths, layers})
    for recording in recordings:
        tokens = np.array(recording.tokens[:-1], dtype=np.int64)  # nothing is said after the last
        table = np.arange(-(-len(tokens) // size), dtype=np.int64)[None]
        parts: dict[int, list[Choices]] = {depth: [] for depth in stops}
        for begin in range(0, len(tokens), _ROWS):
            positions = np.arange(begin, min(begin + _ROWS, len(tokens)), dtype=np.int64)
            rows = Rows(tokens[positions], positions, np.zeros_like(positions), table, positions, np.arange(len(positions), dtype=np.int64))
            heard = positions >= recording.prompt - 1
            hidden = decoder.embed(rows)
            first = 0
            for depth in stops:
                hidden = decoder.run(first, depth, hidden, rows)
                first = depth
                own = decoder.exit_layers.get(depth)
                read = hidden if own is None else decoder.run(own, own + 1, hidden.clone(), rows)
                if heard.any():
                    at = positions[heard] + 1
                    logits = decoder.logits(depth, read[torch.from_numpy(heard)])
                    law = ([recording.temperature] * len(at), [recording.seed] * len(at), at.tolist())
                    parts[depth].append(choose(logits, *law, decoder.vocabulary(depth)))
        for depth, found in parts.items():
            recording.said[depth] = Choices(
                [token for part in found for token in part.ids],
                [token for part in found for token in part.seconds],
                [gap for part in found for gap in part.gaps],
            )
