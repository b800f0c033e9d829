"""Promises of shaping: what each parameter does to a row, against the plainest code for it; and a rejected token leaves no trace."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from fakes import VOCABULARY, FakeModel, Say, Text, agreeing, finish, step

from hispec_ray.core.plan import SequencePlan, StepPlan
from hispec_ray.request import RequestError, SamplingParams, Shape
from hispec_ray.speculation.choice import choose_torch
from hispec_ray.speculation.drafters import LookupDrafter
from hispec_ray.speculation.levels import Level
from hispec_ray.speculation.round import Round
from hispec_ray.speculation.shaping import Shaper, kept, logprobs

FULL = 4


def reference(logits: Sequence[float], shape: Shape, temperature: float, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """What the parameters do to the logits of the token that follows, token by token."""
    scores = list(logits)
    for id, value in shape.logit_bias:
        scores[id] += value
    for id in shape.late if len(prompt) + len(answer) < shape.late_from else ():
        scores[id] = -math.inf
    for id in {*prompt, *answer}:
        scores[id] = scores[id] / shape.repetition_penalty if scores[id] > 0 else scores[id] * shape.repetition_penalty
    for id, count in Counter(answer).items():
        scores[id] -= shape.presence_penalty + shape.frequency_penalty * count
    if temperature == 0:
        return scores
    order = sorted(range(len(scores)), key=lambda id: -scores[id])
    weights = [math.exp((score - max(scores)) / temperature) for score in scores]
    allowed = [id for id in order if weights[id] >= shape.min_p]
    allowed = allowed[: shape.top_k] if shape.top_k else allowed
    total, taken, so_far = sum(weights[id] for id in allowed), [], 0.0
    for id in allowed:
        if so_far >= shape.top_p * total and shape.top_p < 1 and taken:
            break
        taken.append(id)
        so_far += weights[id]
    return [score if id in taken else -math.inf for id, score in enumerate(scores)]


SHAPES: dict[str, dict[str, object]] = {
    "top_k": {"top_k": 3},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.7},
    "top_p of the least": {"top_p": 0.0},
    "min_p": {"min_p": 0.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "both, negative": {"presence_penalty": -0.5, "frequency_penalty": -1.0},
    "repetition": {"repetition_penalty": 1.6},
    "bias": {"logit_bias": {2: 4.0, 5: -100.0}},
    "late": {"min_tokens": 9, "stop_token_ids": (1, 3)},
    "all": {"top_k": 6, "top_p": 0.9, "min_p": 0.02, "presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.2,
            "logit_bias": {0: 1.0}, "min_tokens": 4, "stop_token_ids": (6,)},
}  # fmt: skip


def shape_of(name: str, temperature: float, prompt_tokens: int) -> Shape:
    params = SamplingParams(temperature=temperature, **SHAPES[name])  # type: ignore[arg-type]
    return params.shape(prompt_tokens, params.stop_token_ids) or Shape(prompt_tokens)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_is_shaped_as_the_plainest_code_does_it(name: str, temperature: float) -> None:
    dice = random.Random(name)
    for _ in range(30):
        prompt, answer = ([dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 7))] for _ in range(2))
        shape = shape_of(name, temperature, len(prompt))
        logits = [dice.uniform(-3, 3) for _ in range(VOCABULARY)]
        shaper, cut = Shaper(), dice.randrange(len(answer))
        known = (*prompt, *answer[:cut])
        shaper.begin(StepPlan((SequencePlan(1, known, 0, (0,), True, 0, temperature, 0, (), shape),)))
        row = torch.tensor(logits)
        shaper.shape(1, shape, temperature, row, answer[cut:], len(prompt) + len(answer), None)
        assert row.tolist() == pytest.approx(reference(logits, shape, temperature, prompt, answer), abs=1e-5)
        # the same over a part of the vocabulary, where only biases and penalties can be compared
        part = torch.tensor(sorted(dice.sample(range(VOCABULARY), 4)))
        if temperature == 0:
            few = torch.tensor(logits)[part]
            shaper.shape(1, shape, temperature, few, answer[cut:], len(prompt) + len(answer), part)
            assert few.tolist() == pytest.approx(row[part].tolist(), abs=1e-6)


def test_a_flat_top_p_needs_more_than_the_few_that_are_sorted_first() -> None:
    scores = torch.arange(2000, dtype=torch.float64) * 1e-6
    found = kept(scores, Shape(0, top_p=0.5))
    assert int(found.sum()) == pytest.approx(1000, abs=2)
    assert found[-1]
    assert not found[0]


def plainly(say: Say, shape: Shape, prompt: Sequence[int], limit: int, temperature: float, seed: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < limit:
        scores = reference(say(tuple(tokens), FULL), shape, temperature, prompt, tokens[len(prompt) :])
        tokens += choose_torch(torch.tensor([scores], dtype=torch.float32), [temperature], [seed], [len(tokens)]).ids
    return tokens


LEVELS = {
    "plain": (Level("full", FULL, 0),),
    "single": (Level("draft", 1, 0), Level("full", FULL, 3)),
    "hispec": (Level("draft", 1, 0), Level("check", 2, 2), Level("full", FULL, 5)),
    "lookup": (Level("check", 2, 3), Level("full", FULL, 5)),
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", LEVELS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_same_tokens_whatever_guesses(name: str, method: str, temperature: float) -> None:
    """Beside a sequence that is not shaped, which is not changed; and from a history, as after a preemption."""
    say, levels = agreeing(0.7, FULL), LEVELS[method]
    shaped = [Text(1, [1, 2, 3, 4, 5], 40, temperature, 3), Text(2, [2], 33, temperature, 4)]
    bare = Text(3, [7, 7, 1], 38, temperature, 5)
    for text in shaped:
        text.shape = shape_of(name, temperature, len(text.tokens))
    wanted = [plainly(say, text.shape or Shape(0), text.tokens, text.limit, temperature, text.seed) for text in (*shaped, bare)]
    round_ = Round(FakeModel(say), levels, choose_torch, LookupDrafter() if method == "lookup" else None, confidence=0.05)
    texts = [*shaped, bare]
    for _ in range(3):
        step(round_, texts, 4, levels[-1].window)
    texts[1].full, texts[1].told = 0, False  # its blocks are taken, and it begins again from all its tokens
    finish(round_, texts, levels)
    assert [text.tokens for text in texts] == wanted


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_p": 1.5}, "top_p is 1.5; it must be from 0 to 1"),
        ({"top_k": -2}, "top_k is -2; it must be -1 or more"),
        ({"min_p": math.nan}, "min_p is nan; it must be from 0 to 1"),
        ({"presence_penalty": "1"}, "presence_penalty is '1'; it must be a number from -2 to 2"),
        ({"frequency_penalty": 2.5}, "frequency_penalty is 2.5; it must be from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be from 0.01 to 100"),
        ({"logit_bias": {5: 101}}, "logit_bias has 101 for id 5; it must be a number from -100 to 100"),
        ({"logit_bias": {-5: 1}}, "logit_bias has id -5; ids must be whole numbers from 0 on"),
        ({"stop_token_ids": (1, True)}, "stop_token_ids has id True"),
        ({"stop_token_ids": range(1025)}, "stop_token_ids has 1025 ids; at most 1024"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; it must be from 0 to max_tokens, 4"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be from 0 on"),
    ],
)
def test_what_is_out_of_range_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        SamplingParams(**values)  # type: ignore[arg-type]
    assert message in raised.value.message
    assert raised.value.field in values


def test_what_changes_nothing_is_no_shape() -> None:
    assert SamplingParams(top_k=-1, logit_bias={}).shape(3, {0}) is None
    assert SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.1).shape(3, {0}) is None, "filters leave the likeliest token"


def test_log_probabilities_do_not_depend_on_the_rows_beside_them() -> None:
    """With two threads torch adds the columns of some of so many rows in another order."""
    logits = 5 * torch.randn((64, 49152), generator=torch.Generator().manual_seed(1))
    tokens = list(range(len(logits)))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        alone = [logprobs(logits[place : place + 1], [token], 3)[0] for place, token in enumerate(tokens)]
        assert logprobs(logits, tokens, 3) == alone
    finally:
        torch.set_num_threads(threads)
