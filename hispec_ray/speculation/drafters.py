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

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from hispec_ray.core.plan import StepPlan
from hispec_ray.speculation.phrases import LENGTHS, NONE, TOKEN_BYTES, Phrases, packed

_SPAN = TOKEN_BYTES * LENGTHS[0]
"""Bytes of the longest n-gram."""
_CUTS = tuple(_SPAN - TOKEN_BYTES * length for length in LENGTHS)  # where each length begins in it
_RANKS = 3
_FORTUNES = 4  # grades of how well a text was foretold lately: enough that confidence falls within ten tokens that nobody foretold
_FORTUNE_STEP = 0.1
_OTHERS = _RANKS
_OWN = _OTHERS * (len(LENGTHS) + 1)
_KINDS = _OWN * (len(LENGTHS) + 1)
"""A kind is _OWN times the number of its length in this text, counted from 1 for the longest, 0 for none, + _OTHERS times that in others,
+ its rank after the last token."""
_START = 0.4
"""Confidence in a kind of candidates that was never seen."""
_WEIGHT = 20.0
"""How many candidates of a finer kind it takes to believe it as much as the coarser one that it is part of."""
MOST_NEW = 32
"""Written tokens that are learned from at once. A text that was not asked about for longer teaches nothing when it ends."""
ENTRIES = 500_000
"""N-grams of other texts that are kept."""
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


_UNKNOWN = (None,) * _FORTUNES


class _Confidence:
    """How often candidates of each kind were right: of the coarse kinds, and of each in every fortune."""

    def __init__(self) -> None:
        self._counts = [0.0] * (_KINDS * (_FORTUNES + 1))
        self._shares = [_START] * (_KINDS * (_FORTUNES + 1))
        self._known: list[float | None] = [None] * (_KINDS * _FORTUNES)

    def of(self, kind: int, fortune: int) -> float:
        at = kind * _FORTUNES + fortune
        known = self._known[at]
        if known is None:
            fine, coarse = self._counts[_KINDS + at], self._counts[kind]
            share = (self._shares[kind] * coarse + _START * _WEIGHT) / (coarse + _WEIGHT)
            known = self._known[at] = (self._shares[_KINDS + at] * fine + share * _WEIGHT) / (fine + _WEIGHT)
        return known

    def learn(self, kind: int, fortune: int, right: bool) -> None:
        first = kind * _FORTUNES
        for at in (kind, _KINDS + first + fortune):
            self._counts[at] = count = min(self._counts[at] + 1, _MEMORY)
            self._shares[at] += (right - self._shares[at]) / count
        self._known[first : first + _FORTUNES] = _UNKNOWN

    def ranked(self, kinds: Mapping[int, int], foretold: float) -> tuple[float, int | None, float, int | None]:
        """Return (confidence, token, next confidence, next token) of the two most confident candidates; of equals the first.

        kinds: by candidate. A token that is not there is None.
        """
        fortune = fortune_of(foretold)
        best, token, next_best, second = -1.0, None, -1.0, None
        for candidate, kind in kinds.items():
            share = self._known[kind * _FORTUNES + fortune] or self.of(kind, fortune)
            if share > best:
                best, token, next_best, second = share, candidate, best, token
            elif share > next_best:
                next_best, second = share, candidate
        return best, token, next_best, second


def fortune_of(foretold: float) -> int:
    """Return the grade of a share of tokens that were foretold."""
    return int(foretold * _FORTUNES * 0.999)


class _News:
    """What of a text is not taken up yet: that happens when the next guess is asked for, so a sequence that decodes plainly costs nothing.

    length: tokens in all. read: the prompt's; written: the full depth's, behind these, with its second choices. asked: whether anybody
    has asked for a guess.
    """

    __slots__ = ("asked", "length", "read", "seconds", "written")

    def __init__(self, history: Sequence[int]) -> None:
        self.read = list(history)
        self.length = len(self.read)
        self.written: list[int] = []
        self.seconds: list[int] = []
        self.asked = False


@lru_cache(maxsize=2)
def _by_gram(phrases: Phrases) -> tuple[dict[bytes, int], dict[bytes, tuple[int, int]]]:
    """By n-gram, and by token; see `Phrases`."""
    follows = {b"".join(map(packed, gram)): token for grams in phrases.grams.values() for *gram, token in grams.tolist()}
    return follows, {packed(token): (first, second) for token, first, second in phrases.after.tolist()}


class Lookup(ABC):
    """Keeps what is new of each text, for who looks up."""

    def __init__(self) -> None:
        self._news: dict[int, _News] = {}

    @abstractmethod
    def _start(self, id: int, ends: Collection[int]) -> None:
        """Begin a text, anew where there is one. ends: tokens that end it."""

    @abstractmethod
    def _take_up(self, id: int) -> None:
        """Learn from what is new of a text."""

    @abstractmethod
    def _forget(self, id: int) -> None:
        """Let a text go."""

    def begin(self, plan: StepPlan) -> None:
        for id in plan.ended:
            news = self._news.get(id)
            if news is None:
                continue
            if news.asked and len(news.written) <= MOST_NEW:
                self._take_up(id)
            self._forget(id)
            del self._news[id]
        for sequence in plan.sequences:
            news = self._news.get(sequence.id)
            if news is None or sequence.history is not None:
                news = self._news[sequence.id] = _News(sequence.history or ())
                self._start(sequence.id, sequence.ends)
            known = news.length - sequence.start
            if known < len(sequence.tokens):  # the last one committed is known already
                assert not news.written, "a prompt ends before its text is written"
                news.read += sequence.tokens[known:]
                news.length = sequence.start + len(sequence.tokens)

    def committed(self, id: int, tokens: Sequence[int], seconds: Sequence[int]) -> None:
        assert len(tokens) == len(seconds), "each token has a second choice beside it"
        news = self._news[id]
        news.written += tokens
        news.seconds += seconds
        news.length += len(tokens)


class _Text:
    """A sequence, what followed each n-gram in it last, and the share of tokens that were foretold lately.

    tail: the last tokens that were taken up, at most as many as the longest n-gram has, packed.
    """

    __slots__ = ("ends", "follows", "foretold", "tail")

    def __init__(self, ends: Collection[int]) -> None:
        self.ends = ends
        self.tail = b""
        self.follows: dict[bytes, int] = {}
        self.foretold = 0.5

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.note(grams_of(self.tail), token)

    def note(self, grams: Sequence[bytes], token: int) -> None:
        """Take up a token. grams: those that end the text before it."""
        for gram in grams:
            self.follows[gram] = token
        self.tail = (self.tail + packed(token))[-_SPAN:]


def grams_of(tail: bytes) -> list[bytes]:
    """Return the n-grams that end these tokens, the longest first."""
    if len(tail) == _SPAN:
        return [tail[cut:] for cut in _CUTS]
    short = _SPAN - len(tail)
    return [tail[cut - short :] for cut in _CUTS if cut >= short]


class LookupDrafter(Lookup):
    """See the module; in Python, for where there is no compiler (see `native_lookup`).

    phrases: known beforehand; entries: n-grams of other texts that are kept besides, about 200 bytes each.
    """

    def __init__(self, phrases: Phrases = NONE, entries: int = ENTRIES) -> None:
        super().__init__()
        self._entries = entries
        self._phrases, self._phrases_after = _by_gram(phrases)
        self._texts: dict[int, _Text] = {}
        self._follows: OrderedDict[bytes, int] = OrderedDict()  # over all texts, oldest first
        self._after: dict[bytes, tuple[int, int]] = {}
        self._confidence = _Confidence()

    def _start(self, id: int, ends: Collection[int]) -> None:
        self._texts[id] = _Text(ends)

    def _forget(self, id: int) -> None:
        del self._texts[id]

    def propose(self, id: int, tentative: Sequence[int], most: int, least: float, each: float = 0.0) -> list[Guess]:
        self._take_up(id)
        self._news[id].asked = True
        text = self._texts[id]
        tail, foretold, ends = text.tail, text.foretold, text.ends
        for token in tentative[-LENGTHS[0] :]:
            tail = (tail + packed(token))[-_SPAN:]
        guesses: list[Guess] = []
        chance = 1.0
        while len(guesses) < most:
            share, best, next_share, next_best = self._confidence.ranked(self._candidates(text, tail, grams_of(tail)), foretold)
            if best is None or chance * share < least or share < each:
                break
            second = next_best if chance * next_share >= least else None
            chance *= share
            guesses.append(Guess(best, chance, second))
            if best in ends:
                break
            tail = (tail + packed(best))[-_SPAN:]
            foretold += _FORTUNE_STEP * (1.0 - foretold)
        return guesses

    def _take_up(self, id: int) -> None:
        """Hold the candidates against what was written, and remember it; of a text that was not asked about for long, its end."""
        text, news = self._texts[id], self._news[id]
        late = max(0, len(news.written) - MOST_NEW)
        text.read(news.read)
        text.read(news.written[:late])
        confidence, others = self._confidence, self._follows
        for token, second in zip(news.written[late:], news.seconds[late:], strict=True):
            tail = text.tail
            grams = grams_of(tail)
            if tail:
                kinds = self._candidates(text, tail, grams)
                best = confidence.ranked(kinds, text.foretold)[1]
                fortune = fortune_of(text.foretold)
                for candidate, kind in kinds.items():
                    confidence.learn(kind, fortune, candidate == token)
                text.foretold += _FORTUNE_STEP * ((best == token) - text.foretold)
                self._after[tail[-TOKEN_BYTES:]] = token, second
            for gram in grams:
                others[gram] = token
                others.move_to_end(gram)
            text.note(grams, token)
        for taken in (news.read, news.written, news.seconds):
            taken.clear()
        while len(others) > self._entries:
            others.popitem(last=False)

    def _candidates(self, text: _Text, tail: bytes, grams: Sequence[bytes]) -> dict[int, int]:
        """What may follow the last tokens: the candidates and their kinds, those with the longest n-grams of this text first.

        tail: these tokens, at least one; grams: that end them.
        """
        kinds: dict[int, int] = {}
        number = len(LENGTHS) - len(grams)
        own, others, phrases = text.follows, self._follows, self._phrases
        for at, gram in enumerate(grams, number + 1):
            token = own.get(gram)
            if token is not None and token not in kinds:
                kinds[token] = at * _OWN
        for at, gram in enumerate(grams, number + 1):
            token = others.get(gram)
            if token is None:
                token = phrases.get(gram)
            if token is not None:
                kind = kinds.get(token, 0)
                if kind % _OWN == 0:
                    kinds[token] = kind + at * _OTHERS
        last = tail[-TOKEN_BYTES:]
        after = self._after.get(last) or self._phrases_after.get(last)
        if after is not None:
            first, second = after
            kinds[first] = kinds.get(first, 0) + 1
            if second != first:
                kinds[second] = kinds.get(second, 0) + 2
        return kinds
