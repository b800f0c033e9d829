"""Token ids in, text out: what may be shown after each token, and whether it completed a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from hispec_ray.engine.tools import TAGS

REPLACEMENT = "\ufffd"

CONTEXT = 4
"""Tokens that settle what comes next: a character has at most four bytes, so it is spread over at most four tokens."""

WINDOW = 8
"""Most tokens that a window begins with: one of so many is cut back to CONTEXT before more are added."""


class Tokenizer(Protocol):
    """What is asked of a Hugging Face tokenizer."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any: ...

    def convert_ids_to_tokens(self, ids: int) -> Any: ...

    def convert_tokens_to_ids(self, tokens: str) -> Any: ...


class Detokenizer:
    """What the streams of one tokenizer share; makes a TextStream for each sequence.

    It says which tokens have a text in an answer: all but the special ones, and those special ones that begin and end calls of tools.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(id for id, token in tokenizer.added_tokens_decoder.items() if token.special and token.content not in TAGS)
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)  # fast tokenizers: the same text without the wrapper's cost
        self._silent: dict[int, bool] = {}
        self._bytes = self._fallback_bytes()

    def stream(self, prompt_ids: Sequence[int], stop: Sequence[str] = (), deaf: int = 0) -> TextStream:
        """Begin the text that follows prompt_ids and ends before the first of the stop strings; deaf: see `TextStream`.

        Raises ValueError when a stop string is empty.
        """
        return TextStream(CharacterStream(self, prompt_ids), stop, deaf)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token_ids decoded together."""
        text: str
        if self._backend is not None:
            text = self._backend.decode(token_ids, skip_special_tokens=False)
        else:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def silent(self, token_id: int) -> bool:
        """Whether the token never has a text: a special token, or padding of the model's vocabulary that the tokenizer does not know."""
        known = self._silent.get(token_id)
        if known is None:
            known = token_id in self._special or self._tokenizer.convert_ids_to_tokens(token_id) is None
            self._silent[token_id] = known
        return known

    def byte(self, token_id: int) -> bytes | None:
        """Return the byte that a byte-fallback token such as ``<0xE2>`` stands for; None for every other token."""
        return self._bytes.get(token_id)

    def _fallback_bytes(self) -> dict[int, bytes]:
        found = {}
        for value in range(256):
            name = f"<0x{value:02X}>"
            token_id = self._tokenizer.convert_tokens_to_ids(name)
            # An absent name gives the unknown token's id; a tokenizer without byte fallback may still know the name as plain text.
            if token_id is not None and self._tokenizer.convert_ids_to_tokens(token_id) == name and self.decode([token_id]) != name:
                found[token_id] = bytes([value])
        return found


class CharacterStream:
    """One sequence's text as whole characters, after every token or run of tokens.

    The text is what decoding prompt and answer together has after the prompt, so the space before the first word is kept.
    1. A short window of the latest tokens is decoded; what is longer than last time is new. The prompt's last tokens are
       pushed first and their text dropped.
    2. A decoder turns a character's unfinished bytes into one U+FFFD at the text's end, so a U+FFFD there is held until
       the next token shows what it is. No more than that one is ever held: a real U+FFFD, or bytes that can never form a character,
       are out one token later.
    3. Byte-fallback tokens bypass the window, because a tokenizer decodes a run of them together, and one bad byte would take back the
       characters shown before it. Here a character once complete stays; only where such a run is broken does the text
       differ from the tokenizer's own.
    4. A character that the prompt began belongs to the answer when the answer completes it. Otherwise its U+FFFD is the prompt's.
    """

    def __init__(self, detokenizer: Detokenizer, prompt_ids: Sequence[int]) -> None:
        self._detokenizer = detokenizer
        self._window: list[int] = []
        self._held = False  # the window's text ends in a U+FFFD that is not yet released
        self._released = 0  # characters of the window's text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # of the running byte-fallback run
        self._prompts = False  # the held character was begun by the prompt
        for token_id in self._last_tokens(prompt_ids):
            self._decode([token_id])
        self._prompts = self._held or bool(self._utf8.getstate()[0])

    def push(self, token_id: int) -> str:
        """Return the characters that the token completed."""
        return "" if self._detokenizer.silent(token_id) else self._own(self._decode([token_id]))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Return the characters that these tokens completed: what pushing them one by one gives together, at the price of one or two.

        A run with a byte-fallback token is pushed one by one, for such tokens bypass the window.
        """
        told = [id for id in token_ids if not self._detokenizer.silent(id)]
        if any(self._detokenizer.byte(id) is not None for id in told):
            return "".join(map(self.push, told))
        return self._own(self._decode(told)) if told else ""

    def finish(self) -> str:
        """Return what is still unfinished: one U+FFFD, or nothing. Not to be pushed to afterwards."""
        return self._own(self._flush())

    def _last_tokens(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the prompt's last CONTEXT tokens that have a text, or fewer where there are none."""
        last: list[int] = []
        for token_id in reversed(prompt_ids):
            if not self._detokenizer.silent(token_id):
                last.append(token_id)
                if len(last) == CONTEXT:
                    break
        return last[::-1]

    def _decode(self, token_ids: list[int]) -> str:
        """token_ids: one, or more of which none is a byte-fallback token."""
        byte = self._detokenizer.byte(token_ids[0])
        if byte is not None:
            # From here the window is the byte's token alone: the next word's context. Its text is not used.
            text = (REPLACEMENT if self._held else "") + self._utf8.decode(byte)
            self._window = [*token_ids]
            self._held = False
            self._released = len(self._detokenizer.decode(self._window))
            return text
        text = self._utf8.decode(b"", final=True)
        if len(self._window) >= WINDOW:
            # Also where a character is cut at the window's left: its last bytes read as U+FFFD, in the part that is released.
            del self._window[:-CONTEXT]
            self._released = len(self._detokenizer.decode(self._window)) - self._held
        self._window += token_ids
        whole = self._detokenizer.decode(self._window)
        self._held = whole.endswith(REPLACEMENT)
        end = len(whole) - self._held
        text += whole[self._released : end]
        self._released = max(self._released, end)
        return text

    def _flush(self) -> str:
        text = (REPLACEMENT if self._held else "") + self._utf8.decode(b"", final=True)
        self._held = False
        return text

    def _own(self, text: str) -> str:
        if self._prompts and text:
            self._prompts = False
            return text.removeprefix(REPLACEMENT)
        return text


class StopString:
    """One stop string and how much of it the text so far ends with (Knuth, Morris and Pratt: linear in the text, whatever the string)."""

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("a stop string is empty; it must have at least one character")
        self.text = text
        self.matched = 0
        """Length of the longest proper prefix of the stop string that the text ends with."""
        self._border = _borders(text)

    def feed(self, piece: str) -> int | None:
        """Read the text's next piece; return where in the piece the stop string ends when it is completed, None otherwise.

        Not to be fed further once completed.
        """
        if not self.matched and self.text[0] not in piece:
            return None
        matched = self.matched
        for index, character in enumerate(piece):
            matched = self._extend(matched, character)
            if matched == len(self.text):
                return index + 1
        self.matched = matched
        return None

    def _extend(self, matched: int, character: str) -> int:
        return _extended(self.text, self._border, matched, character)


@lru_cache(maxsize=256)  # the choices of a request share their stop strings
def _borders(text: str) -> list[int]:
    """Return, for each i, the length of the longest proper prefix of text[:i] that is also its suffix."""
    border = [0] * (len(text) + 1)
    for end in range(2, len(text) + 1):
        border[end] = _extended(text, border, border[end - 1], text[end - 1])
    return border


def _extended(text: str, border: list[int], matched: int, character: str) -> int:
    while matched and text[matched] != character:
        matched = border[matched]
    return matched + 1 if text[matched] == character else 0


class TextStream:
    """One sequence's text as it may be shown: whole characters, ended before the first stop string.

    Push the chosen tokens as they come and look at `stopped`: the tokens after the one that set it are not part of the answer. At the end
    of a sequence that was not stopped, call finish for what was held back. What the pushes and finish return, joined, is the text.
    deaf: how many tokens come first in whose characters no stop string is looked for.
    """

    def __init__(self, characters: CharacterStream, stop: Sequence[str], deaf: int = 0) -> None:
        self.stopped: str | None = None
        """The stop string that was completed; the text ends before it (before the one that starts first, if several were)."""
        self._characters = characters
        self._stops = [StopString(text) for text in stop]
        self._held = ""  # the longest end of the text that could still become part of a stop string
        self._deaf = deaf

    def push(self, token_id: int) -> str:
        """Return the text that may be shown once this token is known; "" from the stop string on."""
        if self._deaf:
            self._deaf -= 1
            return self._characters.push(token_id)
        return self._release(self._characters.push(token_id))

    def push_all(self, token_ids: Sequence[int]) -> tuple[int, str]:
        """Push these tokens, or those up to the one that completes a stop string; return how many and what they gave.

        One by one where there are stop strings, for a token behind the one that completes it is not part of the answer.
        """
        if not self._stops:
            return len(token_ids), self._characters.push_all(token_ids)
        pieces: list[str] = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            pieces.append(self.push(token_id))
        return len(pieces), "".join(pieces)

    def finish(self) -> str:
        """Return the text that was held back; "" after a stop string. Nothing may be pushed afterwards."""
        text = self._release(self._characters.finish())
        if self.stopped is None:
            text += self._held
        self._held = ""
        return text

    def _release(self, piece: str) -> str:
        if self.stopped is not None or not piece:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = []
        for stop in self._stops:
            end = stop.feed(piece)
            if end is not None:
                found.append((len(self._held) + end - len(stop.text), stop.text))
        if found:
            start, self.stopped = min(found)
            self._held = ""
            return text[:start]
        keep = max(stop.matched for stop in self._stops)
        shown = len(text) - keep
        self._held = text[shown:]
        return text[:shown]
