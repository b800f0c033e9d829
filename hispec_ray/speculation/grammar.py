"""Grammars: which tokens may come next, for a text and for what is guessed after it.

llguidance does the work: it compiles a JSON schema in milliseconds where xgrammar takes seconds for large ones, takes tokens back
as cheaply as it reads them, and depends on nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_KEPT = 512  # grammars, compiled: more than run and wait (272 by default), so that no step has to compile one again
# Per step about 5 ms at the very most, to compile about 100 ms: the time that one request can take from all others.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000, step_lexer_fuel=100_000, step_max_items=50_000, max_lexer_states=50_000, max_grammar_size=200_000,
    verbose_errors=False,
)  # fmt: skip


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message says why."""


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the latest. Safe to use from several threads."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        """tokenizer: called when the first grammar comes, for it takes a moment."""
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def walk(self, grammar: str) -> Walk:
        """Return the state of a text that has not begun. Raises GrammarError."""
        return Walk(self._matcher(grammar).deep_copy())

    def check(self, grammar: str) -> None:
        """Raises GrammarError where a grammar cannot be compiled."""
        self._matcher(grammar)

    def _matcher(self, grammar: str) -> Any:
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found
        matcher = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip())
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher


class Walk:
    """A grammar's state after a text and, for the moment, after what is guessed behind it.

    failed: the grammar went beyond its limits, or the text does not follow it: nothing can be said any more. That is up to the text alone:
    its matcher reads nothing else, and asks for what may come before every token, as plain decoding does; guesses are read by a copy.
    """

    def __init__(self, matcher: Any) -> None:
        self._text = matcher
        self._next: torch.Tensor | None = None  # what may come after the text, where it has been asked for
        self._scout: Any = None  # a copy that reads guesses, and takes them back
        self._ahead: list[int] = []  # guesses that the scout has read behind the text
        self._masks: dict[int, torch.Tensor] = {}  # what may come after so many of them
        self._broken: list[int] = []  # guesses that go beyond the limits
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
        after_text = self._after_text()
        if after_text is None or not guesses:
            return after_text
        if self._broken and list(guesses[: len(self._broken)]) == self._broken:
            return None
        count = len(guesses)
        if count in self._masks and self._ahead[:count] == list(guesses):  # another level has asked
            return self._masks[count]
        if self._scout is None:
            self._scout = self._text.deep_copy()
        if self._go(guesses):
            if (mask := _mask(self._scout)) is not None:
                self._masks[count] = mask
                return mask
        elif not self._scout.is_error():
            return None
        return self._afresh(guesses)

    def _after_text(self) -> torch.Tensor | None:
        if self._next is None and not self.failed:
            self._next = _mask(self._text)
            self.failed = self._next is None
        return self._next

    def _afresh(self, guesses: Sequence[int]) -> torch.Tensor | None:
        """What `allowed` returns, by a new scout: the last one may have come to its limits by guesses that are gone."""
        self._scout, read = self._text.deep_copy(), 0
        self._ahead.clear()
        self._masks.clear()
        while (mask := _mask(self._scout)) is not None and read < len(guesses) and self._scout.try_consume_tokens([guesses[read]]):
            read += 1
        if self._scout.is_error():
            self._broken = list(guesses[: read + (mask is not None)])
            self._scout = None
            return None
        self._ahead += guesses[:read]
        return mask if read == len(guesses) else None

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
