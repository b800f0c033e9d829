"""Guesses that cost no layer: what followed the same words before, in this text or in others.

Sources, for n-grams of several lengths that end the text so far: what followed the n-gram when this text last had it (prompt lookup;
Saxena 2023), and when any text of this process last had it. And after a single token, the full depth's own first and second choice
when it last stood there (token recycling; arXiv 2408.08696, with two candidates and a chain in place of its tree).

At every token that the full depth writes, each source is held against it, whether it was asked or not; so its share of right
guesses is known for this very text, and recovers when the text does. The drafter takes the source with the largest share, and
guesses on while the product of the shares is above a threshold. Whatever it guesses, the levels above keep the text right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hispec_ray.core.plan import StepPlan

LENGTHS = (6, 4, 3, 2)
"""Lengths of the n-grams."""

_SOURCES = 2 * len(LENGTHS) + 1  # this text by n-gram, other texts by n-gram, after the last token
_SLOW, _FAST = 0.99, 0.9
"""What a share keeps at every new token: over all texts, and within one."""
_START = 0.5
"""A share before there was anything to hold it against."""


class Guess(NamedTuple):
    """A guess of a drafter. second: another candidate, where it has one."""

    token: int
    second: int | None = None


class Drafter(Protocol):
    """Who guesses from texts alone, without a layer."""

    def begin(self, plan: StepPlan) -> None:
        """Take note of the plan's new tokens, histories and endings."""

    def propose(self, id: int, tentative: Sequence[int], most: int) -> list[Guess]:
        """Return up to `most` guesses of what follows the sequence's text and its tentative tokens; none where it is not confident."""

    def committed(self, id: int, tokens: Sequence[int], seconds: Sequence[int]) -> None:
        """Take note of what the full depth has written, and of its second choice at each of these tokens."""


class _Text:
    """A sequence's tokens, what followed each n-gram in them last, and the sources' shares of right guesses in it.

    What is written is taken up when the next guess is asked for: a sequence that decodes plainly costs nothing, and teaches nothing.
    """

    __slots__ = ("asked", "follows", "new", "shares", "tokens")

    def __init__(self, shares: list[float]) -> None:
        self.tokens: list[int] = []
        self.new: list[tuple[int, int]] = []  # written, with second choices, and not yet taken up
        self.follows: dict[tuple[int, ...], int] = {}
        self.shares = list(shares)
        self.asked = False


class LookupDrafter:
    """See the module. threshold: least confidence, 0 to 1, in a whole run of guesses. entries: n-grams of other texts that are kept."""

    def __init__(self, threshold: float, entries: int = 500_000) -> None:
        self.threshold = threshold
        self.entries = entries
        self._texts: dict[int, _Text] = {}
        self._follows: dict[tuple[int, ...], int] = {}  # over all texts, oldest first
        self._after: dict[int, tuple[int, int]] = {}
        self._shares = [_START] * _SOURCES

    def begin(self, plan: StepPlan) -> None:
        for id in plan.ended:
            text = self._texts.pop(id, None)
            if text is not None and text.asked:
                self._take_up(text)
        for sequence in plan.sequences:
            text = self._texts.get(sequence.id)
            if text is None or sequence.history is not None:
                text = self._texts[sequence.id] = _Text(self._shares)
                self._read(text, sequence.history or ())
            known = len(text.tokens) + len(text.new)
            self._read(text, sequence.tokens[known - sequence.start :])  # the last one committed is known already

    def committed(self, id: int, tokens: Sequence[int], seconds: Sequence[int]) -> None:
        self._texts[id].new += zip(tokens, seconds, strict=True)

    def _take_up(self, text: _Text) -> None:
        """Hold the sources against what was written, and remember it."""
        for token, second in text.new:
            if text.tokens:
                for source, guess in self._guesses(text, text.tokens[-LENGTHS[0] :]):
                    text.shares[source] += (1 - _FAST) * ((guess == token) - text.shares[source])
                    self._shares[source] += (1 - _SLOW) * ((guess == token) - self._shares[source])
                self._after[text.tokens[-1]] = token, second
            for length in LENGTHS:
                if len(text.tokens) >= length:
                    gram = tuple(text.tokens[-length:])
                    self._follows.pop(gram, None)  # so that it counts as new
                    self._follows[gram] = token
            self._read(text, (token,))
        text.new.clear()
        while len(self._follows) > self.entries:
            del self._follows[next(iter(self._follows))]

    def propose(self, id: int, tentative: Sequence[int], most: int) -> list[Guess]:
        text = self._texts[id]
        self._take_up(text)
        text.asked = True
        recent = [*text.tokens[-LENGTHS[0] :], *tentative][-LENGTHS[0] :]
        guesses: list[Guess] = []
        confidence = 1.0
        while len(guesses) < most:
            share, token = max(((text.shares[source], guess) for source, guess in self._guesses(text, recent)), default=(0.0, 0))
            confidence *= share
            if confidence < self.threshold or not share:
                break
            others = (candidate for candidate in self._after.get(recent[-1], ()) if candidate != token)
            guesses.append(Guess(token, next(others, None)))
            recent = [*recent, token][-LENGTHS[0] :]
        return guesses

    def _read(self, text: _Text, tokens: Sequence[int]) -> None:
        known = text.tokens
        for token in tokens:
            for length in LENGTHS:
                if len(known) >= length:
                    text.follows[tuple(known[-length:])] = token
            known.append(token)

    def _guesses(self, text: _Text, recent: Sequence[int]) -> list[tuple[int, int]]:
        """What each source says follows the recent tokens: (source, token) of those that have a say."""
        found: list[tuple[int, int]] = []
        for number, length in enumerate(LENGTHS):
            if len(recent) >= length:
                gram = tuple(recent[-length:])
                for source, follows in ((number, text.follows), (len(LENGTHS) + number, self._follows)):
                    token = follows.get(gram)
                    if token is not None:
                        found.append((source, token))
        after = self._after.get(recent[-1])
        if after is not None:
            found.append((_SOURCES - 1, after[0]))
        return found
