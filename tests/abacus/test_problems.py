"""Word problems whose workings are right, and a tokenizer that loses nothing of them."""

from __future__ import annotations

import random
import re
import string
from itertools import islice
from pathlib import Path

import pytest
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hispec_ray.abacus.frames import FRAMES
from hispec_ray.abacus.problems import LEAST, MOST, MOST_STEPS, Problem, answer_of, held_out, make, stream
from hispec_ray.abacus.tokenizer import END, UNKNOWN, train_tokenizer

VOCABULARY = 512

EXPRESSION = r"\d+(?: [-+*/] \d+)*"
EQUATION = re.compile(rf"{EXPRESSION}(?: = {EXPRESSION})+(?: remainder \d+)?")
STEP = re.compile(r": (?P<left>\d+) (?P<sign>[-+*/]) (?P<right>\d+), .*, so (?P<result>\d+)\.")
START = re.compile(r"^ \w+ starts with (\d+)\.")


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    rng = random.Random(1)
    return [make(rng, 1 + index % MOST_STEPS) for index in range(10_000)]


@pytest.fixture(scope="module")
def tokenizer(problems: list[Problem]) -> PreTrainedTokenizerFast:
    return train_tokenizer((problem.text for problem in problems), VOCABULARY)


def evaluated(expression: str) -> int:
    """Work an expression as it is taught: products and quotients first, then from the left; a quotient is rounded down."""
    terms = re.split(r" ([-+]) ", expression)
    total = 0
    for sign, term in zip(["+", *terms[1::2]], terms[::2], strict=True):
        factors = re.split(r" ([*/]) ", term)
        value = int(factors[0])
        for operator, factor in zip(factors[1::2], factors[2::2], strict=True):
            value = value * int(factor) if operator == "*" else value // int(factor)
        total += value if sign == "+" else -value
    return total


def worked_steps(problem: Problem) -> list[re.Match[str]]:
    return list(STEP.finditer(problem.solution))


def test_the_same_seed_tells_the_same_problems() -> None:
    first, again, other = (list(islice(stream(seed, "train"), 200)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_the_splits_share_no_question() -> None:
    train = {problem.question for problem in islice(stream(3, "train", 2), 3000)}
    kept = {problem.question for problem in islice(stream(3, "held_out", 2), 300)}
    assert not train & kept


def test_one_in_twenty_is_held_out_and_duplicates_are_rare(problems: list[Problem]) -> None:
    assert 0.04 < sum(map(held_out, problems)) / len(problems) < 0.06
    assert len({problem.question for problem in problems}) > 0.999 * len(problems)


def test_a_stream_has_every_number_of_steps_about_as_often() -> None:
    steps = [problem.steps for problem in islice(stream(0, "train", 4), 2000)]
    assert all(400 < steps.count(count) < 600 for count in (1, 2, 3, 4))
    assert max(steps) == 4


def test_every_equation_is_right(problems: list[Problem]) -> None:
    for problem in problems:
        found = EQUATION.findall(problem.solution)
        assert len(found) == 2 * problem.steps
        for equation in found:
            sides, _, remainder = equation.partition(" remainder ")
            first, *others = sides.split(" = ")
            assert all(evaluated(side) == evaluated(first) for side in others), problem.solution
            if remainder:
                value, divisor = map(int, first.split(" / "))
                assert value % divisor == int(remainder), problem.solution


def test_the_steps_lead_to_the_answer(problems: list[Problem]) -> None:
    for problem in problems:
        steps = worked_steps(problem)
        assert len(steps) == problem.steps
        start = START.search(problem.solution)
        value = int(start[1] if start else steps[0]["left"])
        pair = "\nTogether: " in problem.solution
        for step in steps:
            assert evaluated(f"{step['left']} {step['sign']} {step['right']}") == int(step["result"]), problem.solution
            assert step["sign"] != "/" or int(step["left"]) % int(step["right"]) == 0, problem.solution
        for step in steps[:-1] if pair else steps:
            assert int(step["left"]) == value, problem.solution
            value = int(step["result"])
        if pair:  # what the one has, and what the other has by the step before
            assert steps[-1].group("left", "sign", "right") == (steps[-2]["left"], "+", steps[-2]["result"]), problem.solution
        assert int(steps[-1]["result"]) == problem.answer
        assert problem.solution.endswith(f"\nAnswer: {problem.answer}\n")


def test_a_step_repeats_its_sentence_from_the_question(problems: list[Problem]) -> None:
    for problem in problems:
        told = problem.question.split(". ")[:-1]
        lines = [line.strip() for line in problem.solution.splitlines() if not line.startswith(("Answer:", "Together:"))]
        assert len(told) == len(lines)
        for sentence, line in zip(told, lines, strict=True):
            repeated, colon, working = line.partition(":")
            if not colon:  # "Tom starts with 47."
                assert repeated.rstrip(".").split()[-1] in sentence.split()
                continue
            step = STEP.match(colon + working)
            assert step
            assert {word for word in repeated.split() if word != "them"} <= set(sentence.split()), problem.text
            assert step["right"] in repeated.split() or (step["right"] == "2" and {"twice", "half"} & set(repeated.split())), problem.text


def test_values_stay_in_range(problems: list[Problem]) -> None:
    values = [int(step["result"]) for problem in problems for step in worked_steps(problem)]
    assert min(values) == LEAST
    assert max(values) <= MOST


def test_problems_are_whole_sentences(problems: list[Problem]) -> None:
    for problem in problems:
        assert problem.question.endswith("?")
        assert not set("{}|") & set(problem.text)
        assert problem.text == f"Question: {problem.question}\nSolution:{problem.solution}"


def test_the_words_fit_a_small_vocabulary(problems: list[Problem]) -> None:
    words = {word for problem in problems for word in re.findall(r"[A-Za-z]+", problem.text)}
    assert len(words) <= 380
    assert {thing for frame in FRAMES for thing in frame.objects} <= words


@pytest.mark.parametrize("steps", [-1, 0, MOST_STEPS + 1])
def test_a_wrong_number_of_steps_is_refused_by_name(steps: int) -> None:
    with pytest.raises(ValueError, match=rf"^steps is {steps}; it must be 1 to 5$"):
        make(random.Random(0), steps)
    with pytest.raises(ValueError, match=rf"^max_steps is {steps}; it must be 1 to 5$"):
        stream(0, "train", steps)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"split is 'test'; it must be one of 'train', 'held_out'"):
        stream(0, "test")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: 37\n", 37),
        ("Answer: 1\nAnswer: 2", 2),
        ("Answer:5", 5),
        ("Answer: -4.", -4),
        ("Answer: 12 coins", 12),
        ("", None),
        ("37", None),
        ("Answer:", None),
        ("Answer: many 3", None),
        ("Answer: 3\nAnswer: x", None),
        ("Answer: " + "9" * 5000, None),
        ("Answer: ٣", None),
    ],
)
def test_answer_of_reads_the_last_answer_and_nothing_else(text: str, answer: int | None) -> None:
    assert answer_of(text) == answer


def test_answer_of_every_problem_is_its_answer(problems: list[Problem]) -> None:
    assert all(answer_of(problem.text) == problem.answer for problem in problems)


def test_the_vocabulary_has_exactly_the_size_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == VOCABULARY
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCABULARY))
    assert tokenizer.eos_token == tokenizer.pad_token == END
    with pytest.raises(ValueError, match=r"vocabulary is 100; it must be 108 or more"):
        train_tokenizer([], 100)


def test_problems_come_back_from_their_tokens(problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> None:
    for problem in problems[:2000]:
        ids = tokenizer.encode(problem.text)
        assert tokenizer.decode(ids) == problem.text
        assert "".join(tokenizer.decode([id]) for id in ids) == problem.text
        assert tokenizer.encode(problem.prompt) + tokenizer.encode(problem.solution) == ids


def test_printable_ascii_is_lossless_and_the_rest_unknown(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(2)
    for _ in range(500):
        text = "".join(rng.choices(string.printable[:95] + "\n", k=60))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("é\t世")) == [UNKNOWN] * 3


def test_each_digit_is_a_token(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("so 1234.")) == ["s", "o", " 1", "2", "3", "4", "."]
    words = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    assert {token for token in words if re.search(r"\d", token)} == {space + digit for space in ("", " ") for digit in string.digits}


def test_nearly_every_word_is_a_token(problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> None:
    known = tokenizer.get_vocab()
    words = [word for problem in problems for word in re.findall(r" ?[A-Za-z]+", problem.text)]
    assert sum(word in known for word in words) >= 0.97 * len(words)


def test_a_saved_tokenizer_is_the_same(problems: list[Problem], tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = problems[4].text
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode([*loaded.encode(text), loaded.eos_token_id], skip_special_tokens=True) == text
    assert len(loaded) == VOCABULARY
    assert loaded.pad_token == END
    assert loaded.chat_template == tokenizer.chat_template

    decoder = DecodeStream(skip_special_tokens=True)
    pieces = [decoder.step(loaded.backend_tokenizer, id) or "" for id in loaded.encode(text)]
    assert "".join(pieces) == text


def test_a_chat_is_its_last_question(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Old?"},
        {"role": "assistant", "content": "Answer: 1"},
        {"role": "user", "content": " How many? "},
    ]
    for prompted in (False, True):
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=prompted, tokenize=False)
        assert text == "Question: How many?\nSolution:"
