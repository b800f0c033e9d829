"""The JSON bodies of requests: what a client may send, field by field, and the parameters that they come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from hispec_ray.engine.tools import Tool, ToolUse
from hispec_ray.request import MOST_LOGPROBS, RequestError, SamplingParams
from hispec_ray.serving.failures import RequestFailed
from hispec_ray.serving.fields import (
    Biases,
    Body,
    ChatTokens,
    Choices,
    Id,
    Ids,
    MaxTokens,
    Prompt,
    Seed,
    Stop,
    Text,
    TopK,
    ranged,
    refused,
    shown,
    whole,
)
from hispec_ray.serving.messages import FunctionTool, Messages, NamedTool, ResponseFormat, ToolChoice
from hispec_ray.serving.wire import Failure

MOST_IN_LISTS = 5
"""The most `logprobs` of a completion, OpenAI's own limit."""
MOST_TOOLS = 128


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


_SAME_NAME = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
"""Fields that are called as in SamplingParams, and have its defaults where unset."""


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    """Ids come as JSON's keys, which are texts. Raises RequestError where one is no id."""
    for name in given:
        if not (name.isascii() and name.isdecimal()) or len(name) > 18:
            raise RequestError(f"logit_bias has key {shown(name)}; keys must be token ids", "logit_bias")
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

    temperature: Annotated[float, ranged("temperature")] | None = None
    """0 always takes the likeliest token; 1 where unset."""
    seed: Seed | None = None
    """The same seed gives the same text; one is drawn where unset."""
    stop: Stop | None = None
    """The text ends before the first of these strings that appears."""
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_p: Annotated[float, ranged("top_p")] | None = None
    """Draw from the likeliest tokens that together have this probability."""
    presence_penalty: Annotated[float, ranged("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, ranged("frequency_penalty")] | None = None
    logit_bias: Biases | None = None
    """What is added to the logits of token ids."""
    top_k: TopK | None = None
    """Draw from the k likeliest tokens; -1 and 0 are all (an extension, as all that follow)."""
    min_p: Annotated[float, ranged("min_p")] | None = None
    """Draw from tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: Annotated[float, ranged("repetition_penalty")] | None = None
    stop_token_ids: Ids | None = None
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
            **{name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None},
        )


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: Prompt
    max_tokens: MaxTokens | None = None
    best_of: Choices | None = None
    """Offered only where it equals n."""
    echo: bool | None = None
    """The text begins with the prompt."""
    logprobs: Annotated[int, whole(0, MOST_IN_LISTS)] | None = None
    """Tell each token's log-probability, and those of so many likeliest ones in its place; with echo, of the prompt's tokens too."""


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: ChatTokens | None = None
    max_completion_tokens: ChatTokens | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Tell each token's log-probability."""
    top_logprobs: Annotated[int, whole(0, MOST_LOGPROBS)] | None = None
    """With logprobs, those of so many likeliest tokens in its place."""
    response_format: ResponseFormat | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    """`auto` where there are tools, `none` where there are none."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls; true where unset."""

    def tool_use(self) -> ToolUse | None:
        """Return which calls the answer may or must have; None for none. Raises RequestFailed where choice and tools do not fit."""
        try:
            tools = tuple(
                Tool(tool.function.name, tool.function.parameters or {}, tool.model_dump(exclude_none=True)) for tool in self.tools or ()
            )
        except RequestError as error:
            raise RequestFailed(Failure.of(error)) from None
        choice = self.tool_choice
        if not tools:
            if choice not in (None, "none"):
                raise refused("tool_choice", f"tool_choice is {shown(_plainly(choice))} and there are no tools")
            return None
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names):
            raise refused("tools", f"tools has several functions of one name: {', '.join(sorted(names))}")
        if choice == "none":
            return None
        if isinstance(choice, NamedTool):
            tools = tuple(tool for tool in tools if tool.name == choice.function.name)
            if not tools:
                raise refused("tool_choice", f"tool_choice names {choice.function.name!r}; tools has {', '.join(sorted(names))}")
        several = self.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
        return ToolUse(tools, required=choice not in (None, "auto"), several=several, named=isinstance(choice, NamedTool))


def _plainly(choice: Any) -> Any:
    return choice.model_dump() if isinstance(choice, BaseModel) else choice
