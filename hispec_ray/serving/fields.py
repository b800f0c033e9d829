"""The kinds of fields that JSON bodies have, and how one is refused."""

from __future__ import annotations

import json
import reprlib
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, WithJsonSchema

from hispec_ray.request import LARGEST_BIAS, LONGEST_STOP, MAX_SEED, MOST_CHOICES, MOST_IDS, MOST_STOPS, RANGES
from hispec_ray.serving.failures import RequestFailed
from hispec_ray.serving.wire import Failure


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
    """Return the union tag of a value, judged by its first item if it is a list."""
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
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True), Tag("~lists")],
    Discriminator(form_of),
]


# The ranges are SamplingParams', which checks them; here the document gets them.
def ranged(name: str) -> WithJsonSchema:
    """The schema of a number that is a parameter of this name."""
    least, most = RANGES[name]
    return WithJsonSchema({"type": "number", "minimum": least, "maximum": most})


def whole(least: int, most: int | None = None) -> WithJsonSchema:
    """The schema of a whole number, ends included."""
    return WithJsonSchema({"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most}))


Seed = Annotated[int, whole(0, MAX_SEED)]
Choices = Annotated[int, whole(1, MOST_CHOICES)]
MaxTokens = Annotated[int, whole(0)]
ChatTokens = Annotated[int, whole(1)]
TopK = Annotated[int, whole(-1)]
Ids = Annotated[
    list[Id], Field(fail_fast=True), WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MOST_IDS})
]
_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,18}$"},
    "additionalProperties": {"type": "number", "minimum": -LARGEST_BIAS, "maximum": LARGEST_BIAS},
    "maxProperties": MOST_IDS,
}
Biases = Annotated[dict[str, float], WithJsonSchema(_BIAS_SCHEMA)]
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
Stop = Annotated[
    Annotated[Text, Tag("~one")] | Annotated[list[Text], Field(fail_fast=True), Tag("~texts")],
    Discriminator(lambda value: "~texts" if isinstance(value, list) else "~one"),
    WithJsonSchema({"anyOf": [_STOP_TEXT, {"type": "array", "items": _STOP_TEXT, "maxItems": MOST_STOPS}]}),
]


class Body(BaseModel):
    """A JSON object of a request: no conversions between types, no unknown fields, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
