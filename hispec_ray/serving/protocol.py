"""OpenAI's requests in plain data: what a client may send, checked, and the job that a coordinator gets out of it."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, WithJsonSchema

from hispec_ray.engine.tools import Tool, ToolUse
from hispec_ray.grammar import json_object, json_schema
from hispec_ray.request import MAX_SEED, RequestError, SamplingParams
from hispec_ray.serving.answers import Answer, ChatAnswer, CompletionAnswer, Failure, RequestFailed

COMPLETION_TOKENS = 16
"""OpenAI's max_tokens for a completion that names none."""
_MOST_IN_LISTS = 5  # OpenAI's most logprobs of a completion


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of a coordinator: prompts as text or token ids, or else the messages of a chat.

    stream: whether the answer is wanted as it comes; else the ends of its choices are enough.
    tools: what the answer may call. echo: whether it begins with the prompt. trace: whether to tell the level that chose each token.
    method: the method of speculation that the client asked for, if it did.
    """

    id: str
    params: SamplingParams
    prompts: Sequence[str | Sequence[int]] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    stream: bool = True
    tools: ToolUse | None = None
    echo: bool = False
    trace: bool = False
    method: str | None = None


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """What /tokenize asks of a coordinator: the ids of a text or of a conversation, the one that is not None."""

    prompt: str | None
    messages: Sequence[Mapping[str, Any]] | None
    add_special_tokens: bool
    add_generation_prompt: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True)
class Call:
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
# A list says what is wrong with its first bad item alone: a million bad ones would take seconds and a gibibyte to name.
Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
Id = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
TokenIds = Annotated[list[Id], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, Tag("~one")]
    | Annotated[Texts, Tag("~texts")]
    | Annotated[TokenIds, Tag("~numbers")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("~lists")],
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
_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,18}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_STOP_TEXT = {"type": "string", "minLength": 1}
Stop = Annotated[
    Annotated[Text, Tag("~one")] | Annotated[list[Text], Field(fail_fast=True), Tag("~texts")],
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
    continuous_usage_stats: bool | None = None
    """With include_usage, send the counts so far in every event too (an extension; load generators ask for it)."""
    include_obfuscation: Literal[False] | None = None


class Extension(Body):
    """What this server offers beyond others: see docs/api.md."""

    method: Literal["plain", "single", "hispec"] | None = None
    """`plain` decodes this request without speculation; else the server's own method. The text is the same."""
    trace: bool | None = None
    """Tell, for each token, the level that chose it first."""


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


Content = Annotated[
    Annotated[Text, Tag("~one")] | Annotated[Annotated[list[TextPart], Field(min_length=1, fail_fast=True)], Tag("~texts")],
    Discriminator(lambda value: "~texts" if isinstance(value, list) else "~one"),
]


_DEEPEST = 100  # levels of a JSON value that goes on to others, whose readers end at 128 or so


def _as_json(value: Any) -> Any:
    """Refuse what Python's reader of JSON takes and those behind it do not: NaN, half of a surrogate pair, and any depth."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [item for outer in level for item in _items(outer)]
    if level:
        raise _too_deep()
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it must not have half of a surrogate pair") from None
    except ValueError:
        raise ValueError("it must not have numbers that are not finite") from None
    return value


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep() -> ValueError:
    return ValueError(f"it must not be nested more than {_DEEPEST} levels deep")


def _as_arguments(text: str) -> str:
    """Arguments are JSON in a text. Where they are none at all, the encoder says so."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        return text
    _as_json(value)
    return text


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class CalledFunction(Body):
    """What an earlier answer called; arguments: a JSON object as text."""

    name: Text
    arguments: Annotated[Text, AfterValidator(_as_arguments)]


class Called(Body):
    """A call in an earlier answer."""

    id: Text
    type: Literal["function"]
    function: CalledFunction


class Message(Body):
    """One turn of a conversation. The text parts of a content are joined by newlines; `developer` is another name for `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    """Required but for an assistant's message with tool_calls."""
    tool_calls: Annotated[list[Called], Field(fail_fast=True)] | None = None
    tool_call_id: Text | None = None
    """The call that a message of the role tool answers."""

    def plain(self, where: str) -> dict[str, Any]:
        """Return the message for a template. Raises RequestFailed where its parts do not belong together."""
        if self.content is None and not self.tool_calls:
            raise _refused(f"{where}.content", f"{where}.content is null; it must be a text or a list of text parts")
        if self.tool_calls and self.role != "assistant":
            raise _refused(f"{where}.tool_calls", f"{where}.tool_calls is set; only messages of the role assistant have calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            said = "null" if self.tool_call_id is None else "set"
            raise _refused(f"{where}.tool_call_id", f"{where}.tool_call_id is {said}; messages of the role tool have one, and no others")
        role = "system" if self.role == "developer" else self.role
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]
JsonSchema = Annotated[dict[str, Any], AfterValidator(_as_json), WithJsonSchema({"type": "object"})]


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: Text | None = None
    parameters: JsonSchema | None = None
    """The JSON schema of its arguments, an object's."""
    strict: bool | None = None
    """Arguments always follow the schema, whatever stands here."""


class FunctionTool(Body):
    """A tool."""

    type: Literal["function"]
    function: Function


class Named(Body):
    """A function's name."""

    name: Name


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: Named


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~one")] | Annotated[NamedTool, Tag("~texts")],
    Discriminator(lambda value: "~one" if isinstance(value, str) else "~texts"),
]


class SchemaOfAnswer(Body):
    """A JSON schema with a name."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    name: Name
    description: Text | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None
    """The answer always follows the schema, whatever stands here."""


class ResponseFormat(Body):
    """What the answer is to be: any text, a JSON object, or what a JSON schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaOfAnswer | None = None

    def grammar(self) -> str | None:
        if self.type == "json_object":
            return json_object()
        if self.type == "json_schema" and self.json_schema and self.json_schema.schema_ is not None:
            return json_schema(self.json_schema.schema_)
        return None


_PLAIN = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Ids come as JSON's keys, which are texts. Raises RequestError where one is no id."""
    for name in given:
        if not (name.isascii() and name.isdecimal()) or len(name) > 18:
            raise RequestError(f"logit_bias has key {_shown(name)}; keys must be token ids", "logit_bias")
    return {int(name): value for name, value in given.items()}


class ModelBody(Body):
    """What every body has."""

    model: str


class TokenizeBody(ModelBody):
    """The body of POST /tokenize: prompt or messages."""

    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """To a prompt, as a completion does; true where unset."""
    add_generation_prompt: bool | None = None
    """To messages, as a chat completion does; true where unset."""
    return_token_strs: bool | None = None
    """Tell the tokens' names in the tokenizer too."""


class DetokenizeBody(ModelBody):
    """The body of POST /detokenize."""

    tokens: Annotated[list[Id], Field(fail_fast=True)]


class GenerationBody(ModelBody):
    """What both endpoints know. An explicit null is the same as leaving the field out."""

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
    stop_token_ids: Annotated[list[Id], Field(fail_fast=True)] | None = None
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
    hispec: Extension | None = None

    def params(self, max_tokens: int | None, **more: Any) -> SamplingParams:
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
            speculate=self.hispec is None or self.hispec.method != "plain",
            **more,
            **{name: value for name in _PLAIN if (value := getattr(self, name)) is not None},
        )


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: Prompt
    max_tokens: MaxTokens | None = None
    best_of: Choices | None = None
    """Offered only where it equals n."""
    echo: bool | None = None
    """The text begins with the prompt."""
    logprobs: Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 5})] | None = None
    """Tell each token's log-probability, and those of so many likeliest ones in its place; with echo, of the prompt's tokens too."""


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: ChatTokens | None = None
    max_completion_tokens: ChatTokens | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Tell each token's log-probability."""
    top_logprobs: Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 20})] | None = None
    """With logprobs, those of so many likeliest tokens in its place."""
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    """`auto` where there are tools, `none` where there are none."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls; true where unset."""

    def tool_use(self) -> ToolUse | None:
        """Return which calls the answer may or must have; None for none. Raises RequestFailed where choice and tools do not fit."""
        tools = tuple(
            Tool(tool.function.name, tool.function.parameters or {}, tool.model_dump(exclude_none=True)) for tool in self.tools or ()
        )
        choice = self.tool_choice
        if not tools:
            if choice not in (None, "none"):
                raise _refused("tool_choice", f"tool_choice is {_shown(_plainly(choice))} and there are no tools")
            return None
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names):
            raise _refused("tools", f"tools has several functions of one name: {', '.join(sorted(names))}")
        if choice == "none":
            return None
        if isinstance(choice, NamedTool):
            tools = tuple(tool for tool in tools if tool.name == choice.function.name)
            if not tools:
                raise _refused("tool_choice", f"tool_choice names {choice.function.name!r}; tools has {', '.join(sorted(names))}")
        several = self.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
        return ToolUse(tools, required=choice not in (None, "auto"), several=several, named=isinstance(choice, NamedTool))


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


def read_completion(raw: bytes, model: str) -> Call:
    """Check the body of POST /v1/completions for a server of `model`. Raises RequestFailed."""
    content = _offered(_json_object(raw), _NEUTRAL_IN_COMPLETION)
    body = _validated(CompletionBody, content, model)
    echo, logprobs = bool(body.echo), body.logprobs
    if logprobs is not None and not 0 <= logprobs <= _MOST_IN_LISTS:
        raise _refused("logprobs", f"logprobs is {logprobs}; it must be from 0 to {_MOST_IN_LISTS}")
    tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params = _params(body, tokens, {}, logprobs=logprobs, prompt_logprobs=logprobs if echo else None)
    if body.best_of is not None and body.best_of != params.n:
        raise _refused("best_of", f"best_of is {body.best_of} and n is {params.n}; this server offers best_of only where it equals n")
    prompts: Sequence[Any] = body.prompt if _form(body.prompt) in ("~texts", "~lists") else [body.prompt]
    answer = CompletionAnswer(model, logprobs=logprobs is not None, trace=_trace(body))
    job = Job(answer.id, params, prompts=prompts, stream=bool(body.stream), echo=echo, trace=_trace(body), method=_method(body))
    return Call(job, answer, *_usage(body))


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
    use = body.tool_use()
    fields = {"prompt": "messages", "max_tokens": name, "logprobs": "top_logprobs", "grammar": "tools" if use else "response_format"}
    if body.top_logprobs is not None and not body.logprobs:
        raise _refused("top_logprobs", f"top_logprobs is {body.top_logprobs} and logprobs is not true; it is for log-probabilities only")
    grammar = _grammar(body)
    if use and grammar:
        raise _refused("response_format", "response_format is set beside tools; set tool_choice to none or leave one of them out")
    answer = ChatAnswer(model, logprobs=bool(body.logprobs), trace=_trace(body))
    params = _params(body, limit, fields, logprobs=body.top_logprobs or 0 if body.logprobs else None, grammar=grammar)
    messages = [message.plain(f"messages.{i}") for i, message in enumerate(body.messages)]
    job = Job(answer.id, params, messages=messages, stream=bool(body.stream), tools=use, trace=_trace(body), method=_method(body))
    return Call(job, answer, *_usage(body), fields)


def read_tokenize(raw: bytes, model: str) -> TokenizeJob:
    """Check the body of POST /tokenize for a server of `model`. Raises RequestFailed."""
    body = _validated(TokenizeBody, _json_object(raw), model)
    if (body.prompt is None) == (body.messages is None):
        raise _refused("prompt", f"prompt and messages are {'both null' if body.prompt is None else 'both set'}; set one of them")
    messages = None if body.messages is None else [message.plain(f"messages.{i}") for i, message in enumerate(body.messages)]
    special, generation = body.add_special_tokens is not False, body.add_generation_prompt is not False
    return TokenizeJob(body.prompt, messages, special, generation, bool(body.return_token_strs))


def read_detokenize(raw: bytes, model: str) -> list[int]:
    """Check the body of POST /detokenize for a server of `model`. Raises RequestFailed."""
    return _validated(DetokenizeBody, _json_object(raw), model).tokens


def _grammar(body: ChatBody) -> str | None:
    wanted = body.response_format
    if wanted is None:
        return None
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        raise _refused(
            "response_format.json_schema",
            f"response_format.type is {wanted.type!r} and its json_schema is {'null' if wanted.json_schema is None else 'set'}; "
            "it belongs to the type json_schema, and only there",
        )
    if wanted.json_schema and wanted.json_schema.schema_ is None:
        raise _refused("response_format.json_schema.schema", "response_format.json_schema.schema is required")
    try:
        return wanted.grammar()
    except ValueError as error:  # such as a number that its reader does not take
        raise _refused("response_format.json_schema.schema", f"the schema cannot be followed: {error}") from None


def _trace(body: GenerationBody) -> bool:
    return body.hispec is not None and bool(body.hispec.trace)


def _method(body: GenerationBody) -> str | None:
    return body.hispec.method if body.hispec else None


def _plainly(choice: Any) -> Any:
    return choice.model_dump() if isinstance(choice, BaseModel) else choice


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


_AnyBody = TypeVar("_AnyBody", bound=ModelBody)


def _validated(kind: type[_AnyBody], content: dict[str, Any], model: str) -> _AnyBody:
    try:
        body = kind.model_validate(content)
    except ValidationError as error:
        raise RequestFailed(_invalid(error)) from None
    if isinstance(body, GenerationBody) and body.stream_options is not None and not body.stream:
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


def _params(body: GenerationBody, max_tokens: int | None, fields: Mapping[str, str], **more: Any) -> SamplingParams:
    try:
        return body.params(max_tokens, **more)
    except RequestError as error:
        raise _refused(fields.get(error.field or "", error.field or ""), error.message, error.code) from None


def _usage(body: GenerationBody) -> tuple[bool, bool]:
    """Return whether a stream has the token counts at its end, and in every event."""
    options = body.stream_options or StreamOptions()
    if options.continuous_usage_stats and not options.include_usage:
        raise _refused(
            "stream_options.continuous_usage_stats",
            "stream_options.continuous_usage_stats is true and include_usage is not; it is for streams with usage only",
        )
    return bool(options.include_usage), bool(options.continuous_usage_stats)
