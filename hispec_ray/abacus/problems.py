"""Arithmetic word problems with worked solutions, as many as are asked for, always the same for the same seed.

A problem is a little story about one quantity, told in order: it opens with a number, each further sentence changes it, and the
last asks for it. The worked solution walks through the same sentences and works each one digit by digit, so that every number in it
follows from a few digits that stand shortly before it.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

from hispec_ray.abacus.frames import BOYS, COMPARISONS, FRAMES, GIRLS, HER, HIS, TOGETHER, Frame, Operation

MOST_STEPS = 5
LEAST, MOST = 2, 199
"""Bounds of the quantity, at every step; from 2 on plural nouns are right."""

Split = Literal["train", "held_out"]

_HELD_OUT_ONE_IN = 20
_PAIR_SHARE = 0.25
"""Part of the stories that end by comparing two people, of those that can."""
_GROUPS_SHARE = 0.15
"""Part of the stories that open with groups of equal size."""
_BIG_SHARE = 0.1
"""Part of the numbers gained or lost that may go up to 99; the others end at 50."""
_WEIGHTS = {Operation.GAIN: 3.0, Operation.LOSE: 3.0, Operation.TIMES: 3.0, Operation.SHARE: 2.0, Operation.HALVE: 1.0}
"""How often an operation is told, relative to the others that the quantity allows."""


@dataclass(frozen=True)
class Problem:
    """A word problem, its worked solution and the whole number that it asks for."""

    question: str
    solution: str
    answer: int
    steps: int

    @property
    def prompt(self) -> str:
        """What a model is given; the solution is to follow at once."""
        return f"Question: {self.question}\nSolution:"

    @property
    def text(self) -> str:
        return self.prompt + self.solution


def make(rng: random.Random, steps: int) -> Problem:
    """Return a problem whose solution takes `steps` operations; raises ValueError unless that is 1 to 5."""
    _check_steps("steps", steps)
    story = _Story(rng)
    left = steps - story.open()
    while left:
        if left == 2 and story.comparable and rng.random() < _PAIR_SHARE:
            story.compare()
            break
        story.change()
        left -= 1
    return story.finish(steps)


def held_out(problem: Problem) -> bool:
    """Say whether the problem belongs to the held-out split: one in 20, chosen by a digest of the question alone."""
    digest = hashlib.blake2b(problem.question.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % _HELD_OUT_ONE_IN == 0


def stream(seed: int, split: Split, max_steps: int = MOST_STEPS) -> Iterator[Problem]:
    """Return an endless iterator over problems of one split, steps uniform in 1 to max_steps; the two splits share no question.

    Raises ValueError for an unknown split or a max_steps outside 1 to 5.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; it must be one of {', '.join(map(repr, get_args(Split)))}")
    _check_steps("max_steps", max_steps)
    return _drawn(random.Random(seed), split == "held_out", max_steps)


def answer_of(text: str) -> int | None:
    """Return the whole number right after the last "Answer:" of a generated text, None where there is none."""
    found = re.match(r"Answer:\s*(-?[0-9]{1,9})(?![0-9])", text[max(text.rfind("Answer:"), 0) :])  # more digits are garbage
    return int(found[1]) if found else None


def _check_steps(field: str, value: int) -> None:
    if not 1 <= value <= MOST_STEPS:
        raise ValueError(f"{field} is {value}; it must be 1 to {MOST_STEPS}")


def _drawn(rng: random.Random, wanted: bool, max_steps: int) -> Iterator[Problem]:
    while True:
        problem = make(rng, rng.randint(1, max_steps))
        if held_out(problem) == wanted:
            yield problem


class _Story:
    """A problem in the making: what has been told and worked so far, and the quantity after it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._frame: Frame = rng.choice(FRAMES)
        name, other = rng.sample(BOYS + GIRLS, 2)
        self._words = {"name": name, "other": other, "objects": rng.choice(self._frame.objects), **(HIS if name in BOYS else HER)}
        if self._frame.compare:
            self._words["has"], self._words["have"] = self._frame.compare
        self._told: list[str] = []
        self._worked: list[str] = []
        self._used: set[str] = set()
        self._question = rng.choice(self._frame.question)
        self._value = 0

    @property
    def comparable(self) -> bool:
        """Whether the person can be compared with another one; the two together then fit under MOST."""
        return self._frame.compare is not None and self._value <= MOST // 2

    def open(self) -> int:
        """Tell the first sentence; return how many steps that took."""
        if self._rng.random() < _GROUPS_SHARE:
            each, groups = self._rng.randint(LEAST, 40), self._rng.randint(2, 4)
            self._tell(self._frame.groups, each, groups)
            self._work(self._restated(self._frame.groups, each, groups), Operation.TIMES, each, groups)
            return 1
        self._value = self._rng.randint(LEAST, 99)
        self._tell(self._rng.choice(self._frame.opening), self._value)
        self._worked.append(f" {self._words['name']} starts with {self._value}.")
        return 0

    def change(self) -> None:
        """Tell one operation on the quantity, in a sentence that the story does not have yet where one is left."""
        operation, number = _draw(self._rng, self._value, MOST, tuple(_WEIGHTS))
        sentences = self._frame.sentences(operation)
        sentence = self._rng.choice([each for each in sentences if each not in self._used] or sentences)
        self._used.add(sentence)
        self._tell(sentence, number)
        self._work(self._restated(sentence, number), operation, self._value, number)

    def compare(self) -> None:
        """Tell what another person has, and ask for both together; takes two steps."""
        own = self._value
        operation, number = _draw(self._rng, own, MOST - own, tuple(COMPARISONS))
        self._tell(COMPARISONS[operation], number)
        self._work(self._restated(COMPARISONS[operation], number), operation, own, number)
        self._work("Together", Operation.GAIN, own, self._value)
        self._question = TOGETHER

    def finish(self, steps: int) -> Problem:
        question = " ".join([*self._told, self._filled(self._question)])
        return Problem(question, "".join([*self._worked, f"\nAnswer: {self._value}\n"]), self._value, steps)

    def _tell(self, sentence: str, number: int, groups: int = 0) -> None:
        self._told.append(self._filled(sentence.replace("|", ""), number, groups) + ".")

    def _work(self, restated: str, operation: Operation, value: int, number: int) -> None:
        start = "\n" if self._worked else " "
        self._worked.append(f"{start}{restated}: {_working(operation, value, number)}.")
        self._value = _result(operation, value, number)

    def _restated(self, sentence: str, number: int, groups: int = 0) -> str:
        short = sentence.partition("|")[0].replace("the {objects}", "them").replace(" {objects}", "")
        return self._filled(short, number, groups)

    def _filled(self, template: str, number: int = 0, groups: int = 0) -> str:
        if number == 2:
            template = template.replace("{n} times", "twice")
        return template.format(n=number, groups=groups, **self._words)


def _draw(rng: random.Random, value: int, most: int, operations: Sequence[Operation]) -> tuple[Operation, int]:
    """Return one of the operations and its number, such that the result is LEAST to `most`; gain or lose must be possible."""
    choices = {operation: numbers for operation in operations if (numbers := _numbers(rng, operation, value, most))}
    operation = rng.choices(list(choices), [_WEIGHTS[each] for each in choices])[0]
    return operation, rng.choice(choices[operation])


def _numbers(rng: random.Random, operation: Operation, value: int, most: int) -> Sequence[int]:
    """Return the numbers that the operation may take on the value; none where it cannot be told."""
    big = 99 if rng.random() < _BIG_SHARE else 50
    match operation:
        case Operation.GAIN:
            return range(2, min(big, most - value) + 1)
        case Operation.LOSE:
            return range(2, min(big, value - LEAST) + 1)
        case Operation.TIMES:
            return [number for number in range(2, 6) if value * number <= most and (number == 2 or value <= 40)]
        case Operation.SHARE:
            return [number for number in range(2, 6) if value % number == 0 and value >= LEAST * number]
        case Operation.HALVE:
            return [2] if value % 2 == 0 and value >= LEAST * 2 else []


def _result(operation: Operation, value: int, number: int) -> int:
    match operation:
        case Operation.GAIN:
            return value + number
        case Operation.LOSE:
            return value - number
        case Operation.TIMES:
            return value * number
        case Operation.SHARE | Operation.HALVE:
            return value // number


def _working(operation: Operation, value: int, number: int) -> str:
    """Work the operation on paper: ones and tens apart, the carry written even where it is 0, tens of 10 and more left whole."""
    tens, ones = divmod(value, 10)
    more_tens, more_ones = divmod(number, 10)
    match operation:
        case Operation.GAIN:
            carry, last = divmod(ones + more_ones, 10)
            first = tens + more_tens + carry
            head = f"{value} + {number}, ones {ones} + {more_ones} = {ones + more_ones}, tens {tens} + {more_tens} + {carry} = {first}"
        case Operation.LOSE:
            borrow = int(ones < more_ones)
            last = ones + 10 * borrow - more_ones
            first = tens - more_tens - borrow
            head = f"{value} - {number}, ones {ones + 10 * borrow} - {more_ones} = {last}, tens {tens} - {more_tens} - {borrow} = {first}"
        case Operation.TIMES:
            carry, last = divmod(ones * number, 10)
            first = tens * number + carry
            head = (
                f"{value} * {number}, ones {ones} * {number} = {ones * number}, "
                f"tens {tens} * {number} + {carry} = {tens * number} + {carry} = {first}"
            )
        case Operation.SHARE | Operation.HALVE:
            first, rest = divmod(tens, number)
            last = (10 * rest + ones) // number
            head = f"{value} / {number}, tens {tens} / {number} = {first} remainder {rest}, ones {10 * rest + ones} / {number} = {last}"
    return f"{head}, so {10 * first + last}"


if __name__ == "__main__":  # problems that the model was not trained on, one a line
    for problem in islice(stream(1, "held_out"), 16):
        print(problem.question)
