"""An engine that writes what it is told to, one piece a step, and a tokenizer for which every character is a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from hispec_ray.request import EngineDeadError, FinishReason, GenerationRequest, QueueFullError, RequestError, TokenDelta, TokenLogprob

VOCABULARY = 1000
CONTEXT = 100

Script = Callable[[GenerationRequest], Sequence[str]]
"""The pieces of a request's answer; each is a step's text and its length the step's tokens."""


def score(id: int, count: int) -> TokenLogprob:
    """The token itself is the likeliest, those after it come next."""
    return TokenLogprob(-id / 1000, tuple((id + n, -(id + n) / 1000) for n in range(count)))


class FakeTokenizer:
    def __init__(self, chat_template: str | None = "plain") -> None:
        self.chat_template = chat_template
        self.chats: list[Any] = []
        self.decoded = 0
        self.added_tokens_decoder: dict[int, Any] = {}

    def get_vocab(self) -> dict[str, int]:
        return {chr(id): id for id in range(VOCABULARY)}

    def __len__(self) -> int:
        return VOCABULARY

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) % VOCABULARY for character in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        self.decoded += 1
        return "".join(map(chr, ids))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return list(map(chr, ids))

    def convert_tokens_to_ids(self, token: str) -> int:
        """The end-of-sequence token stands for what is not known, as in the default model."""
        return ord(token) if len(token) == 1 else 0

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """llguidance's name; the end-of-sequence token is 0."""
        return b"".join(b"<end>" if id == 0 else chr(id).encode() for id in ids)

    def is_special_token(self, id: int) -> bool:
        return id == 0

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, tokenize: bool, tools: Sequence[Any] = ()
    ) -> str:
        self.chats.append(list(messages))
        self.tools = list(tools)
        if messages[0]["role"] == "assistant":
            raise ValueError("Conversation roles must alternate")
        return "".join(message["content"] for message in messages)


class FakeEngine:
    """Speaks like AsyncEngine.

    `gate`, where set, is awaited before each step after the first; `full` makes it refuse, `dies_after` a step makes it raise `death`.
    """

    def __init__(self, script: Script = lambda request: ["Hello", ", ", "world"]) -> None:
        self.script = script
        self.tokenizer = FakeTokenizer()
        self.max_model_len = CONTEXT
        self.vocabulary = VOCABULARY
        self.gate: asyncio.Event | None = None
        self.full = False
        self.dies_after: int | None = None
        self.death: Exception = RuntimeError("a secret of the engine")
        self.requests: list[GenerationRequest] = []
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.closed = False
        self.pauses: list[float] = []
        self.wholes: list[bool] = []
        self.grammars: list[str] = []

    def byte_tokenizer(self) -> FakeTokenizer:
        return self.tokenizer

    def silent(self, token_id: int) -> bool:
        return self.tokenizer.is_special_token(token_id)

    def check_grammar(self, grammar: str) -> None:
        self.grammars.append(grammar)
        if "nonsense" in grammar:
            raise RequestError("the grammar cannot be followed: Invalid type: nonsense", "grammar")

    def written(self, request: GenerationRequest) -> TokenDelta:
        pieces, count = [], 0
        for piece in self.script(request):
            if count == len(request.written):
                break
            pieces.append(piece)
            count += len(piece)
        delta = TokenDelta(request.id, "".join(pieces), list(request.written), ["full"] * len(request.written))
        if request.params.logprobs is not None:
            delta.logprobs = [TokenLogprob(0.0, ())] * len(request.written)
        if request.params.prompt_logprobs is not None:
            delta.prompt_logprobs = [TokenLogprob(0.0, ())] * (len(request.prompt_ids) - 1)
        return delta

    def check(self, request: GenerationRequest) -> None:
        if not request.prompt_ids:
            raise RequestError("the prompt is empty", "prompt")
        if any(not 0 <= token < VOCABULARY for token in request.prompt_ids):
            raise RequestError("the prompt has a token id that is not known", "prompt")
        if len(request.prompt_ids) + max(1, request.params.max_tokens or 0) > CONTEXT:
            long = len(request.prompt_ids) >= CONTEXT
            message = f"This model's maximum context length is {CONTEXT} tokens"
            raise RequestError(message, "prompt" if long else "max_tokens", "context_length_exceeded")
        if self.full:
            raise QueueFullError("256 requests wait already")

    async def generate(
        self, requests: Sequence[GenerationRequest], pause: Callable[[], float], whole: bool
    ) -> AsyncIterator[list[TokenDelta]]:
        self.wholes.append(whole)
        self.check_health()
        for request in requests:
            self.check(request)
        self.requests += requests
        left = {request.id: self.answer(request) for request in requests}
        self.running |= left.keys()
        step = 0
        try:
            while left:
                if step and self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(0)
                if step == self.dies_after:
                    raise self.death
                deltas = [pieces.pop(0) for pieces in left.values()]
                left = {id: pieces for id, pieces in left.items() if pieces}
                self.running &= left.keys()
                step += 1
                yield deltas
                self.pauses.append(pause())
        finally:
            self.aborted |= left.keys()
            self.running -= left.keys()

    def answer(self, request: GenerationRequest) -> list[TokenDelta]:
        if request.params.max_tokens == 0:
            return [TokenDelta(request.id, finish_reason=FinishReason.LENGTH)]
        deltas = [TokenDelta(request.id, piece, [ord(c) % VOCABULARY for c in piece] or [1]) for piece in self.script(request)]
        for delta in deltas:
            delta.levels = ["full"] * len(delta.token_ids)
            if request.params.logprobs is not None:
                delta.logprobs = [score(id, request.params.logprobs) for id in delta.token_ids]
        deltas[-1].finish_reason = FinishReason.STOP
        skipped = 0
        while skipped < len(request.written):
            skipped += len(deltas.pop(0).token_ids)
        if request.params.prompt_logprobs is not None and not request.written:
            told = [score(id, request.params.prompt_logprobs) for id in request.prompt_ids[1:]]
            deltas = [TokenDelta(request.id, prompt_logprobs=told[:2]), TokenDelta(request.id, prompt_logprobs=told[2:]), *deltas]
        return deltas

    def stats(self) -> dict[str, float]:
        return {"running": len(self.running), "waiting": 0, "kv_usage": 0.0}

    def check_health(self) -> None:
        if self.closed:
            raise EngineDeadError("the engine has been closed")

    def close(self) -> None:
        self.closed = True
