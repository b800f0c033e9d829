"""LiteLLM against a live server."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serving.clients import ADD, ANSWER, CAPITAL, SUM, City, joined
from serving.live import COUNTING, MODEL, QUESTION


@pytest.fixture(scope="module")
def litellm(server: str) -> Iterator[Callable[..., Any]]:
    """Call a function of litellm's, by its name, with the server's address."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network for prices
        module = importlib.import_module("litellm")
        module.suppress_debug_info = True
        given: dict[str, Any] = {"api_base": f"{server}/v1", "api_key": "none", "temperature": 0, "max_tokens": 60}
        yield lambda name, kind="openai", **fields: getattr(module, name)(**{"model": f"{kind}/{MODEL}"} | given | fields)


def test_litellm_reads_chats_and_completions(litellm: Any) -> None:
    whole = litellm("completion", messages=QUESTION)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.total_tokens) == (ANSWER, "stop", 49)
    assert asyncio.run(litellm("acompletion", messages=QUESTION)).choices[0].message.content == ANSWER
    chunks = list(litellm("completion", messages=QUESTION, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == ANSWER
    assert [chunk.usage.total_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [49]
    assert litellm("text_completion", "text-completion-openai", prompt=COUNTING, max_tokens=4).choices[0].text == " 6, "


def test_litellm_reads_calls_and_answers_of_a_model_class(litellm: Any) -> None:
    fields: dict[str, Any] = {"messages": SUM, "tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = litellm("completion", **fields).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 2})
    chunks = litellm("completion", stream=True, **fields)
    parts = [part.function for chunk in chunks for choice in chunk.choices for part in choice.delta.tool_calls or ()]
    assert "".join(part.name or "" for part in parts) == "add"
    assert "".join(part.arguments for part in parts) == call.function.arguments
    answer = litellm("completion", messages=CAPITAL, response_format=City).choices[0].message.content
    assert City.model_validate_json(answer)


def test_litellm_raises_its_own_exceptions(litellm: Any) -> None:
    module = sys.modules["litellm"]
    for fields, expected in (
        ({"messages": QUESTION, "temperature": 3}, module.BadRequestError),
        ({"messages": QUESTION, "model": "openai/gpt-4"}, module.NotFoundError),
        ({"messages": [{"role": "user", "content": "a " * 3000}]}, module.ContextWindowExceededError),
    ):
        with pytest.raises(expected):
            litellm("completion", **fields)
