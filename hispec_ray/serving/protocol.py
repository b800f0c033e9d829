"""OpenAI's requests in plain data: what a client may send, checked, and the job that a coordinator gets out of it."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, WithJsonSchema

from hispec_ray.request import MAX_SEED, RequestError, SamplingParams
from hispec_ray.serving.answers import Answer, ChatAnswer, CompletionAnswer, Failure, RequestFailed

COMPLETION_TOKENS = 16
"""OpenAI's max_tokens for a completion that names none."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of a coordinator: prompts as text or token ids, or else the messages of a chat.

    stream: whether the answer is wanted as it comes; else the ends of its choices are enough.
    """

    id: str
    params: SamplingParams
    prompts: Sequence[str | Sequence[int]] = ()
    messages: Sequence[Mapping[str, str]] = ()
    stream: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """A checked HTTP request: the job, how its answer is to be written, and what its fields are called there.

    fields: the request's own names for the engine's `prompt` and `max_tokens`, where they differ.
    """

    job: Job
    answer: Answer
    include_usage: bool
    fields: Mapping[str, str] = field(default_factory=dict)

    def failed(self, failure: Failure) -> RequestFailed:
        """Return the error to raise, with the parameter under the name that the client used."""
        return RequestFailed(failure.of_param(self.fields.get(failure.param, failure.param) if failure.param else None))


# Names that pydantic puts into an error's location for a union's member; no field of ours is called so.
_TAGS = ("~one", "~texts", "~numbers", "~lists")


def _form(value: Any) -> str:
    """The tag of a value that may come as one or as a list of several kinds: by its first item."""
    if not isinstance(value, list):
        return "~one"
    first = value[0] if value else ""
    return "~lists" if isinstance(first, list) else "~texts" if isinstance(first, str | dict) else "~numbers"


def _whole_characters(text: str) -> str:
    """JSON can spell half of a surrogate pair; no tokenizer can read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it must not have half of a surrogate pair, as at character {error.start}") from None
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]
Texts = Annotated[list[Text], Field(min_length=1)]
TokenIds = Annotated[list[int], Field(min_length=1)]
Prompt = Annotated[
    Annotated[Text, Tag("~one")]
    | Annotated[Texts, Tag("~texts")]
    | Annotated[TokenIds, Tag("~numbers")]
    | Annotated[list[TokenIds], Tag("~lists")],
    Discriminator(_form),
]
# Ranges are documented here and checked in SamplingParams.
Temperature = Annotated[float, WithJsonSchema({"type": "number", "minimum": 0, "maximum": 2})]
Seed = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_SEED})]
Choices = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 128})]
MaxTokens = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
ChatTokens = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 1})]
Share = Annotated[float, WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1})]
Penalty = Annotated[float, WithJsonSchema({"type": "number", "minimum": -2, "maximum": 2})]
TopK = Annotated[int, WithJsonSchema({"type": "integer", "minimum": -1})]
Repetition = Annotated[float, WithJsonSchema({"type": "number", "minimum": 0.01, "maximum": 100})]
_BIAS_SCHEMA = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}
_STOP_TEXT = {"type": "string", "minLength": 1}
Stop = Annotated[
    Annotated[Text, Tag("~one")] | Annotated[list[Text], Tag("~texts")],
    Discriminator(lambda value: "~texts" if isinstance(value, list) else "~one"),
    WithJsonSchema({"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": 16}]}),
]


class Body(BaseModel):
    """A JSON object of a request: no conversions between types, no unknown fields, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(Body):
    """How a stream is written."""

    include_usage: bool | None = None
    """Send the token counts in a last event."""
    include_obfuscation: Literal[False] | None = None


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("~one")] | Annotated[Annotated[list[TextPart], Field(min_length=1)], Tag("~texts")],
    Discriminator(lambda value: "~texts" if isinstance(value, list) else "~one"),
]


class Message(Body):
    """One turn of a conversation. The text parts of a content are joined by newlines; `developer` is another name for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def plain(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": role, "content": content}


_PLAIN = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Ids come as JSON's keys, which are texts. Raises RequestError where one is no id."""
    for name in given:
        if not (name.isascii() and name.isdecimal()) or len(name) > 18:
            raise RequestError(f"logit_bias has key {_shown(name)}; keys must be token ids", "logit_bias")
    return {int(name): value for name, value in given.items()}


class GenerationBody(Body):
    """What both endpoints know. An explicit null is the same as leaving the field out."""

    model: str
    temperature: Temperature | None = None
    """0 always takes the likeliest token; 1 where unset."""
    seed: Seed | None = None
    """The same seed gives the same text; one is drawn where unset."""
    stop: Stop | None = None
    """The text ends before the first of these strings that appears."""
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_p: Share | None = None
    """Draw from the likeliest tokens that together have this probability."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], WithJsonSchema(_BIAS_SCHEMA)] | None = None
    """What is added to the logits of token ids."""
    top_k: TopK | None = None
    """Draw from the k likeliest tokens; -1 and 0 are all (an extension, as all that follow)."""
    min_p: Share | None = None
    """Draw from tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: Repetition | None = None
    stop_token_ids: list[int] | None = None
    """Ids that end the answer as the end-of-sequence token does."""
    min_tokens: MaxTokens | None = None
    """Neither a token nor a stop string ends the answer before so many tokens."""
    ignore_eos: bool | None = None
    """Go on past the end-of-sequence token."""
    user: str | None = None
    """Has no effect on the answer."""
    safety_identifier: str | None = None
    """Has no effect on the answer."""
    prompt_cache_key: str | None = None
    """Has no effect on the answer."""

    def params(self, max_tokens: int | None) -> SamplingParams:
        """Raises RequestError where a value is out of range."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
            n=1 if self.n is None else self.n,
            logit_bias=_biases(self.logit_bias or {}),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            **{name: value for name in _PLAIN if (value := getattr(self, name)) is not None},
        )


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: Prompt
    max_tokens: MaxTokens | None = None
    best_of: Choices | None = None
    """Offered only where it equals n."""


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: ChatTokens | None = None
    max_completion_tokens: ChatTokens | None = None
    """The newer name of max_tokens."""


# What clients may send that is not offered: only these values, which change nothing, and null are accepted.
_NEUTRAL_IN_COMPLETION: dict[str, tuple[Any, ...]] = {"echo": (False,), "logprobs": (), "suffix": ()}
_NEUTRAL_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,), "top_logprobs": (), "response_format": ({"type": "text"},), "tools": ([],), "tool_choice": ("none",),
    "parallel_tool_calls": (True, False), "functions": ([],), "function_call": ("none",), "modalities": (["text"],), "audio": (),
    "prediction": (), "reasoning_effort": (), "verbosity": (), "web_search_options": (), "metadata": ({},), "store": (False,),
    "service_tier": ("auto", "default"),
}  # fmt: skip
_NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "name": (), "refusal": (), "tool_calls": ([],), "tool_call_id": (), "function_call": (), "audio": (), "annotations": ([],),
}  # fmt: skip


def read_completion(raw: bytes, model: str) -> Call:
    """Check the body of POST /v1/completions for a server of `model`. Raises RequestFailed."""
    content = _offered(_json_object(raw), _NEUTRAL_IN_COMPLETION)
    body = _validated(CompletionBody, content, model)
    params = _params(body, COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens, {})
    if body.best_of is not None and body.best_of != params.n:
        raise _refused("best_of", f"best_of is {body.best_of} and n is {params.n}; this server offers best_of only where it equals n")
    prompts: Sequence[Any] = body.prompt if _form(body.prompt) in ("~texts", "~lists") else [body.prompt]
    answer = CompletionAnswer(model)
    return Call(Job(answer.id, params, prompts=prompts, stream=bool(body.stream)), answer, _include_usage(body))


def read_chat(raw: bytes, model: str) -> Call:
    """Check the body of POST /v1/chat/completions for a server of `model`. Raises RequestFailed."""
    content = _offered(_json_object(raw), _NEUTRAL_IN_CHAT)
    messages = content.get("messages")
    if isinstance(messages, list):
        kept = [_offered(m, _NEUTRAL_IN_MESSAGE, f"messages.{i}.") if isinstance(m, dict) else m for i, m in enumerate(messages)]
        content["messages"] = kept
    body = _validated(ChatBody, content, model)
    limits = {name: value for name in ("max_tokens", "max_completion_tokens") if (value := getattr(body, name)) is not None}
    if len(set(limits.values())) > 1:
        raise _refused(
            "max_tokens",
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}; "
            "they are two names of one limit: leave one out",
        )
    name = next(iter(limits), "max_tokens")
    limit = limits.get(name)
    if limit is not None and limit < 1:
        raise _refused(name, f"{name} is {limit}; it must be 1 or more")
    fields = {"prompt": "messages", "max_tokens": name}
    answer = ChatAnswer(model)
    plain = [message.plain() for message in body.messages]
    job = Job(answer.id, _params(body, limit, fields), messages=plain, stream=bool(body.stream))
    return Call(job, answer, _include_usage(body), fields)


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
            raise _refused(
                prefix + name,
                f"{prefix}{name} is {_shown(value)}; this server does not offer it: leave it out or set it to {accepted}",
                "unsupported_parameter",
            )
    return kept


def _same(value: Any, neutral: Any) -> bool:
    """Whether two JSON values are the same: true is not 1, 1.0 is."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


_AnyBody = TypeVar("_AnyBody", bound=GenerationBody)


def _validated(kind: type[_AnyBody], content: dict[str, Any], model: str) -> _AnyBody:
    try:
        body = kind.model_validate(content)
    except ValidationError as error:
        raise RequestFailed(_invalid(error)) from None
    if body.stream_options is not None and not body.stream:
        raise _refused("stream_options", "stream_options is set and stream is not true; it is for streams only")
    if body.model != model:
        raise RequestFailed(unknown_model(body.model, model))
    return body


def unknown_model(asked: str, model: str) -> Failure:
    return Failure(404, f"The model {_shown(asked)} does not exist; this server has {model!r}", param="model", code="model_not_found")


def _invalid(error: ValidationError) -> Failure:
    """The first thing that pydantic found wrong, in our words."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return Failure(400, f"{_shown(first['input'])} is not a parameter of this request", code="unknown_parameter")
    steps = [*first["loc"][:1], *(step for step in first["loc"][1:] if step not in _TAGS)]
    path = ".".join(map(str, steps))
    # An item of a list is named only where it is an object of its own, and a key of the client's is no field of ours.
    named = steps if steps[0] == "messages" else steps[:1] if steps[0] == "logit_bias" else [s for s in steps if isinstance(s, str)]
    param = ".".join(map(str, named))
    if first["type"] == "missing":
        return Failure(400, f"{path} is required", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return Failure(400, f"{_shown(path)} is not a parameter of this request", param=param, code="unknown_parameter")
    rule = first["msg"].removeprefix("Value error, ").replace("Input should", "it must", 1)
    return Failure(400, f"{path} is {_shown(first['input'])}; {rule}", param=param)


def _refused(param: str, message: str, code: str | None = None) -> RequestFailed:
    return RequestFailed(Failure(400, message, param=param, code=code))


def _shown(value: Any) -> str:
    """A value for a message: short, whatever it is."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)


def _params(body: GenerationBody, max_tokens: int | None, fields: Mapping[str, str]) -> SamplingParams:
    try:
        return body.params(max_tokens)
    except RequestError as error:
        raise _refused(fields.get(error.field or "", error.field or ""), error.message, error.code) from None


def _include_usage(body: GenerationBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)
