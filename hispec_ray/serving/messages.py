"""Conversations, tools and formats of answers, as JSON bodies have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from hispec_ray.grammar import json_object, json_schema
from hispec_ray.serving.fields import Body, Text, refused


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
    """Refuse JSON that Python reads but llguidance and the templates cannot: NaN, lone surrogates, nesting beyond 100."""
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
            raise refused(f"{where}.content", f"{where}.content is null; it must be a text or a list of text parts")
        if self.tool_calls and self.role != "assistant":
            raise refused(f"{where}.tool_calls", f"{where}.tool_calls is set; only messages of the role assistant have calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            said = "null" if self.tool_call_id is None else "set"
            raise refused(f"{where}.tool_call_id", f"{where}.tool_call_id is {said}; messages of the role tool have one, and no others")
        role = "system" if self.role == "developer" else self.role
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


MOST_MESSAGES = 4096
"""Of a conversation: a template takes about a tenth of a millisecond for each, and others wait meanwhile."""
Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a conversation for a template. Raises RequestFailed where parts of a message do not belong together."""
    return [message.plain(f"messages.{place}") for place, message in enumerate(messages)]


JsonSchema = Annotated[dict[str, Any], AfterValidator(_as_json), WithJsonSchema({"type": "object"})]
_OF_OBJECTS = {"type": "object", "properties": {"type": {"const": "object"}}}
Parameters = Annotated[dict[str, Any], AfterValidator(_as_json), WithJsonSchema(_OF_OBJECTS)]  # `Tool` checks the type


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: Text | None = None
    parameters: Parameters | None = None
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
    """What the answer is to be: any text, a JSON object, or what a JSON schema allows; `json_schema` comes with that type alone."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaOfAnswer | None = None

    def grammar(self) -> str | None:
        """Return the grammar of such answers; None for any text. Raises RequestFailed where type and schema do not belong together."""
        wanted = self.json_schema
        if (self.type == "json_schema") != (wanted is not None):
            raise refused(
                "response_format.json_schema",
                f"response_format.type is {self.type!r} and its json_schema is {'null' if wanted is None else 'set'}; "
                "it belongs to the type json_schema, and only there",
            )
        if wanted is None:
            return json_object() if self.type == "json_object" else None
        if wanted.schema_ is None:
            raise refused("response_format.json_schema.schema", "response_format.json_schema.schema is required")
        try:
            return json_schema(wanted.schema_)
        except ValueError as error:  # such as a number that its reader does not take
            raise refused("response_format.json_schema.schema", f"the schema cannot be followed: {error}") from None
