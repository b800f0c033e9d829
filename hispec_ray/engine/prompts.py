"""Prompts into token ids: plain text, and conversations through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hispec_ray.request import RequestError


class PromptEncoder:
    """Encodes for a model of `max_model_len` positions with a transformers tokenizer.

    A text so long that it cannot fit, whatever its tokens, is refused before it is encoded: that would take seconds.
    """

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._most = max_model_len * max(map(len, tokenizer.get_vocab()))  # characters: no token stands for more than it has itself

    def text(self, text: str) -> list[int]:
        """Return the ids of a text, with the tokenizer's own special tokens. Raises RequestError where it cannot fit the context."""
        self._check(text, "prompt")
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation in the chat template, ready for the assistant's turn.

        Raises RequestError where the model has no template, the template refuses the messages, or they cannot fit the context.
        """
        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template; give a plain prompt (over HTTP: /v1/completions)", "messages")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of the model's maker and may raise anything
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
        self._check(text, "messages")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _check(self, text: str, field: str) -> None:
        if len(text) > self._most:
            raise RequestError(
                f"This model's maximum context length is {self._max_model_len} tokens, but a prompt of {len(text)} characters "
                f"has more; it may have {self._most} at the very most",
                field,
                "context_length_exceeded",
            )
