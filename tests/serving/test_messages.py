"""Conversations, tools and formats of answers in a request: what is accepted, and what is refused by its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hispec_ray.engine.tools import Tool, ToolUse
from hispec_ray.grammar import json_object, json_schema
from hispec_ray.serving.failures import RequestFailed
from hispec_ray.serving.messages import MOST_MESSAGES
from hispec_ray.serving.protocol import (
    read_chat,
    read_tokenize,
)
from serving.bodies import CHAT, NAMED, NAN, TOOL, chat

CALLED: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_MESSAGES: list[tuple[str, Any]] = [
    ("messages.0", 5),
    ("messages.0.role", {"content": "Hi"}),
    ("messages.0.role", {"role": "wizard", "content": "Hi"}),
    ("messages.0.tool_call_id", {"role": "tool", "content": "Hi", "tool_call_id": None}),
    ("messages.0.tool_call_id", {"role": "user", "content": "Hi", "tool_call_id": "a"}),
    ("messages.0.tool_calls", {"role": "user", "content": "Hi", "tool_calls": [CALLED]}),
    ("messages.0.tool_calls.0.type", {"role": "assistant", "tool_calls": [CALLED | {"type": "custom"}]}),
    ("messages.0.tool_calls.0.function", {"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}),
    ("messages.0.tool_calls.0.function.arguments", {"role": "assistant", "tool_calls": [CALLED | {"function": {"name": "f"}}]}),
    ("messages.0.content", {"role": "user"}),
    ("messages.0.content", {"role": "user", "content": None}),
    ("messages.0.content", {"role": "assistant", "content": None, "tool_calls": []}),
    ("messages.0.content", {"role": "user", "content": 5}),
    ("messages.0.content", {"role": "user", "content": []}),
    ("messages.0.content", {"role": "user", "content": "\ud83d"}),
    ("messages.0.content.1.type", {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}),
    ("messages.0.content.0.text", {"role": "user", "content": [{"type": "text", "text": 5}]}),
    ("messages.0.content.0.text", {"role": "user", "content": [{"type": "text"}]}),
    ("messages.0.content.0.cache", {"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}]}),
    ("messages.0.tool_calls.0.id", {"role": "assistant", "content": "a", "tool_calls": [{}]}),
    ("messages.0.name", {"role": "user", "content": "a", "name": "Bob"}),
    ("messages.0.mood", {"role": "user", "content": "a", "mood": "bright"}),
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(("param", "message"), BAD_MESSAGES)
def test_a_bad_message_is_refused_by_its_place(param: str, message: Any) -> None:
    with pytest.raises(RequestFailed) as refused:
        chat(messages=[message])
    assert (refused.value.failure.status, refused.value.failure.param) == (400, param)


def test_chat_content_comes_as_text_or_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat(messages=[{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}])
    assert call.job.messages == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "a\nb"}]


def test_a_conversation_with_calls_reaches_the_template() -> None:
    said = [
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "content": "5", "tool_call_id": "a"},
    ]
    assert chat(messages=[*CHAT["messages"], *said]).job.messages[1:] == [{**said[0], "content": ""}, said[1]]


def test_tokenize_takes_the_messages_that_a_chat_takes() -> None:
    said = [*CHAT["messages"], {"role": "assistant", "content": "4", "refusal": None, "annotations": []}]
    job = read_tokenize(json.dumps({"model": "M", "messages": said}).encode(), "M")
    assert job.messages == chat(messages=said).job.messages
    with pytest.raises(RequestFailed) as refused:
        read_tokenize(json.dumps({"model": "M", "messages": [said[1] | {"refusal": "no"}]}).encode(), "M")
    assert refused.value.failure.param == "messages.0.refusal"


@pytest.mark.parametrize("read", [read_chat, read_tokenize])
def test_a_conversation_has_no_more_messages_than_a_template_reads_in_time(read: Any) -> None:
    body = {"model": "M", "messages": CHAT["messages"] * MOST_MESSAGES}
    read(json.dumps(body).encode(), "M")
    body["messages"] = [*body["messages"], {"role": "user", "content": "Hi", "refusal": "no"}]
    with pytest.raises(RequestFailed, match="messages has 4097 messages; at most 4096 are allowed") as refused:
        read(json.dumps(body).encode(), "M")
    assert refused.value.failure.param == "messages"


def test_a_tool_choice_says_which_calls_there_may_be() -> None:
    other = {"type": "function", "function": {"name": "g", "description": "b"}}
    tools = (Tool("f", {"type": "object"}, TOOL), Tool("g", {}, other))
    both = {"tools": [TOOL, other]}
    assert chat(**both).job.tools == chat(**both, tool_choice="auto", parallel_tool_calls=True).job.tools == ToolUse(tools)
    assert chat(**both, tool_choice="none").job.tools is chat(tools=[], tool_choice="none").job.tools is None
    assert chat(**both, tool_choice="required", parallel_tool_calls=False).job.tools == ToolUse(tools, True, False)
    assert chat(**both, tool_choice=NAMED).job.tools == ToolUse(tools[:1], True, False, True)
    with pytest.raises(RequestFailed, match="tools has f"):
        chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}})
    for name in ("", "a b", "x" * 65):
        with pytest.raises(RequestFailed) as refused:
            chat(tools=[{"type": "function", "function": {"name": name}}])
        assert refused.value.failure.param == "tools.function.name"


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_tools_parameters_are_an_objects(choice: str) -> None:
    for parameters in ({"type": "string"}, {"type": ["object"]}, {"type": None}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        with pytest.raises(RequestFailed, match="the type must be 'object'") as refused:
            chat(tools=[tool], tool_choice=choice)
        assert (refused.value.failure.status, refused.value.failure.param) == (400, "tools.function.parameters")


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("response_format.type", {"type": "xml"}),
        ("response_format.json_schema", {"type": "json_schema"}),
        ("response_format.json_schema", {"type": "json_object", "json_schema": {"name": "a", "schema": SCHEMA}}),
        ("response_format.json_schema.name", {"type": "json_schema", "json_schema": {"schema": SCHEMA}}),
        ("response_format.json_schema.name", {"type": "json_schema", "json_schema": {"name": "a b", "schema": SCHEMA}}),
        ("response_format.json_schema.schema", {"type": "json_schema", "json_schema": {"name": "a"}}),
        ("response_format.json_schema.schema", {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}),
    ],
)
def test_a_bad_response_format_is_refused_by_its_place(param: str, value: Any) -> None:
    with pytest.raises(RequestFailed) as refused:
        chat(response_format=value)
    assert (refused.value.failure.status, refused.value.failure.param) == (400, param)


def test_a_response_format_becomes_a_grammar() -> None:
    assert chat(response_format={"type": "json_object"}).job.params.grammar == json_object()
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True, "description": "b"}}
    assert chat(response_format=wanted).job.params.grammar == json_schema(SCHEMA)
    assert chat(response_format={"type": "text"}).job.params.grammar is None
    for fields, param in (({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 1}, "min_tokens"), ({"tools": [TOOL]}, "response_format")):
        with pytest.raises(RequestFailed) as refused:
            chat(response_format=wanted, **fields)
        assert refused.value.failure.param == param


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (NAN, "finite"), (-float("inf"), "finite"), ("\ud83d", "surrogate"), ({"\ud83d": 1}, "surrogate"), (nested(101), "100 levels"),
        (nested(500), "100 levels"),
    ],
)  # fmt: skip
def test_json_that_goes_on_to_others_is_refused_where_they_could_not_read_it(value: Any, rule: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"const": value}}}]
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": value}}}
    called = {"role": "assistant", "tool_calls": [CALLED | {"function": {"name": "f", "arguments": json.dumps({"a": value})}}]}
    for fields, param in (
        ({"tools": tools}, "tools.function.parameters"),
        ({"tools": tools, "tool_choice": "none"}, "tools.function.parameters"),
        ({"response_format": wanted}, "response_format.json_schema.schema"),
        ({"messages": [called]}, "messages.0.tool_calls.0.function.arguments"),
    ):
        with pytest.raises(RequestFailed, match=rule) as refused:
            chat(**fields)
        assert (refused.value.failure.status, refused.value.failure.param) == (400, param)


def test_arguments_of_any_depth_are_refused_and_those_that_are_no_json_left_to_the_template() -> None:
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    with pytest.raises(RequestFailed, match="100 levels"):
        chat(messages=[{"role": "assistant", "tool_calls": [CALLED | {"function": {"name": "f", "arguments": deep}}]}])
    for text in ("", "{", "5", '{"a": ' + "9" * 5000 + "}"):
        call = chat(messages=[{"role": "assistant", "tool_calls": [CALLED | {"function": {"name": "f", "arguments": text}}]}])
        assert call.job.messages[0]["tool_calls"][0]["function"]["arguments"] == text


def test_a_schema_with_a_number_that_nobody_can_read_is_refused() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 10**400}}}
    with pytest.raises(RequestFailed, match="cannot be followed") as refused:
        chat(response_format=wanted)
    assert (refused.value.failure.status, refused.value.failure.param) == (400, "response_format.json_schema.schema")
