"""Grammars: which tokens may come next, for a text and for what is guessed after it.

llguidance does the work: it compiles a JSON schema in milliseconds where xgrammar takes seconds for large ones, takes tokens back
as cheaply as it reads them, and depends on nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_KEPT = 512  # grammars: more than run and wait (272 by default); a large one takes a mebibyte, until its text begins
# Per step about 5 ms at the very most, to compile about 100 ms: the time that one request can take from all others.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000, step_lexer_fuel=100_000, step_max_items=50_000, max_lexer_states=50_000, max_grammar_size=200_000,
    verbose_errors=False,
)  # fmt: skip
# A scout takes in one step what its text took in several, and must get as far: up to about 20 ms.
_SCOUTS_LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000, step_lexer_fuel=400_000, step_max_items=200_000, max_lexer_states=200_000, max_grammar_size=200_000,
    verbose_errors=False,
)  # fmt: skip


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message says why."""


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the latest. Safe to use from several threads.

    Every text and every scout has a matcher that is compiled for it alone, in about a millisecond. Copies of a matcher, "deep" ones too,
    share a lexer: what one of them has read changes how far another gets, and where one comes to its limits all have come to them.
    """

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        """tokenizer: called when the first grammar comes, for it takes a moment."""
        self._tokenizer = tokenizer
        self._known: OrderedDict[str, Any] = OrderedDict()  # a matcher that has read nothing, for the next text, or None
        self._lock = threading.Lock()

    def walk(self, grammar: str) -> Walk:
        """Return the state of a text that has not begun. Raises GrammarError."""
        self.check(grammar)
        with self._lock:
            text = self._known.pop(grammar, None)
            self._known[grammar] = None
        return Walk(text or self._compiled(grammar, _LIMITS), partial(self._compiled, grammar, _SCOUTS_LIMITS))

    def check(self, grammar: str) -> None:
        """Raises GrammarError where a grammar cannot be compiled."""
        with self._lock:
            if grammar in self._known:
                self._known.move_to_end(grammar)
                return
        matcher = self._compiled(grammar, _LIMITS)
        with self._lock:
            self._known[grammar] = matcher
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)

    def _compiled(self, grammar: str, limits: LLParserLimits) -> Any:
        matcher = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip())
        return matcher


class Walk:
    """A grammar's state after a text and, for the moment, after what is guessed behind it.

    The text alone decides how far it gets: its matcher reads nothing else, and says what may come before each of its tokens, as in plain
    decoding. Guesses are read by a scout, which may come to its limits by guesses that are rejected.
    failed: the grammar went beyond its limits, or the text does not follow it: nothing can be said any more.
    """

    def __init__(self, matcher: Any, scout: Callable[[], Any]) -> None:
        """matcher, scout: a matcher that has read nothing, and what makes others."""
        self._text = matcher
        self._tokens: list[int] = []  # that the text's matcher has read
        self._next: torch.Tensor | None = None  # what may come after the text, where it has been asked for
        self._new_scout = scout
        self._scout: Any = None
        self._ahead: list[int] = []  # guesses that the scout has read behind the text
        self._masks: dict[int, torch.Tensor] = {}  # what may come after so many of them
        self._broken: list[int] = []  # guesses that no scout can read
        self.failed = False

    def read(self, tokens: Sequence[int]) -> int:
        """Go on with the text; guesses that are not among its tokens are forgotten.

        Return how many of the tokens come before the failure; all where it does not fail.
        """
        good = 0
        for token in tokens:
            if self._after_text() is None:
                break
            if self._text.is_stopped():  # what stands behind the grammar's end is no longer the answer's
                good = len(tokens)
                break
            if not self._text.try_consume_tokens([token]):
                self.failed, self._next = True, None
                break
            self._tokens.append(token)
            self._next = None
            good += 1
        if self._scout is not None and not self._go(tokens):
            self._scout = None
        self._ahead.clear()
        self._masks.clear()
        self._broken = []
        return good

    def allowed(self, guesses: Sequence[int]) -> torch.Tensor | None:
        """Return which tokens may come after the text and these guesses, bool `[V]`; None where that cannot be said of them."""
        after_text, count = self._after_text(), len(guesses)
        if after_text is None or not count:
            return after_text
        if self._broken and list(guesses[: len(self._broken)]) == self._broken:
            return None
        if count in self._masks and self._ahead[:count] == list(guesses):  # another level has asked
            return self._masks[count]
        if self._scout is None:
            self._send_scout()
        mask = self._after(guesses)
        if self._scout.is_error():  # maybe by guesses that are gone
            self._send_scout()
            mask = self._after(guesses)
            if self._scout.is_error():
                self._broken, self._scout = list(guesses), None
        return mask

    def _after_text(self) -> torch.Tensor | None:
        if self._next is None and not self.failed:
            self._next = _mask(self._text)
            self.failed = self._next is None
        return self._next

    def _send_scout(self) -> None:
        """Bring a new scout behind the text."""
        self._scout = self._new_scout()
        self._scout.try_consume_tokens(self._tokens)
        self._ahead.clear()
        self._masks.clear()

    def _after(self, guesses: Sequence[int]) -> torch.Tensor | None:
        """Return what the scout says behind the guesses; None where they do not follow the grammar, or are too much for it."""
        followed = self._go(guesses)
        mask = _mask(self._scout)  # in any case: one that broke as it read says so only here
        if mask is None or not followed:
            return None
        self._masks[len(guesses)] = mask
        return mask

    def _go(self, tokens: Sequence[int]) -> bool:
        """Bring the scout behind the text and these tokens; return whether all of them follow the grammar."""
        same = 0
        while same < min(len(tokens), len(self._ahead)) and tokens[same] == self._ahead[same]:
            same += 1
        if back := len(self._ahead) - same:
            self._scout.rollback(back)
            for place in range(same + 1, len(self._ahead) + 1):
                self._masks.pop(place, None)
            del self._ahead[same:]
        count = self._scout.try_consume_tokens(list(tokens[same:]))
        self._ahead += tokens[same : same + count]
        return bool(same + count == len(tokens))


def _mask(matcher: Any) -> torch.Tensor | None:
    """Return which tokens may come next, bool `[V]`; None where that goes beyond the limits."""
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    if matcher.is_error():
        return None
    return torch.from_numpy(np.unpackbits(mask, bitorder="little").view(np.bool_))
