"""Grammars for `SamplingParams.grammar`, as text in llguidance's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

# Between a JSON text's parts: nothing, a space, or a new line with its indentation. Without a bound a model may go on with blanks for ever.
JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": r"( ?|\n[ \t]{0,40})"}


def json_schema(schema: Mapping[str, Any] | bool) -> str:
    """Return the grammar of the JSON texts that a schema allows.

    Raises ValueError where the schema is no JSON. What it says is looked at when the grammar is used: keywords that cannot be followed,
    such as `not` and `uniqueItems`, are refused then.
    """
    options: Any = JSON_OPTIONS
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def json_object() -> str:
    """Return the grammar of any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """Return the grammar of the texts that a regular expression (Rust's, without look-around) matches from end to end."""
    return LLMatcher.grammar_from_regex(pattern)


def lark(rules: str) -> str:
    """Return the grammar of a Lark text (llguidance's dialect)."""
    return LLMatcher.grammar_from_lark(rules)
