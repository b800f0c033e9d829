"""Prompts into token ids: plain text, and conversations through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hispec_ray.engine.tools import for_template
from hispec_ray.request import RequestError


class PromptEncoder:
    """Encodes for a model of `max_model_len` positions with a transformers tokenizer.

    What is so long that it cannot fit, whatever its tokens, is refused before anything is done with it: that would take seconds.
    """

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self.vocabulary = len(tokenizer)  # ids that it knows
        self._most = max_model_len * max(map(len, tokenizer.get_vocab()))  # characters: no token stands for more than it has itself

    def text(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of a text, with the tokenizer's own special tokens.

        Raises RequestError where it cannot fit the context, or has half of a surrogate pair.
        """
        return self._encode(text, "prompt", special)

    def ids(self, ids: Sequence[int], field: str = "prompt") -> tuple[int, ...]:
        """Return token ids as they are. Raises RequestError, with this name of a field, where they are more than the context."""
        if len(ids) > self._max_model_len:
            raise RequestError(
                f"This model's maximum context length is {self._max_model_len} tokens, but {field} has {len(ids)}",
                field,
                "context_length_exceeded",
            )
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens' names included. Ids that the tokenizer does not know have none."""
        known = [id for id in ids if 0 <= id < self.vocabulary]
        text: str = self._tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of a conversation in the chat template, ready for the assistant's turn. tools: as OpenAI writes them.

        Raises RequestError where the model has no template, the template refuses the messages, they cannot fit the context, or have half of
        a surrogate pair.
        """
        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template; give a plain prompt (over HTTP: /v1/completions)", "messages")
        try:
            said = for_template(messages)
        except (TypeError, LookupError) as error:
            raise RequestError("messages has calls of tools that are not written as OpenAI writes them", "messages") from error
        if "tool" not in self._tokenizer.chat_template and any(m["role"] == "tool" or m.get("tool_calls") for m in said):
            raise RequestError("this model's chat template knows no tools, and messages has calls or answers of tools", "messages")
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            text = self._tokenizer.apply_chat_template(said, add_generation_prompt=generation_prompt, tokenize=False, **options)
        except Exception as error:  # a template is a program of the model's maker and may raise anything
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
        return self._encode(text, "messages", special=False)

    def _encode(self, text: str, field: str, special: bool) -> list[int]:
        if len(text) > self._most:
            raise RequestError(
                f"This model's maximum context length is {self._max_model_len} tokens, but a prompt of {len(text)} characters "
                f"has more; it may have {self._most} at the very most",
                field,
                "context_length_exceeded",
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:  # which a tokenizer would answer with words of its own
            raise RequestError(f"{field} has half of a surrogate pair; its text must be whole characters", field) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids


def read_template(path: str) -> str:
    """Return the text of a chat template's file. Raises ValueError where it cannot be read."""
    try:
        return Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"model.chat_template is {path!r}: it cannot be read: {error}") from error
