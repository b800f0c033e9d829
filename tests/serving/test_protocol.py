"""What a request may say: every bad value is refused with the name of its field, every neutral one is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from hispec_ray.engine.tools import Tool, ToolUse
from hispec_ray.grammar import json_object, json_schema
from hispec_ray.serving.bodies import ChatBody, CompletionBody, DetokenizeBody, ModelBody, TokenizeBody
from hispec_ray.serving.failures import RequestFailed
from hispec_ray.serving.messages import MOST_MESSAGES
from hispec_ray.serving.protocol import (
    Checked,
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from hispec_ray.serving.wire import TokenizeJob

COMPLETION: dict[str, Any] = {"model": "M", "prompt": "Hi"}
CHAT: dict[str, Any] = {"model": "M", "messages": [{"role": "user", "content": "Hi"}]}

NAN = float("nan")
BAD_IN_BOTH: list[tuple[str, Any]] = [
    ("temperature", -1), ("temperature", 3), ("temperature", "hot"), ("temperature", NAN), ("temperature", True), ("temperature", []),
    ("top_p", -0.1), ("top_p", 1.5), ("top_p", True), ("top_p", NAN),
    ("n", 0), ("n", "2"), ("n", 129), ("n", 1.5), ("n", 1.0), ("n", True),
    ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "5"), ("max_tokens", True),
    ("presence_penalty", 2.5), ("presence_penalty", False), ("frequency_penalty", -2.1), ("frequency_penalty", "1"),
    ("logit_bias", {"5": 101}), ("logit_bias", {"-5": 1}), ("logit_bias", {"x": 1}), ("logit_bias", {"5": None}), ("logit_bias", [5, 1]),
    ("logit_bias", {"9" * 19: 1}), ("repetition_penalty", 0), ("min_p", 1.1), ("stop_token_ids", [-1]), ("stop_token_ids", 5),
    ("seed", -1), ("seed", 2**63), ("seed", 1.0), ("seed", "1"),
    ("stop", ""), ("stop", 5), ("stop", [""]), ("stop", ["a", 5]), ("stop", ["a"] * 17), ("stop", "\ud83d"),
    ("stream", "yes"), ("stream", 1), ("stream_options", 5),
    ("ignore_eos", 1), ("user", 5), ("model", 5), ("model", None), ("logprobs", -1), ("logprobs", 6),
    ("top_k", -2), ("top_k", 1.5), ("min_tokens", -1), ("no_such_field", 1), ("~one", 1),
    ("hispec", 5),
]  # fmt: skip
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
BAD_IN_COMPLETION: list[tuple[str, Any]] = [
    ("prompt", [-1.5]), ("prompt", [1.5]), ("prompt", 5), ("prompt", None), ("prompt", []), ("prompt", [[]]), ("prompt", ["a", 5]),
    ("prompt", [5, "a"]), ("prompt", [[5], "a"]), ("prompt", [[5], [True]]), ("prompt", [None]), ("prompt", {"a": 1}),
    ("prompt", "\ud83d"), ("prompt", ["a", "\ud83d"]), ("suffix", "x"), ("echo", 0), ("echo", "yes"),
    ("best_of", 2), ("logprobs", True), ("logprobs", 1.0), ("min_tokens", 17), ("messages", []), ("max_completion_tokens", 5),
]  # fmt: skip
BAD_IN_CHAT: list[tuple[str, Any]] = [
    ("max_tokens", 0), ("max_completion_tokens", 0), ("max_completion_tokens", -1), ("max_completion_tokens", "5"),
    ("messages", {"role": "user"}), ("messages", []), ("messages", None), ("messages", "Hi"),
    ("logprobs", 1), ("top_logprobs", 21), ("top_logprobs", 1), ("response_format", "text"), ("tools", 5), ("tools", [5]), ("tools", {}),
    ("tools", [TOOL, TOOL]), ("tools", [TOOL] * 129), ("tool_choice", "auto"), ("tool_choice", "any"), ("tool_choice", NAMED),
    ("echo", True),
    ("functions", [{}]), ("function_call", "auto"), ("modalities", ["audio"]), ("store", True), ("metadata", {"a": "b"}), ("prompt", "x"),
]  # fmt: skip
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


def completion(**fields: Any) -> Checked:
    return read_completion(json.dumps(COMPLETION | fields).encode(), "M")


def chat(**fields: Any) -> Checked:
    return read_chat(json.dumps(CHAT | fields).encode(), "M")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "value"), BAD_IN_BOTH + BAD_IN_COMPLETION)
def test_a_bad_value_of_a_completion_is_refused_by_name(name: str, value: Any, stream: bool) -> None:
    with pytest.raises(RequestFailed) as refused:
        completion(**{"stream": stream, name: value})
    assert (refused.value.failure.status, refused.value.failure.param) == (400, name)
    assert name in refused.value.failure.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "value"), BAD_IN_BOTH + BAD_IN_CHAT)
def test_a_bad_value_of_a_chat_is_refused_by_name(name: str, value: Any, stream: bool) -> None:
    with pytest.raises(RequestFailed) as refused:
        chat(**{"stream": stream, name: value})
    assert (refused.value.failure.status, refused.value.failure.param) == (400, name)


@pytest.mark.parametrize(("param", "message"), BAD_MESSAGES)
def test_a_bad_message_is_refused_by_its_place(param: str, message: Any) -> None:
    with pytest.raises(RequestFailed) as refused:
        chat(messages=[message])
    assert (refused.value.failure.status, refused.value.failure.param) == (400, param)


def test_a_message_names_the_value_and_what_is_valid() -> None:
    for fields, message in (
        ({"temperature": 3}, "temperature is 3.0; it must be from 0 to 2"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a valid number"),
        ({"prompt": ["a", 5]}, "prompt.1 is 5; it must be a valid string"),
        ({"suffix": "a"}, "suffix is 'a'; this server does not offer it: leave it out or set it to null"),
        ({"logprobs": 6}, "logprobs is 6; it must be from 0 to 5"),
        ({"model": None}, "model is null; it must be a valid string"),
        ({"prompt": [["x" * 1000]]}, None),
    ):
        with pytest.raises(RequestFailed) as refused:
            completion(**fields)
        assert len(refused.value.failure.message) < 200
        assert message is None or refused.value.failure.message == message


def test_a_field_whose_name_is_no_text_is_refused() -> None:
    with pytest.raises(RequestFailed, match="not a parameter") as refused:
        completion(**{"\ud83d": 1})
    assert refused.value.failure.status == 400


def test_stream_options_are_for_streams() -> None:
    for options, param in (
        ({"include_usage": 1}, "stream_options.include_usage"),
        ({"continuous_usage_stats": True}, "stream_options.continuous_usage_stats"),
        ({"x": 1}, "stream_options.x"),
    ):
        with pytest.raises(RequestFailed) as refused:
            completion(stream=True, stream_options=options)
        assert (refused.value.failure.status, refused.value.failure.param) == (400, param)
    with pytest.raises(RequestFailed) as refused:
        completion(stream_options={"include_usage": True})
    assert (refused.value.failure.status, refused.value.failure.param) == (400, "stream_options")


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"5", b'"a"', b"\xff\xfe", b"{'a': 1}", b"[" * 100_000, b'{"seed": ' + b"1" * 5000 + b"}"]
)
@pytest.mark.parametrize("read", [read_completion, read_chat])
def test_a_body_that_is_no_json_object_is_refused(raw: bytes, read: Any) -> None:
    with pytest.raises(RequestFailed) as refused:
        read(raw, "M")
    assert refused.value.failure.status == 400


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field_is_named(missing: str) -> None:
    fields = {name: value for name, value in COMPLETION.items() if name != missing}
    with pytest.raises(RequestFailed) as refused:
        read_completion(json.dumps(fields).encode(), "M")
    assert (refused.value.failure.status, refused.value.failure.param) == (400, missing)


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(RequestFailed) as refused:
        completion(model="gpt-4")
    failure = refused.value.failure
    assert (failure.status, failure.param, failure.code) == (404, "model", "model_not_found")


def test_null_is_absence() -> None:
    offered = ["temperature", "seed", "stop", "n", "stream", "stream_options", "ignore_eos", "user", "max_tokens", "top_p", "min_tokens"]
    offered += ["presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "top_k", "min_p", "stop_token_ids"]
    offered += ["logprobs", "hispec"]
    only_completion = ["suffix", "echo", "best_of"]
    only_chat = [
        "max_completion_tokens",
        "parallel_tool_calls",
        "tools",
        "tool_choice",
        "top_logprobs",
        "response_format",
        "functions",
        "store",
        "audio",
    ]
    assert completion(**dict.fromkeys(offered + only_completion)).job.params == completion().job.params
    assert chat(**dict.fromkeys(offered + only_chat)).job.params == chat().job.params
    assert completion(stream=True, stream_options={"include_usage": None}).include_usage is False


def test_neutral_values_of_what_is_not_offered_are_accepted() -> None:
    both = {"top_p": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "top_k": -1, "user": "me", "n": 1}
    assert completion(**both, echo=False, best_of=1).job.params == completion().job.params
    extra = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False, "store": False}
    assert chat(**both, **extra).job.params == chat().job.params
    answered: dict[str, Any] = {
        "role": "assistant",
        "content": "4",
        "refusal": None,
        "tool_calls": None,
        "function_call": None,
        "annotations": [],
    }
    assert chat(messages=[*CHAT["messages"], answered]).job.messages[1] == {"role": "assistant", "content": "4"}


def test_what_shapes_the_distribution_reaches_the_parameters() -> None:
    asked: dict[str, Any] = {
        "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": -1, "frequency_penalty": 2, "repetition_penalty": 1.1,
        "min_tokens": 3, "logit_bias": {"7": 1, "5": -100.0}, "stop_token_ids": [9, 8, 9],
    }  # fmt: skip
    for call in (completion(**asked), chat(**asked)):
        params = call.job.params
        assert params.logit_bias == ((5, -100.0), (7, 1))
        assert params.stop_token_ids == (8, 9)
        for name in asked.keys() - {"logit_bias", "stop_token_ids"}:
            assert getattr(params, name) == asked[name]


def test_defaults_are_openais() -> None:
    params = completion().job.params
    assert (params.max_tokens, params.temperature, params.n, params.seed, params.stop) == (16, 1.0, 1, None, ())
    assert chat().job.params.max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]), ("", [""])]
)
def test_a_prompt_comes_in_four_forms(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).job.prompts == prompts


def test_chat_content_comes_as_text_or_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat(messages=[{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}])
    assert call.job.messages == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "a\nb"}]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


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


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        *((CompletionBody, COMPLETION | {"prompt": prompt}) for prompt in ([1, "a", "a"], ["a", 1, 1], [[1], [], []], [[1, "a", "a"]])),
        *((CompletionBody, COMPLETION | {name: ["a", [], []]}) for name in ("stop", "stop_token_ids")),
        *((ChatBody, CHAT | {name: [5, 5]}) for name in ("messages", "tools")),
        (ChatBody, {"model": "M", "messages": [{"role": "user", "content": [5, 5]}]}),
        (ChatBody, {"model": "M", "messages": [{"role": "assistant", "tool_calls": [5, 5]}]}),
        (TokenizeBody, CHAT | {"messages": [5, 5]}),
        (DetokenizeBody, {"model": "M", "tokens": ["a", "a"]}),
    ],
)
def test_of_a_list_only_the_first_bad_item_is_looked_at(body: type[ModelBody], fields: Any) -> None:
    with pytest.raises(ValidationError) as invalid:
        body.model_validate(fields)
    assert invalid.value.error_count() == 1


def test_a_response_format_becomes_a_grammar() -> None:
    assert chat(response_format={"type": "json_object"}).job.params.grammar == json_object()
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True, "description": "b"}}
    assert chat(response_format=wanted).job.params.grammar == json_schema(SCHEMA)
    assert chat(response_format={"type": "text"}).job.params.grammar is None
    for fields, param in (({"ignore_eos": True}, "ignore_eos"), ({"min_tokens": 1}, "min_tokens"), ({"tools": [TOOL]}, "response_format")):
        with pytest.raises(RequestFailed) as refused:
            chat(response_format=wanted, **fields)
        assert refused.value.failure.param == param


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


def test_a_conversation_with_calls_reaches_the_template() -> None:
    said = [
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "content": "5", "tool_call_id": "a"},
    ]
    assert chat(messages=[*CHAT["messages"], *said]).job.messages[1:] == [{**said[0], "content": ""}, said[1]]


def test_logprobs_are_asked_for_in_two_ways() -> None:
    assert completion(logprobs=3).job.params.logprobs == 3
    assert completion(logprobs=3).job.params.prompt_logprobs is None
    assert completion(logprobs=3, echo=True).job.params.prompt_logprobs == 3
    assert (completion(echo=True).job.echo, completion(echo=True).job.params.prompt_logprobs) == (True, None)
    assert chat(logprobs=True).job.params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).job.params.logprobs == 20
    assert chat(logprobs=False).job.params.logprobs is None


def test_the_extension() -> None:
    call = chat(hispec={"method": "plain", "trace": True})
    assert (call.job.method, call.job.trace, call.job.params.speculate) == ("plain", True, False)
    assert completion(hispec={"method": "hispec"}).job.params.speculate is True
    for value in ({"method": "vllm"}, {"trace": 1}, {"speed": 9}):
        with pytest.raises(RequestFailed) as refused:
            chat(hispec=value)
        assert refused.value.failure.param == f"hispec.{next(iter(value))}"


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


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_tools_parameters_are_an_objects(choice: str) -> None:
    for parameters in ({"type": "string"}, {"type": ["object"]}, {"type": None}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        with pytest.raises(RequestFailed, match="the type must be 'object'") as refused:
            chat(tools=[tool], tool_choice=choice)
        assert (refused.value.failure.status, refused.value.failure.param) == (400, "tools.function.parameters")


def test_tokens_are_asked_for() -> None:
    job = read_tokenize(json.dumps({"model": "M", "prompt": "a"}).encode(), "M")
    assert job == TokenizeJob("a", None, True, True, False)
    both: dict[str, Any] = {"prompt": "a", "messages": CHAT["messages"]}
    for fields in ({}, both, {"prompt": 5}, {"messages": []}, {"prompt": "a", "add_special_tokens": 1}):
        with pytest.raises(RequestFailed) as refused:
            read_tokenize(json.dumps({"model": "M"} | fields).encode(), "M")
        assert refused.value.failure.status == 400
    assert read_detokenize(b'{"model": "M", "tokens": [1, 2]}', "M") == [1, 2]
    with pytest.raises(RequestFailed):
        read_detokenize(b'{"model": "M", "tokens": [1.5]}', "M")


def test_the_two_names_of_the_chat_limit() -> None:
    assert chat(max_completion_tokens=5).job.params.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).job.params.max_tokens == 5
    with pytest.raises(RequestFailed, match="leave one out"):
        chat(max_completion_tokens=5, max_tokens=6)


def test_stop_comes_as_one_or_several() -> None:
    assert completion(stop="a").job.params.stop == ("a",)
    assert completion(stop=["a", "b"]).job.params.stop == ("a", "b")
    assert completion(stop=[]).job.params.stop == ()


def test_the_schemas_say_what_is_accepted() -> None:
    for body in (CompletionBody, ChatBody):
        properties = body.model_json_schema()["properties"]
        assert {"type": "number", "minimum": 0, "maximum": 2} in properties["temperature"]["anyOf"]
        assert {"type": "integer", "minimum": int(body is ChatBody)} in properties["max_tokens"]["anyOf"]
        (biases, _), (ids, _) = properties["logit_bias"]["anyOf"], properties["stop_token_ids"]["anyOf"]
        assert biases["maxProperties"] == ids["maxItems"] == 1024
        text, texts, _ = properties["stop"]["anyOf"]
        assert text["maxLength"] == texts["items"]["maxLength"] == 1024
