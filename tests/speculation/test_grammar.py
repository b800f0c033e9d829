"""Promises of grammars: which tokens may come, after a text and after guesses that may be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hispec_ray import grammar
from hispec_ray.core.plan import SequencePlan, StepPlan
from hispec_ray.model.weights import ModelSource
from hispec_ray.request import Shape
from hispec_ray.speculation.grammar import GrammarError, Grammars, Walk
from hispec_ray.speculation.shaping import Shaper

NUMBERS = grammar.json_schema({"type": "array", "items": {"enum": [1, 22]}, "minItems": 2, "maxItems": 2})


@pytest.fixture(scope="module")
def grammars(default_source: ModelSource) -> Grammars:
    return Grammars(default_source.byte_tokenizer)


@pytest.fixture(scope="module")
def encode(default_source: ModelSource) -> Any:
    return lambda text: default_source.tokenizer().encode(text, add_special_tokens=False)


def ids(allowed: torch.Tensor | None) -> list[int]:
    assert allowed is not None
    found: list[int] = allowed.nonzero().flatten().tolist()
    return found


def test_a_text_and_the_same_guesses_allow_the_same(grammars: Grammars, encode: Any) -> None:
    tokens = encode("[1, 22]")
    for known in range(len(tokens) + 1):
        walk = grammars.walk(NUMBERS)
        walk.read(tokens[:known])
        fresh = grammars.walk(NUMBERS)
        assert ids(walk.allowed([])) == ids(fresh.allowed(tokens[:known]))
        assert known == len(tokens) or tokens[known] in ids(walk.allowed([]))


def test_guesses_that_are_taken_back_leave_no_trace(grammars: Grammars, encode: Any) -> None:
    walk, right, wrong = grammars.walk(NUMBERS), encode("[22, 1]"), encode("[1, 1]")
    expected = [ids(grammars.walk(NUMBERS).allowed(right[:count])) for count in range(len(right))]
    for guesses in ([], right[:3], wrong, right[:2], wrong[:1], right, encode("nonsense"), [*right[:2], *encode("x")], right[:4]):
        walk.allowed(guesses)
        assert [ids(walk.allowed(right[:count])) for count in range(len(right))] == expected
    walk.read(right[:3])
    assert ids(walk.allowed([])) == expected[3]


def test_guesses_that_do_not_follow_allow_nothing_to_be_said(grammars: Grammars, encode: Any) -> None:
    walk = grammars.walk(NUMBERS)
    assert walk.allowed(encode("[3")) is None
    assert not walk.failed
    assert walk.allowed(encode("[")) is not None


def test_a_text_that_does_not_follow_fails(grammars: Grammars, encode: Any) -> None:
    walk = grammars.walk(NUMBERS)
    walk.read(encode("[3"))
    assert walk.failed
    assert walk.allowed([]) is None


def test_behind_the_end_there_is_the_end_of_the_sequence(grammars: Grammars, encode: Any, default_source: ModelSource) -> None:
    (end,) = default_source.architecture.eos_token_ids
    walk = grammars.walk(NUMBERS)
    walk.read(encode("[1,1]"))
    assert ids(walk.allowed([])) == [end]
    walk.read([end, *encode("what a round writes behind it")])
    assert not walk.failed


def test_one_texts_state_is_not_anothers(grammars: Grammars, encode: Any) -> None:
    one, other = grammars.walk(NUMBERS), grammars.walk(NUMBERS)
    one.read(encode("[1"))
    assert ids(other.allowed([])) == ids(grammars.walk(NUMBERS).allowed([]))


@pytest.mark.parametrize("bad", [grammar.json_schema({"type": "nonsense"}), grammar.regex("(?=a)b"), "", "{", "start: nobody"])
def test_a_grammar_that_cannot_be_followed_says_why(bad: str, grammars: Grammars) -> None:
    for ask in (grammars.check, grammars.walk):
        with pytest.raises(GrammarError, match=r"\w"):
            ask(bad)


GROWING = grammar.regex("(.*a.{20}|.*b.{20}|.*c.{30})*")
"""Each a, b and c doubles what may come: too much after about a dozen of them."""
TOO_MUCH = "abcabcaaabbbcccabc" * 5


def fails_at(grammars: Grammars, text: Sequence[int]) -> int:
    """How many tokens of a text its walk can follow, one at a time."""
    walk = grammars.walk(GROWING)
    for place, token in enumerate(text):
        if walk.allowed([]) is None:
            return place
        assert walk.read([token]) == 1
    raise AssertionError("the grammar keeps within its limits")


def test_a_grammar_beyond_its_limits_fails_and_stays_so(grammars: Grammars, encode: Any) -> None:
    text = encode(TOO_MUCH)
    walk = grammars.walk(GROWING)
    good = walk.read(text)
    assert 0 < good < len(text)
    assert walk.failed
    assert walk.allowed([]) is None
    assert walk.read(text[:1]) == 0


def test_guesses_do_not_change_where_a_text_fails(grammars: Grammars, encode: Any) -> None:
    text, other = encode(TOO_MUCH), encode("xyz abc" * 3)
    good = fails_at(grammars, text)
    for step in (1, 2, 3):
        walk, read = grammars.walk(GROWING), 0
        while not walk.failed:
            for count in range(4):
                walk.allowed([*text[read : read + count], *other[:count]])
            read += walk.read(text[read : read + step])
            walk.allowed([])
        assert read == good


def test_a_guess_beyond_the_limits_ends_no_text(grammars: Grammars, encode: Any) -> None:
    text, quiet = encode(TOO_MUCH), encode("xxx yyy zzz")
    good = fails_at(grammars, text)
    walk = grammars.walk(GROWING)
    for token in quiet:
        assert walk.allowed(text) is None
        assert not walk.failed
        assert ids(walk.allowed([token]))
        assert walk.read([token]) == 1
    assert walk.allowed(text[: good - 1]) is not None


def test_a_text_that_fails_harms_no_other_with_the_same_grammar(grammars: Grammars, encode: Any) -> None:
    text = encode(TOO_MUCH)
    before = grammars.walk(GROWING)
    assert before.allowed(encode("x")) is not None
    good = fails_at(grammars, text)
    assert fails_at(grammars, text) == good
    assert before.read(text) == good


def test_the_end_of_the_sequence_is_a_guess_like_others(grammars: Grammars, encode: Any, default_source: ModelSource) -> None:
    (end,) = default_source.architecture.eos_token_ids
    free = grammar.lark('start: "a" TEXT\nTEXT: /(.|\\n)*/')
    walk, said = grammars.walk(free), encode("abc def ghi jkl")
    walk.read(said[:2])
    expected = [ids(grammars.walk(free).allowed(said[:count])) for count in range(2, len(said) + 1)]
    assert all(end in allowed for allowed in expected)
    for guesses in ([end], [*said[2:3], end], [end, *said[2:]], [*said[2:], end, end]):
        walk.allowed(guesses)
        assert [ids(walk.allowed(said[2:count])) for count in range(2, len(said) + 1)] == expected
    assert walk.read(written := [*said[2:], end, 5, 6]) == len(written)
    assert not walk.failed


def test_only_the_latest_grammars_are_kept(default_source: ModelSource) -> None:
    tokenizer = default_source.byte_tokenizer()
    made = Grammars(lambda: tokenizer)
    with patch("hispec_ray.speculation.grammar._KEPT", 8):
        for number in range(20):
            made.check(grammar.regex(f"a{{{number + 1}}}"))
    assert len(made._known) == 8
    assert isinstance(made.walk(grammar.regex("a{1}")), Walk)


def test_a_part_of_the_vocabulary_is_masked_by_its_ids(grammars: Grammars, encode: Any) -> None:
    shaper = Shaper(grammars)
    shape = Shape(1, grammar=NUMBERS)
    shaper.begin(StepPlan((SequencePlan(1, (5,), 0, (0,), True, 4, 0.0, 0, (), shape),)))
    vocabulary = torch.tensor(sorted({*encode("[22, 1]"), 7, 1000}))
    for tentative in ([], encode("["), encode("[22")):
        row, few = torch.zeros(49152), torch.zeros(len(vocabulary))
        shaper.shape(1, shape, 0.0, row, tentative, 1 + len(tentative), None)
        shaper.shape(1, shape, 0.0, few, tentative, 1 + len(tentative), vocabulary)
        assert few.tolist() == row[vocabulary].tolist()
        assert 0 < int(row.isfinite().sum()) < 100
