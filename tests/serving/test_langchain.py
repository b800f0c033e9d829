"""LangChain against a live server."""

from __future__ import annotations

import asyncio
import importlib
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest

from serving.clients import ANSWER, CAPITAL, GREEDY, SUM, City
from serving.live import QUESTION


@pytest.fixture(scope="module")
def langchain(server: str) -> Callable[..., Any]:
    """Make a ChatOpenAI."""
    kind = importlib.import_module("langchain_openai").ChatOpenAI

    def make(**fields: Any) -> Any:
        return kind(**GREEDY | {"max_tokens": 60, "base_url": f"{server}/v1", "api_key": "none", "max_retries": 0} | fields)

    return make


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def test_langchain_reads_a_chat_whole_and_streamed(langchain: Any) -> None:
    chat = langchain()
    whole = chat.invoke(QUESTION)
    assert (whole.content, whole.response_metadata["finish_reason"]) == (ANSWER, "stop")
    counts = {"input_tokens": 42, "output_tokens": 7, "total_tokens": 49}
    assert counts.items() <= whole.usage_metadata.items()
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == ANSWER
    streamed = reduce(operator.add, langchain(stream_usage=True).stream(QUESTION))
    assert streamed.content == ANSWER
    assert counts.items() <= streamed.usage_metadata.items()
    assert asyncio.run(chat.ainvoke(QUESTION)).content == ANSWER


def test_langchain_binds_tools_and_sends_results_back(langchain: Any) -> None:
    messages = importlib.import_module("langchain_core.messages")
    called = langchain().bind_tools([add], tool_choice="any", parallel_tool_calls=False).invoke(SUM)
    assert (called.tool_calls[0]["name"], called.tool_calls[0]["args"]) == ("add", {"a": 2, "b": 2})
    streamed = reduce(operator.add, langchain().bind_tools([add], tool_choice="add").stream(SUM))
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [("add", {"a": 2, "b": 2})]
    result = messages.ToolMessage("4", tool_call_id=called.tool_calls[0]["id"])
    after = langchain(max_tokens=4).bind_tools([add], tool_choice="none").invoke([*SUM, called, result])
    assert after.content
    assert not after.tool_calls


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # langchain's own
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_makes_an_answer_of_a_model_class(langchain: Any, method: str) -> None:
    chat = langchain().with_structured_output(City, method=method)
    assert isinstance(chat.invoke(CAPITAL), City)
    *_, last = chat.stream(CAPITAL)
    assert isinstance(last, City)
