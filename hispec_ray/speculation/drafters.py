"""Guesses that cost no layer: what followed the same words before, in this text or in others.

Candidates come from n-grams of several lengths that end the text so far: what followed them when this text last had them (prompt lookup;
Saxena 2023), and when any text of this process last had them, or else in most texts of a file (see `phrases`). And after a single token,
the full depth's own first and second choice when it last stood there (token recycling; arXiv 2408.08696, with two candidates and a
chain in place of its tree), or else what the file has.

A candidate's confidence is counted, not assumed: it is how often candidates of its kind were right. A kind is the longest n-gram of this
text that speaks for the token, the longest of other texts, its rank after the last token, and how well this text was foretold lately.
Every token that the full depth writes is held against all candidates once the text's next guess is asked for, whether they were guessed
or not; so confidence follows the text down and up again. Whatever is guessed, the levels above keep the text right.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hispec_ray.core.plan import StepPlan
from hispec_ray.speculation.phrases import LENGTHS, NONE, Phrases

_RANKS = 3
_FORTUNES = 4  # grades of how well a text was foretold lately: enough that confidence falls within ten tokens that nobody foretold
_FORTUNE_STEP = 0.1
_KINDS = (len(LENGTHS) + 1) ** 2 * _RANKS
_START = 0.4
"""Confidence in a kind of candidates that was never seen."""
_WEIGHT = 20.0
"""How many candidates of a finer kind it takes to believe it as much as the coarser one that it is part of."""
_MOST_NEW = 32
"""Written tokens that are learned from at once. A text that was not asked about for longer teaches nothing when it ends."""
_MEMORY = 100
"""Candidates of a kind after which older ones fade."""


class Guess(NamedTuple):
    """A guess of a drafter. chance: that it and those before it are right. second: another candidate, where one is likely enough."""

    token: int
    chance: float
    second: int | None = None


class Drafter(Protocol):
    """Who guesses from texts alone, without a layer."""

    def begin(self, plan: StepPlan) -> None:
        """Take note of the plan's new tokens, histories and endings."""

    def propose(self, id: int, tentative: Sequence[int], most: int, least: float, each: float = 0.0) -> list[Guess]:
        """Return up to `most` guesses of what follows the sequence's text and its tentative tokens.

        A guess is made while it and those before it are all right with a probability of at least `least`, and it is, given them, of
        at least `each`. None follows one that ends the sequence.
        """

    def committed(self, id: int, tokens: Sequence[int], seconds: Sequence[int]) -> None:
        """Take note of what the full depth has written, and of its second choice at each of these tokens."""


class _Confidence:
    """How often candidates of each kind were right: of the coarse kinds, and of each in every fortune."""

    def __init__(self) -> None:
        self._counts = [0.0] * (_KINDS * (_FORTUNES + 1))
        self._shares = [_START] * (_KINDS * (_FORTUNES + 1))

    def of(self, kind: int, fortune: int) -> float:
        fine = _KINDS + kind * _FORTUNES + fortune
        count, coarse = self._counts[fine], self._counts[kind]
        share = (self._shares[kind] * coarse + _START * _WEIGHT) / (coarse + _WEIGHT)
        return (self._shares[fine] * count + share * _WEIGHT) / (count + _WEIGHT)

    def learn(self, kind: int, fortune: int, right: bool) -> None:
        for at in (kind, _KINDS + kind * _FORTUNES + fortune):
            self._counts[at] = count = min(self._counts[at] + 1, _MEMORY)
            self._shares[at] += (right - self._shares[at]) / count


class _Text:
    """A sequence's tokens, what followed each n-gram in them last, and the share of tokens that were foretold lately.

    What is written is taken up when the next guess is asked for: a sequence that decodes plainly costs nothing, and teaches nothing.
    """

    __slots__ = ("asked", "ends", "follows", "foretold", "new", "tokens", "unread")

    def __init__(self, ends: frozenset[int]) -> None:
        self.ends = ends
        self.tokens: list[int] = []
        self.unread: list[int] = []  # tokens of the prompt that come before the new ones
        self.new: list[tuple[int, int]] = []  # written, with second choices, and not yet taken up
        self.follows: dict[tuple[int, ...], int] = {}
        self.foretold = 0.5
        self.asked = False

    @property
    def length(self) -> int:
        return len(self.tokens) + len(self.unread) + len(self.new)

    def read(self, tokens: Sequence[int]) -> None:
        known = self.tokens
        for token in tokens:
            for length in LENGTHS:
                if len(known) >= length:
                    self.follows[tuple(known[-length:])] = token
            known.append(token)


class LookupDrafter:
    """See the module. phrases: known beforehand; entries: n-grams of other texts that are kept besides, about 300 bytes each."""

    def __init__(self, phrases: Phrases = NONE, entries: int = 500_000) -> None:
        self.entries = entries
        self._phrases = phrases
        self._texts: dict[int, _Text] = {}
        self._follows: OrderedDict[tuple[int, ...], int] = OrderedDict()  # over all texts, oldest first
        self._after: dict[int, tuple[int, int]] = {}
        self._confidence = _Confidence()

    def begin(self, plan: StepPlan) -> None:
        for id in plan.ended:
            text = self._texts.pop(id, None)
            if text is not None and text.asked and len(text.new) <= _MOST_NEW:
                self._take_up(text)
        for sequence in plan.sequences:
            text = self._texts.get(sequence.id)
            if text is None or sequence.history is not None:
                text = self._texts[sequence.id] = _Text(sequence.ends)
                text.unread += sequence.history or ()
            more = sequence.tokens[text.length - sequence.start :]  # the last one committed is known already
            assert not (more and text.new), "a prompt ends before its text is written"
            text.unread += more

    def committed(self, id: int, tokens: Sequence[int], seconds: Sequence[int]) -> None:
        self._texts[id].new += zip(tokens, seconds, strict=True)

    def propose(self, id: int, tentative: Sequence[int], most: int, least: float, each: float = 0.0) -> list[Guess]:
        text = self._texts[id]
        self._take_up(text)
        text.asked = True
        recent = (*text.tokens[-LENGTHS[0] :], *tentative)[-LENGTHS[0] :]
        foretold = text.foretold
        guesses: list[Guess] = []
        chance = 1.0
        while len(guesses) < most:
            ranked = self._ranked(self._candidates(text, recent), foretold)
            if not ranked or chance * ranked[0][0] < least or ranked[0][0] < each:
                break
            share, token = ranked[0]
            second = ranked[1][1] if len(ranked) > 1 and chance * ranked[1][0] >= least else None
            chance *= share
            guesses.append(Guess(token, chance, second))
            if token in text.ends:
                break
            recent = (*recent, token)[-LENGTHS[0] :]
            foretold += _FORTUNE_STEP * (1.0 - foretold)
        return guesses

    def _take_up(self, text: _Text) -> None:
        """Hold the candidates against what was written, and remember it; of a text that was not asked about for long, its end."""
        text.read(text.unread)
        text.unread.clear()
        late = max(0, len(text.new) - _MOST_NEW)
        text.read([token for token, _ in text.new[:late]])
        for token, second in text.new[late:]:
            recent = tuple(text.tokens[-LENGTHS[0] :])
            if recent:
                candidates = self._candidates(text, recent)
                ranked = self._ranked(candidates, text.foretold)
                fortune = int(text.foretold * _FORTUNES * 0.999)
                for candidate, kind in candidates.items():
                    self._confidence.learn(kind, fortune, candidate == token)
                text.foretold += _FORTUNE_STEP * ((bool(ranked) and ranked[0][1] == token) - text.foretold)
                self._after[recent[-1]] = token, second
            for length in LENGTHS:
                if len(recent) >= length:
                    gram = recent[-length:]
                    self._follows[gram] = token
                    self._follows.move_to_end(gram)
            text.read((token,))
        text.new.clear()
        while len(self._follows) > self.entries:
            self._follows.popitem(last=False)

    def _candidates(self, text: _Text, recent: tuple[int, ...]) -> dict[int, int]:
        """What may follow the recent tokens: the candidates and their kinds."""
        own: dict[int, int] = {}
        others: dict[int, int] = {}
        phrases = self._phrases
        for number, length in enumerate(LENGTHS, 1):
            if len(recent) >= length:
                gram = recent[-length:]
                token = text.follows.get(gram)
                if token is not None:
                    own.setdefault(token, number)
                token = self._follows.get(gram)
                if token is None:
                    token = phrases.follows.get(gram)
                if token is not None:
                    others.setdefault(token, number)
        last = recent[-1]
        after: tuple[int, ...] = self._after.get(last) or phrases.after.get(last) or ()
        ranks = {token: rank for rank, token in enumerate(dict.fromkeys(after), 1)}
        lengths = len(LENGTHS) + 1
        return {
            token: (own.get(token, 0) * lengths + others.get(token, 0)) * _RANKS + ranks.get(token, 0) for token in (own | others | ranks)
        }

    def _ranked(self, candidates: dict[int, int], foretold: float) -> list[tuple[float, int]]:
        """Candidates with their confidence, the most confident first; of equals the one with the longest n-gram."""
        fortune = int(foretold * _FORTUNES * 0.999)
        return sorted(((self._confidence.of(kind, fortune), token) for token, kind in candidates.items()), key=lambda each: -each[0])
