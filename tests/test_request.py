"""Promises of the plain data that a caller meets first."""

from __future__ import annotations

import pytest

from hispec_ray import RequestError, SamplingParams
from hispec_ray.request import choice_seed, choices_of


@pytest.mark.parametrize(("asked", "kept"), [(0.0, 0.0), (1e-46, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (2.0, 2.0)])
def test_a_temperature_too_cold_to_divide_by_is_greedy(asked: float, kept: float) -> None:
    assert SamplingParams(temperature=asked).temperature == kept


@pytest.mark.parametrize("temperature", [-0.1, 2.1, float("nan"), float("inf")])
def test_a_temperature_out_of_range_is_refused_with_the_range(temperature: float) -> None:
    with pytest.raises(RequestError, match=r"temperature is .*; it must be from 0 to 2") as refused:
        SamplingParams(temperature=temperature)
    assert refused.value.field == "temperature"


def test_choices_have_seeds_of_their_own_and_keep_the_rest() -> None:
    params = SamplingParams(temperature=0.5, seed=9, n=3, stop=("x",))
    assert choices_of(params) == tuple(SamplingParams(temperature=0.5, seed=choice_seed(9, i), stop=("x",)) for i in range(3))
    drawn = [choice.seed for choice in choices_of(SamplingParams(n=2))]
    assert len({*drawn, None}) == 3


def test_a_stop_string_stands_for_itself() -> None:
    assert SamplingParams(stop="The end").stop == ("The end",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_tokens", 1.5, "max_tokens is 1.5; it must be a whole number"),
        ("seed", 1.5, "seed is 1.5; it must be a whole number"),
        ("n", True, "n is True; it must be a whole number"),
        ("temperature", "hot", "temperature is 'hot'; it must be a number from 0 to 2"),
        ("stop", (5,), "stop has 5"),
        ("stop", ("ab" * 600,), "one of 1200 characters; each must be a text of 1 to 1024 characters"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(field: str, value: object, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refused.value.field == field
