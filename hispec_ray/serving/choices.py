"""One choice of a job: what its steps added, on the way from the engine to a client."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hispec_ray.engine.tools import CallPart, CallReader, ToolFormat, ToolUse
from hispec_ray.request import FinishReason, TokenDelta, TokenLogprob
from hispec_ray.serving.wire import Delta, Entry, Spelled, joined_calls


class Speller:
    """Spells token ids; knows every token's bytes."""

    def __init__(self, tokenizer: Any, silent: Callable[[int], bool]) -> None:
        """tokenizer: llguidance's, see `ModelSource.byte_tokenizer`. silent: whether a token never has a text in an answer."""
        self._tokenizer = tokenizer
        self._silent = silent
        self._known: dict[int, Spelled] = {}

    def spell(self, id: int) -> Spelled:
        spelled = self._known.get(id)
        if spelled is None:
            raw = bytes(self._tokenizer.decode_bytes([id]))
            spelled = Spelled(raw.decode(errors="replace"), b"" if self._silent(id) else raw)
            self._known[id] = spelled
        return spelled


class _Entries:
    """The log-probabilities of a choice's tokens, each held back until the text that begins with it is shown."""

    def __init__(self, speller: Speller) -> None:
        self._speller = speller
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._waiting: deque[Entry] = deque()

    def read_prompt(self, ids: Sequence[int], text: str, told: Sequence[TokenLogprob]) -> None:
        """Begin with the prompt's tokens, whose text stands before the answer's. told: one for each token but the first.

        A special token counts where its name stands in the text: a client may have written it, or the tokenizer put it there by itself.
        """
        for place, id in enumerate(ids):
            self.add(id, told[place - 1] if place else None)
            token = self._waiting[-1].token
            if not token.bytes and text.startswith(token.text, self._offset):
                self._offset += len(token.text)
        self._characters.reset()
        self._offset = len(text)

    def add(self, id: int, logprob: TokenLogprob | None) -> None:
        spell = self._speller.spell
        token = spell(id)
        top = tuple([(spell(other), value) for other, value in logprob.top]) if logprob else ()
        self._waiting.append(Entry(token, logprob.logprob if logprob else None, top, self._offset))
        self._offset += len(self._characters.decode(token.bytes))

    @property
    def waiting(self) -> int:
        """How many are held back."""
        return len(self._waiting)

    def take(self, shown: int, ended: bool) -> tuple[Entry, ...]:
        """Return those whose text is among the first `shown` characters; all, where the text has ended and was not cut."""
        taken = []
        while self._waiting and (ended or self._waiting[0].offset < shown):
            taken.append(self._waiting.popleft())
        return tuple(taken)


class ChoiceWriter:
    """Gathers what steps add to a choice, until it is taken.

    A token's log-probability goes with the text that it begins; where a stop string cuts the text, those behind the cut are left out.
    Tokens without a text (end of sequence) go with the next that has one, or with the end.
    """

    def __init__(
        self,
        number: int,
        prompt: Sequence[int] = (),
        prompt_text: str = "",
        speller: Speller | None = None,
        calls: tuple[ToolFormat, ToolUse] | None = None,
        trace: bool = False,
        ids: bool = False,
    ) -> None:
        """Begin a choice.

        prompt, prompt_text: where they are part of the answer. speller: where log-probabilities are wanted.
        calls: where tools may be called. trace, ids: whether levels are told, and the tokens' ids.
        """
        self._number = number
        self._prompt = prompt
        self._told: list[TokenLogprob] = []  # of the prompt
        self._text = prompt_text
        self._shown = len(prompt_text)  # characters, calls' own among them
        self._entries = _Entries(speller) if speller else None
        self._reader = CallReader(calls[0]) if calls else None
        self._named = bool(calls and calls[1].named)
        self._tokens = 0
        self._parts: list[CallPart] = []
        self._levels: list[tuple[int, str]] = []
        self._trace = trace
        self._ids: list[int] | None = [] if ids else None
        self._reason: str | None = None
        self._cut = False
        self._begun = False  # tokens of the answer, or its end, have come

    def add(self, delta: TokenDelta) -> None:
        self._told += delta.prompt_logprobs
        if not (delta.token_ids or delta.finish_reason):
            return
        if not self._begun:
            self._begun = True
            if self._entries:
                self._entries.read_prompt(self._prompt, self._text, self._told)
        self._tokens += len(delta.token_ids)
        if self._entries:
            for id, logprob in zip(delta.token_ids, delta.logprobs, strict=True):
                self._entries.add(id, logprob)
        if self._ids is not None:
            self._ids += delta.token_ids
        if self._trace:
            self._levels += zip(delta.token_ids, delta.levels, strict=True)
        text = delta.text
        if self._reader:
            text, parts = self._reader.feed(text)
            self._parts += parts
            if delta.finish_reason:
                text += self._reader.finish()
        self._text += text
        self._shown += len(delta.text)
        if delta.finish_reason is not None:
            self._cut = isinstance(delta.stopped_by, str)
            # A stop string may have cut the last call: what is there of it is no call that could be answered.
            called = self._reader is not None and self._reader.complete and delta.finish_reason is FinishReason.STOP
            self._reason = "tool_calls" if called and not self._named else delta.finish_reason.value

    def take(self) -> Delta | None:
        """Return what has gathered since the last time, None where that is nothing."""
        if not self._begun:
            return None
        entries = self._entries.take(self._shown, self._reason is not None and not self._cut) if self._entries else ()
        # A token whose log-probability is held back is not told yet: another coordinator, which knows of none, would choose it again.
        held = min(self._entries.waiting, self._tokens) if self._entries and self._ids is not None and self._reason is None else 0
        told = self._tokens - held
        if not (self._text or told or self._reason or entries or self._parts):
            return None
        calls, levels, ids = joined_calls(self._parts), tuple(self._levels[:told]), tuple((self._ids or ())[:told])
        delta = Delta(self._number, self._text, told, self._reason, entries, calls, levels, ids)
        self._text, self._tokens, self._parts, self._levels = "", held, [], self._levels[told:]
        if self._ids:
            del self._ids[:told]
        return delta
