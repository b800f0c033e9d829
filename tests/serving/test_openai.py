"""OpenAI's own client against a live server, and against one that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from hispec_ray.config import Settings
from hispec_ray.serving.coordinator import Coordinator
from hispec_ray.serving.ingress import create_app
from hispec_ray.serving.keys import Keys
from serving.clients import ADD, ANSWER, CAPITAL, GREEDY, NEXT_SUM, SUM, City, joined
from serving.fake_engine import FakeEngine
from serving.live import COUNTING, MODEL, QUESTION, ask


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def chats(client: Any) -> Any:
    return client.chat.completions


def test_openai_reads_the_models(client: Any) -> None:
    (model,) = client.models.list()
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model
    answer = client.models.with_raw_response.list()
    assert (answer.http_response.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert [model.id for model in answer.parse()] == [MODEL]


def test_openai_reads_a_chat_whole_and_streamed(chats: Any) -> None:
    whole = chats.create(messages=QUESTION, **GREEDY)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (ANSWER, "stop")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (42, 7)
    *chunks, last = chats.create(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY)
    assert joined(chunks) == ANSWER
    assert (chunks[0].choices[0].delta.role, chunks[-1].choices[0].finish_reason) == ("assistant", "stop")
    assert (last.choices, last.usage) == ([], whole.usage)
    raw = chats.with_raw_response.create(messages=QUESTION, **GREEDY)
    assert raw.request_id
    assert raw.parse().choices == whole.choices


def test_openai_reads_several_answers_at_a_time(server: str) -> None:
    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120) as client:

            async def whole() -> str:
                return (await client.chat.completions.create(messages=QUESTION, **GREEDY)).choices[0].message.content or ""

            async def streamed() -> str:
                chunks = await client.chat.completions.create(messages=QUESTION, stream=True, **GREEDY)
                return joined([chunk async for chunk in chunks])

            return await asyncio.gather(whole(), streamed(), whole(), streamed())

    assert asyncio.run(together()) == [ANSWER] * 4


def test_openai_reads_several_choices_and_stops(client: Any, server: str) -> None:
    prompts = ["My favourite colour is", COUNTING]
    fields: dict[str, Any] = {"prompt": prompts, "n": 2, "seed": 7, "temperature": 1, "max_tokens": 8, "stop": ["."]}
    whole = client.completions.create(model=MODEL, **fields)
    texts = [choice.text for choice in whole.choices]
    assert texts == [choice["text"] for choice in ask(server, **fields)["choices"]]
    assert not any("." in text for text in texts)
    parts: dict[int, str] = {}
    for chunk in client.completions.create(model=MODEL, stream=True, **fields):
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + choice.text
    assert [parts[index] for index in range(4)] == texts
    counted = client.completions.create(model=MODEL, prompt=COUNTING, max_tokens=32, temperature=0, stop=["8, 9", "12"])
    assert (counted.choices[0].text, counted.choices[0].finish_reason) == (" 6, 7, ", "stop")


def test_openai_reads_the_log_probabilities_of_a_completion(client: Any) -> None:
    choice = client.completions.create(model=MODEL, prompt=COUNTING, max_tokens=3, temperature=0, echo=True, logprobs=2).choices[0]
    lists = choice.logprobs
    assert choice.text == "".join(lists.tokens) == f"{COUNTING} 6,"
    assert [choice.text[at:].startswith(token) for token, at in zip(lists.tokens, lists.text_offset, strict=True)] == [True] * 17
    (first, none, empty), *others = zip(lists.tokens, lists.token_logprobs, lists.top_logprobs, strict=True)
    assert (first, none, empty) == ("1", None, None)
    assert all(top[token] == value <= max(top.values()) < 0 for token, value, top in others)


def test_openai_reads_the_log_probabilities_of_a_chat(chats: Any) -> None:
    fields: dict[str, Any] = {"messages": QUESTION, "logprobs": True, "top_logprobs": 3, **GREEDY}
    choice = chats.create(**fields).choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == choice.message.content
    assert all(entry.logprob == max(top.logprob for top in entry.top_logprobs) and len(entry.top_logprobs) == 3 for entry in content)
    parts = [chunk.choices[0] for chunk in chats.create(stream=True, **fields)]
    assert [entry for part in parts if part.logprobs for entry in part.logprobs.content] == content


@pytest.mark.parametrize(("choice", "reason"), [({"type": "function", "function": {"name": "add"}}, "stop"), ("required", "tool_calls")])
def test_openai_reads_calls_that_must_be(chats: Any, choice: Any, reason: str) -> None:
    asked = {"messages": SUM, "tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False}
    fields: dict[str, Any] = GREEDY | asked | {"max_tokens": 60}
    whole = chats.create(**fields).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content, call.type, call.function.name) == (reason, None, "function", "add")
    assert json.loads(call.function.arguments) == {"a": 2, "b": 2}
    with chats.stream(**fields) as events:
        seen = list(events)
        streamed = events.get_final_completion().choices[0]
    parts = [event.arguments_delta for event in seen if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(parts) == call.function.arguments  # in as many parts as there were rounds, which may be one
    assert [event.type for event in seen].count("tool_calls.function.arguments.done") == 1
    (same,) = streamed.message.tool_calls
    assert (streamed.finish_reason, same.function.name, same.function.arguments) == (reason, "add", call.function.arguments)
    assert same.id.startswith("call_")


def test_openai_sends_results_back_and_reads_the_next_call(chats: Any) -> None:
    fields: dict[str, Any] = GREEDY | {"tools": [ADD], "max_tokens": 60}
    first = chats.create(messages=SUM, tool_choice={"type": "function", "function": {"name": "add"}}, **fields).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "4"}
    said = [*SUM, first, result, NEXT_SUM]
    second = chats.create(messages=said, **fields).choices[0]  # auto: the model itself calls again
    assert second.finish_reason == "tool_calls"
    assert json.loads(second.message.tool_calls[0].function.arguments) == {"a": 3, "b": 5}
    for form in (second.message.model_dump(), second.message.model_dump(exclude_none=True)):
        result = {"role": "tool", "tool_call_id": second.message.tool_calls[0].id, "content": [{"type": "text", "text": "8"}]}
        last = chats.create(messages=[*said, form, result], tool_choice="none", **fields | {"max_tokens": 4}).choices[0]
        assert last.message.content
        assert last.message.tool_calls is None


def test_openai_reads_an_answer_of_a_model_class(chats: Any) -> None:
    whole = chats.parse(messages=CAPITAL, response_format=City, **GREEDY).choices[0]
    assert isinstance(whole.message.parsed, City)
    with chats.stream(messages=CAPITAL, response_format=City, **GREEDY) as events:
        done = [event for event in events if event.type == "content.done"]
        assert [event.parsed for event in done] == [whole.message.parsed]
        assert events.get_final_completion().choices[0].message.content == whole.message.content
    schema = {"name": "city", "strict": True, "schema": City.model_json_schema()}
    plain = chats.create(messages=CAPITAL, response_format={"type": "json_schema", "json_schema": schema}, **GREEDY).choices[0]
    assert City.model_validate_json(plain.message.content) == whole.message.parsed
    tool = openai.pydantic_function_tool(City)
    called = chats.parse(messages=CAPITAL, tools=[tool], tool_choice="required", parallel_tool_calls=False, **GREEDY | {"max_tokens": 60})
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, City)


def test_openai_raises_its_own_exceptions(client: Any) -> None:
    for fields, param, code in (
        ({"temperature": 3}, "temperature", None),
        ({"prompt": "a " * 3000}, "prompt", "context_length_exceeded"),
        ({"extra_body": {"best": 1}}, "best", "unknown_parameter"),
        ({"temperature": 3, "stream": True}, "temperature", None),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**{"model": MODEL, "prompt": "a", "max_tokens": 1} | fields)
        assert (refused.value.param, refused.value.code, refused.value.type) == (param, code, "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
        client.chat.completions.create(messages=QUESTION, **GREEDY | {"model": "gpt-4"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="a")
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(messages=CAPITAL, response_format=City, **GREEDY | {"max_tokens": 2})


def failing(engine: FakeEngine, most: int = 10_000, key: str = "right", **fields: Any) -> None:
    """Ask a server in this process, whose engine fails, with the key "right"."""

    async def request() -> None:
        app = create_app(Coordinator(Settings(), load=lambda settings: engine), MODEL, most, Keys(["right"]))
        transport = httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False))
        async with openai.AsyncOpenAI(base_url="http://server/v1", api_key=key, max_retries=0, http_client=transport) as client:
            answer = await client.completions.create(model=MODEL, prompt="a", **fields)
            if fields.get("stream"):
                async for _ in answer:
                    pass

    asyncio.run(request())


def test_openai_raises_its_own_exceptions_where_the_server_fails() -> None:
    full, dead, dying = FakeEngine(), FakeEngine(), FakeEngine()
    full.full, dead.closed, dying.dies_after = True, True, 1
    failing(FakeEngine(), stream=True)
    with pytest.raises(openai.AuthenticationError):
        failing(FakeEngine(), key="wrong")
    with pytest.raises(openai.APIStatusError, match="larger than 10 bytes") as large:
        failing(FakeEngine(), most=10)
    assert large.value.status_code == 413
    with pytest.raises(openai.RateLimitError):
        failing(full)
    for streamed in (False, True):
        with pytest.raises(openai.InternalServerError) as gone:
            failing(dead, stream=streamed)
        assert gone.value.status_code == 503
    with pytest.raises(openai.APIError, match="had an error while answering"):  # amid the stream, where no status can tell
        failing(dying, stream=True)
