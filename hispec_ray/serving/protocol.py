"""OpenAI's requests: bodies read, checked, and made into the jobs that a coordinator gets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from hispec_ray.request import RequestError, SamplingParams
from hispec_ray.serving.answers import Answer, ChatAnswer, CompletionAnswer
from hispec_ray.serving.bodies import (
    MOST_IN_LISTS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    ModelBody,
    StreamOptions,
    TokenizeBody,
)
from hispec_ray.serving.failures import RequestFailed
from hispec_ray.serving.fields import TAGS, form_of, refused, shown
from hispec_ray.serving.messages import MOST_MESSAGES, plain
from hispec_ray.serving.wire import Failure, Job, TokenizeJob

COMPLETION_TOKENS = 16
"""OpenAI's max_tokens for a completion that names none."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A checked HTTP request: the job, how its answer is to be written, and what its fields are called there.

    include_usage: whether a stream ends with the token counts; continuous_usage: whether every event of it has those so far.
    fields: the request's own names for the engine's `prompt` and `max_tokens`, where they differ.
    """

    job: Job
    answer: Answer
    include_usage: bool
    continuous_usage: bool
    fields: Mapping[str, str] = field(default_factory=dict)

    def failed(self, failure: Failure) -> RequestFailed:
        """Return the error to raise, with the parameter under the name that the client used."""
        return RequestFailed(failure.named(self.fields))


# What clients may send that is not offered: only these values, which change nothing, and null are accepted.
_NEUTRAL_IN_COMPLETION: dict[str, tuple[Any, ...]] = {"suffix": ()}
_NEUTRAL_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "functions": ([],), "function_call": ("none",), "modalities": (["text"],), "audio": (),
    "prediction": (), "reasoning_effort": (), "verbosity": (), "web_search_options": (), "metadata": ({},), "store": (False,),
    "service_tier": ("auto", "default"),
}  # fmt: skip
_NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "name": (), "refusal": (), "function_call": (), "audio": (), "annotations": ([],),
}  # fmt: skip


def read_completion(raw: bytes, model: str) -> Checked:
    """Check the body of POST /v1/completions for a server of `model`. Raises RequestFailed."""
    content = _offered(_json_object(raw), _NEUTRAL_IN_COMPLETION)
    body = _validated(CompletionBody, content, model)
    echo, logprobs = bool(body.echo), body.logprobs
    if logprobs is not None and not 0 <= logprobs <= MOST_IN_LISTS:
        raise refused("logprobs", f"logprobs is {logprobs}; it must be from 0 to {MOST_IN_LISTS}")
    tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params = _params(body, tokens, {}, logprobs=logprobs, prompt_logprobs=logprobs if echo else None)
    if body.best_of is not None and body.best_of != params.n:
        raise refused("best_of", f"best_of is {body.best_of} and n is {params.n}; this server offers best_of only where it equals n")
    prompts: Sequence[Any] = body.prompt if form_of(body.prompt) in ("~texts", "~lists") else [body.prompt]
    answer = CompletionAnswer(model, logprobs=logprobs is not None, trace=_trace(body))
    job = Job(answer.id, params, prompts=prompts, stream=bool(body.stream), echo=echo, trace=_trace(body), method=_method(body))
    return Checked(job, answer, *_usage(body))


def read_chat(raw: bytes, model: str) -> Checked:
    """Check the body of POST /v1/chat/completions for a server of `model`. Raises RequestFailed."""
    body = _validated(ChatBody, _conversation(_offered(_json_object(raw), _NEUTRAL_IN_CHAT)), model)
    limits = {name: value for name in ("max_tokens", "max_completion_tokens") if (value := getattr(body, name)) is not None}
    if len(set(limits.values())) > 1:
        raise refused(
            "max_tokens",
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}; "
            "they are two names of one limit: leave one out",
        )
    name = next(iter(limits), "max_tokens")
    limit = limits.get(name)
    if limit is not None and limit < 1:
        raise refused(name, f"{name} is {limit}; it must be 1 or more")
    use = body.tool_use()
    fields = {"prompt": "messages", "max_tokens": name, "logprobs": "top_logprobs", "grammar": "tools" if use else "response_format"}
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", f"top_logprobs is {body.top_logprobs} and logprobs is not true; it is for log-probabilities only")
    grammar = body.response_format.grammar() if body.response_format else None
    if use and grammar:
        raise refused("response_format", "response_format is set beside tools; set tool_choice to none or leave one of them out")
    answer = ChatAnswer(model, logprobs=bool(body.logprobs), trace=_trace(body))
    params = _params(body, limit, fields, logprobs=body.top_logprobs or 0 if body.logprobs else None, grammar=grammar)
    messages = plain(body.messages)
    job = Job(answer.id, params, messages=messages, stream=bool(body.stream), tools=use, trace=_trace(body), method=_method(body))
    return Checked(job, answer, *_usage(body), fields)


def read_tokenize(raw: bytes, model: str) -> TokenizeJob:
    """Check the body of POST /tokenize for a server of `model`. Raises RequestFailed."""
    body = _validated(TokenizeBody, _conversation(_json_object(raw)), model)
    if (body.prompt is None) == (body.messages is None):
        raise refused("prompt", f"prompt and messages are {'both null' if body.prompt is None else 'both set'}; set one of them")
    messages = None if body.messages is None else plain(body.messages)
    special, generation = body.add_special_tokens is not False, body.add_generation_prompt is not False
    return TokenizeJob(body.prompt, messages, special, generation, bool(body.return_token_strs))


def read_detokenize(raw: bytes, model: str) -> list[int]:
    """Check the body of POST /detokenize for a server of `model`. Raises RequestFailed."""
    return _validated(DetokenizeBody, _json_object(raw), model).tokens


def _trace(body: GenerationBody) -> bool:
    return body.hispec is not None and bool(body.hispec.trace)


def _method(body: GenerationBody) -> str | None:
    return body.hispec.method if body.hispec else None


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        content = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestFailed(Failure(400, f"the body is not valid JSON: {error}")) from None
    if not isinstance(content, dict):
        raise RequestFailed(Failure(400, "the body must be a JSON object"))
    return content


def _offered(content: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], prefix: str = "") -> dict[str, Any]:
    """Leave out the fields that are not offered. Raises RequestFailed where one would change something."""
    kept = {}
    for name, value in content.items():
        if name not in neutral:
            kept[name] = value
        elif value is not None and not any(_same(value, n) for n in neutral[name]):
            accepted = " or ".join(json.dumps(n) for n in (*neutral[name], None))
            raise refused(
                prefix + name,
                f"{prefix}{name} is {shown(value)}; this server does not offer it: leave it out or set it to {accepted}",
                "unsupported_parameter",
            )
    return kept


def _conversation(content: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is not offered in the messages of a body. Raises RequestFailed where it would change something."""
    messages = content.get("messages")
    if not isinstance(messages, list):
        return content
    if len(messages) > MOST_MESSAGES:
        raise refused("messages", f"messages has {len(messages)} messages; at most {MOST_MESSAGES} are allowed")
    kept = [_offered(m, _NEUTRAL_IN_MESSAGE, f"messages.{i}.") if isinstance(m, dict) else m for i, m in enumerate(messages)]
    return content | {"messages": kept}


def _same(value: Any, neutral: Any) -> bool:
    """Whether two JSON values are the same: true is not 1, 1.0 is."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


_AnyBody = TypeVar("_AnyBody", bound=ModelBody)


def _validated(kind: type[_AnyBody], content: dict[str, Any], model: str) -> _AnyBody:
    try:
        body = kind.model_validate(content)
    except ValidationError as error:
        raise RequestFailed(_invalid(error)) from None
    if isinstance(body, GenerationBody) and body.stream_options is not None and not body.stream:
        raise refused("stream_options", "stream_options is set and stream is not true; it is for streams only")
    if body.model != model:
        raise RequestFailed(unknown_model(body.model, model))
    return body


def unknown_model(asked: str, model: str) -> Failure:
    return Failure(404, f"The model {shown(asked)} does not exist; this server has {model!r}", param="model", code="model_not_found")


def _invalid(error: ValidationError) -> Failure:
    """The first thing that pydantic found wrong, in our words."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return Failure(400, f"{shown(first['input'])} is not a parameter of this request", code="unknown_parameter")
    steps = [*first["loc"][:1], *(step for step in first["loc"][1:] if step not in TAGS)]
    path = ".".join(map(str, steps))
    # An item of a list is named only where it is an object of its own, and a key of the client's is no field of ours.
    named = steps if steps[0] == "messages" else steps[:1] if steps[0] == "logit_bias" else [s for s in steps if isinstance(s, str)]
    param = ".".join(map(str, named))
    if first["type"] == "missing":
        return Failure(400, f"{path} is required", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return Failure(400, f"{shown(path)} is not a parameter of this request", param=param, code="unknown_parameter")
    rule = first["msg"].removeprefix("Value error, ").replace("Input should", "it must", 1)
    return Failure(400, f"{path} is {shown(first['input'])}; {rule}", param=param)


def _params(body: GenerationBody, max_tokens: int | None, fields: Mapping[str, str], **more: Any) -> SamplingParams:
    try:
        return body.params(max_tokens, **more)
    except RequestError as error:
        raise RequestFailed(Failure.of(error).named(fields)) from None


def _usage(body: GenerationBody) -> tuple[bool, bool]:
    """Return whether a stream has the token counts at its end, and in every event."""
    options = body.stream_options or StreamOptions()
    if options.continuous_usage_stats and not options.include_usage:
        raise refused(
            "stream_options.continuous_usage_stats",
            "stream_options.continuous_usage_stats is true and include_usage is not; it is for streams with usage only",
        )
    return bool(options.include_usage), bool(options.continuous_usage_stats)
