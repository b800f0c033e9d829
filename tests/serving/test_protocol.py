"""What a request may say: every bad value is refused with the name of its field, every neutral one is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from hispec_ray.serving.bodies import ChatBody, CompletionBody, DetokenizeBody, ModelBody, TokenizeBody
from hispec_ray.serving.failures import RequestFailed
from hispec_ray.serving.protocol import (
    read_chat,
    read_completion,
    read_detokenize,
    read_tokenize,
)
from hispec_ray.serving.wire import TokenizeJob
from serving.bodies import CHAT, COMPLETION, NAMED, NAN, TOOL, chat, completion

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
