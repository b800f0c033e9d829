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

_KEPT = 64  # grammars, compiled
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

    failed: the grammar went beyond its limits, or the text does not follow it: nothing can be said any more.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._ahead: list[int] = []  # guesses that the matcher has read behind the text
        self.failed = False

    def read(self, tokens: Sequence[int]) -> None:
        """Go on with the text; guesses that are not among its tokens are forgotten."""
        if not self._go(tokens):  # what stands behind the grammar's end is no longer the answer's
            self.failed = self._matcher.is_error() or not self._matcher.is_stopped()
        self._ahead.clear()

    def allowed(self, guesses: Sequence[int]) -> torch.Tensor | None:
        """Return which tokens may come after the text and these guesses, bool `[V]`; None where the guesses do not follow the grammar."""
        if self.failed or not self._go(guesses):
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self.failed = True
            return None
        return torch.from_numpy(np.unpackbits(mask, bitorder="little").view(np.bool_))

    def _go(self, tokens: Sequence[int]) -> bool:
        """Bring the matcher behind the text and these tokens; return whether all of them follow the grammar."""
        same = 0
        while same < min(len(tokens), len(self._ahead)) and tokens[same] == self._ahead[same]:
            same += 1
        if back := len(self._ahead) - same:
            self._matcher.rollback(back)
            del self._ahead[same:]
        count = self._matcher.try_consume_tokens(list(tokens[same:]))
        self._ahead += tokens[same : same + count]
        return bool(same + count == len(tokens))
