"""The kinds of fields that JSON bodies have, and how one is refused."""

from __future__ import annotations

import json
import reprlib
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from hispec_ray.request import MAX_SEED
from hispec_ray.serving.answers import Failure, RequestFailed


def refused(param: str, message: str, code: str | None = None) -> RequestFailed:
    return RequestFailed(Failure(400, message, param=param, code=code))


def shown(value: Any) -> str:
    """A value for a message: short, whatever it is."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value)


# Names that pydantic puts into an error's location for a union's member; no field of ours is called so.
TAGS = ("~one", "~texts", "~numbers", "~lists")


def form_of(value: Any) -> str:
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
    Discriminator(form_of),
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
BIAS_SCHEMA = {
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
