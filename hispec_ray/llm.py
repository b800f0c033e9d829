"""The offline Python API: a model in this process, prompts in, answers out."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from hispec_ray.config import Settings
from hispec_ray.engine.engine import Engine
from hispec_ray.engine.prompts import PromptEncoder
from hispec_ray.request import FinishReason, GenerationRequest, RequestError, SamplingParams, TokenDelta, TokenLogprob, choices_of

Prompt = str | Sequence[int]
DEFAULT_PARAMS = SamplingParams()


@dataclass(slots=True)
class Choice:
    """One answer. levels[i] names the level that chose token_ids[i] first: "lookup", "draft", "check" or "full".

    logprobs: one for each token, where `SamplingParams.logprobs` asks for them; prompt_logprobs: one for each token of the prompt but
    the first, where `SamplingParams.prompt_logprobs` does. stopped_by: the stop string or the token id that ended the answer, if one did.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    levels: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    stopped_by: str | int | None = None

    def add(self, delta: TokenDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.levels += delta.levels
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.stopped_by = delta.stopped_by
        self.finish_reason = delta.finish_reason


@dataclass(slots=True)
class Completion:
    """A prompt with its `n` choices."""

    prompt_ids: tuple[int, ...]
    choices: list[Choice]

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


class LLM:
    """A model loaded into this process.

    settings: as in a deployment file; a mapping is validated. like: another LLM whose weights to share, with the same `model`,
    `cache.block_size` and `speculation.exits.heads`. Raises ValueError when they do not fit the model.
    """

    def __init__(self, settings: Settings | Mapping[str, object] | None = None, like: LLM | None = None) -> None:
        self.settings = settings if isinstance(settings, Settings) else Settings.model_validate(settings or {})
        self.engine: Engine = Engine(self.settings, like.engine if like else None)
        self._encoder = PromptEncoder(self.engine.tokenizer, self.engine.max_model_len)
        self._serial = itertools.count()
        self._sinks: dict[str, Callable[[TokenDelta], None]] = {}  # where each request's deltas go

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return token ids of a text, with the tokenizer's own special tokens; ids pass through. Raises RequestError."""
        if isinstance(prompt, str):
            return tuple(self._encoder.text(prompt))
        try:
            return tuple(map(operator.index, prompt))
        except TypeError as error:
            raise RequestError(f"the prompt is neither a text nor whole token ids: {error}", "prompt") from error

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Return token ids of a conversation in the model's chat template, ready for the assistant's turn. Raises RequestError."""
        return tuple(self._encoder.chat(messages))

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = DEFAULT_PARAMS
    ) -> list[Completion]:
        """Answer prompts together and return one Completion for each, in their order.

        Waits for a place where the queue is full. Raises RequestError when a prompt cannot be answered; then none is.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and not isinstance(prompts[0], (str, Sequence)))
        many = cast(list[Prompt], [prompts] if single else list(prompts))
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise RequestError(f"params has {len(each)} entries for {len(many)} prompts; give one, or one for each", "params")
        completions = [Completion(self.encode(prompt), [Choice() for _ in range(p.n)]) for prompt, p in zip(many, each, strict=True)]
        pending: list[tuple[GenerationRequest, Choice]] = []
        for completion, p in zip(completions, each, strict=True):
            pending += zip(self._requests(completion.prompt_ids, p), completion.choices, strict=True)
        for request, _ in pending:
            self.engine.check(request)
        waiting = iter(pending)
        try:
            self._admit(waiting)
            unfinished = deque(choice for _, choice in pending)
            while unfinished:
                if unfinished[0].finish_reason is None:
                    self._step()
                    self._admit(waiting)
                else:
                    unfinished.popleft()
        finally:
            self._forget(request.id for request, _ in pending)
        return completions

    def stream(self, prompt: Prompt, params: SamplingParams = DEFAULT_PARAMS) -> Iterator[TokenDelta]:
        """Answer one prompt and yield what each round adds. Leaving early frees its blocks.

        Raises RequestError at the first step of the iterator, also when n is not 1.
        """
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a stream has one choice", "n")
        request = self._requests(self.encode(prompt), params)[0]
        deltas: deque[TokenDelta] = deque()
        self.engine.add(request)
        self._sinks[request.id] = deltas.append
        try:
            reason: FinishReason | None = None
            while reason is None:
                while not deltas:
                    self._step()
                delta = deltas.popleft()
                reason = delta.finish_reason
                yield delta
        finally:
            self._forget([request.id])

    def _step(self) -> None:
        """Run one round for everybody: generators of several streams may take turns."""
        for delta in self.engine.step():
            self._sinks[delta.request_id](delta)

    def _forget(self, request_ids: Iterable[str]) -> None:
        """Abort what is not finished."""
        for request_id in request_ids:
            self._sinks.pop(request_id, None)
            self.engine.abort(request_id)

    def _requests(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> list[GenerationRequest]:
        return [GenerationRequest(f"llm-{next(self._serial)}", prompt_ids, choice) for choice in choices_of(params)]

    def _admit(self, waiting: Iterator[tuple[GenerationRequest, Choice]]) -> None:
        """Add requests while the queue has places."""
        while self.engine.scheduler.waiting < self.settings.scheduler.max_queued:
            entry = next(waiting, None)
            if entry is None:
                return
            request, choice = entry
            self.engine.add(request)
            self._sinks[request.id] = choice.add
