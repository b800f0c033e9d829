"""Real clients against a live server: each reads what the server means, and what they send is understood.

Takes about a minute beside the server's start, most of it for the clients' own imports. Those that take seconds to import are imported by
the tests that use them.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import operator
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
import torch
from fake_engine import FakeEngine
from live import COUNTING, MODEL, QUESTION, ask
from pydantic import BaseModel

from hispec_ray.config import Settings
from hispec_ray.model.weights import ModelSource
from hispec_ray.serving.coordinator import Coordinator
from hispec_ray.serving.ingress import create_app
from hispec_ray.serving.keys import Keys

ANSWER = "The answer is 4."
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 40}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"], "additionalProperties": False},
    },
}
SUM = [{"role": "user", "content": "What is 2+2?"}]
NEXT_SUM = {"role": "user", "content": "What is 3+5?"}
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "London"]
    big: bool


# openai


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def chats(client: Any) -> Any:
    return client.chat.completions


def joined(chunks: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


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
        kinds = [event.type for event in events]
        streamed = events.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.delta") > 1
    assert kinds.count("tool_calls.function.arguments.done") == 1
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


# langchain


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


# litellm


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


# lm-eval

QUIZ = [
    {"text": "The capital of France is", "choices": ["London", "Paris", "Rome"], "gold": 1},
    {"text": "Two plus two is", "choices": ["four", "five"], "gold": 0},
    {"text": "1, 2, 3, 4,", "choices": ["5, 6", "7, 8", "two 🎉"], "gold": 0},
    {"text": "Monday, Tuesday,", "choices": ["Wednesday, Thursday", "Friday"], "gold": 0},
]


@pytest.fixture(scope="module")
def reference(default_source: ModelSource) -> tuple[Any, Any]:
    """The default model and its tokenizer in transformers, in fp32."""
    transformers = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(default_source.folder, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(default_source.folder)


@torch.inference_mode()
def scored(reference: tuple[Any, Any], text: str, choice: str) -> tuple[float, bool]:
    """The log-probability of a choice behind a text, and whether it is what greedy decoding writes."""
    model, tokenizer = reference
    context, whole = (tokenizer.encode(part, add_special_tokens=False) for part in (text, f"{text} {choice}"))
    assert whole[: len(context)] == context
    rows = torch.log_softmax(model(torch.tensor([whole])).logits[0, len(context) - 1 : -1], -1)
    ids = torch.tensor(whole[len(context) :])
    return rows.gather(1, ids[:, None]).sum().item(), bool((rows.argmax(-1) == ids).all())


@torch.inference_mode()
def continued(reference: tuple[Any, Any], text: str, tokens: int, stop: str) -> str:
    """What greedy decoding writes behind a text, up to a stop string."""
    model, tokenizer = reference
    ids = tokenizer(text, return_tensors="pt")
    written = model.generate(**ids, max_new_tokens=tokens, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(written, skip_special_tokens=True)).partition(stop)[0]


def task(folder: Path, name: str, documents: list[dict[str, Any]], **fields: Any) -> str:
    """Write a task of lm-eval's and its documents into a folder; return its name."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    source = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    common = {"task": name, "dataset_path": "json", "dataset_kwargs": source, "test_split": "test", "doc_to_text": "{{text}}"}
    (folder / f"{name}.yaml").write_text(json.dumps(common | fields))  # JSON is YAML
    return name


def test_lm_eval_gets_the_scores_that_transformers_gives(server: str, default_source: ModelSource, reference: Any, tmp_path: Path) -> None:
    lm_eval, tasks = importlib.import_module("lm_eval"), importlib.import_module("lm_eval.tasks")
    texts = [{"text": COUNTING}, {"text": "My favourite colour is"}]
    written = [document | {"said": continued(reference, document["text"], 16, "8")} for document in texts]
    metric = {"aggregation": "mean", "higher_is_better": True}
    quiz = task(
        tmp_path,
        "quiz",
        QUIZ,
        output_type="multiple_choice",
        doc_to_choice="{{choices}}",
        doc_to_target="gold",
        metric_list=[{"metric": name} | metric for name in ("acc", "acc_norm")],
    )
    words = task(
        tmp_path,
        "words",
        written,
        output_type="generate_until",
        doc_to_target="{{said}}",
        generation_kwargs={"until": ["8"], "max_gen_toks": 16},
        metric_list=[{"metric": "exact_match"} | metric],
    )
    where = {"model": MODEL, "base_url": f"{server}/v1/completions"}
    found = lm_eval.simple_evaluate(
        "local-completions",
        where | {"tokenizer": str(default_source.folder), "tokenizer_backend": "huggingface"},
        tasks=[quiz, words],
        batch_size=4,
        bootstrap_iters=0,
        task_manager=tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
    )
    best, best_for_its_length = 0, 0
    for sample, document in zip(found["samples"]["quiz"], QUIZ, strict=True):
        expected = [scored(reference, document["text"], choice) for choice in document["choices"]]
        assert [greedy for _, greedy in sample["filtered_resps"]] == [greedy for _, greedy in expected]
        for (score, _), (right, _) in zip(sample["filtered_resps"], expected, strict=True):
            assert math.isclose(score, right, abs_tol=0.02)
        scores = [score for score, _ in expected]
        shares = [score / len(choice) for score, choice in zip(scores, document["choices"], strict=True)]
        best += scores.index(max(scores)) == document["gold"]
        best_for_its_length += shares.index(max(shares)) == document["gold"]
    assert found["results"]["quiz"]["acc,none"] == best / len(QUIZ)
    assert found["results"]["quiz"]["acc_norm,none"] == best_for_its_length / len(QUIZ)
    assert [sample["filtered_resps"] for sample in found["samples"]["words"]] == [[document["said"]] for document in written]
    assert found["results"]["words"]["exact_match,none"] == 1


# guidellm


def test_guidellm_measures_the_server(server: str, default_source: ModelSource, tmp_path: Path) -> None:
    report, data = tmp_path / "report.json", tmp_path / "prompts.jsonl"
    prompts = ["What is 2+2?", "Name a colour.", COUNTING, "Who wrote Hamlet?"]
    data.write_text("".join(json.dumps({"prompt": prompt, "output_tokens_count": 8}) + "\n" for prompt in prompts))
    options = {
        "backend": f"kind=openai_http,target={server},model={MODEL},extras.body.temperature=0",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=4",
        "tokenizer": f"kind=huggingface_auto,model={default_source.folder}",
        "data": f"kind=json_file,path={data}",
        "output": f"kind=json,path={report}",
    }
    program = str(Path(sys.executable).with_name("guidellm"))
    command = [program, "run", "--disable-console", *[f"--{name}={value}" for name, value in options.items()]]
    places = {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    run = subprocess.run(command, cwd=tmp_path, env=os.environ | places, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    (measured,) = json.loads(report.read_text())["benchmarks"]
    state = measured["scheduler_state"]
    assert (state["successful_requests"], state["errored_requests"], state["cancelled_requests"]) == (4, 0, 0)
    texts = {}
    for prompt in prompts:
        answer = ask(server, "/v1/chat/completions", messages=[{"role": "user", "content": prompt}], max_tokens=8, ignore_eos=True)
        texts[prompt] = answer["choices"][0]["message"]["content"]
    kept = measured["requests"]["successful"]  # it may leave the last one out, as part of a cooldown
    assert kept
    for request in kept:
        sent = json.loads(request["request_args"])["body"]["messages"][0]["content"][0]["text"]
        assert (request["output"], request["output_tokens"]) == (texts[sent], 8)
        assert 0 < request["time_to_first_token_ms"] <= 1000 * request["request_latency"]
