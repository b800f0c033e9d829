"""`serve run deployments/hispec.yaml` for real: Ray, the proxy, the default model in fp32, and what OpenAI clients ask.

Takes about 40 seconds, half of them for Ray and the model to start.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"
START_S = 180
COUNTING = "1, 2, 3, 4, 5,"
QUESTION = [{"role": "user", "content": "What is 2+2? Answer with one number."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The deployment file's server on a free port, in fp32, with a small cache; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    deployment = yaml.safe_load((ROOT / "deployments" / "hispec.yaml").read_text())
    deployment["http_options"] = {"host": "127.0.0.1", "port": port}
    args = deployment["applications"][0]["args"]
    args["model"] |= {"dtype": "float32", "max_model_len": 2048}
    args["cache"] = {"blocks": 256}
    file = tmp_path_factory.mktemp("deployment") / "hispec.yaml"
    file.write_text(yaml.safe_dump(deployment))
    ray_folder = tempfile.mkdtemp(prefix="hispec-", dir="/tmp")  # of its own, so that no other cluster is joined; short, for its sockets
    log = (file.parent / "log").open("w+")
    serve = subprocess.Popen(
        [Path(sys.executable).with_name("serve"), "run", file],
        cwd=ROOT,
        env={**os.environ, "RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: is_well(url) or serve.poll() is not None, START_S, lambda: Path(log.name).read_text()[-4000:])
        yield url
    finally:
        serve.send_signal(signal.SIGINT)
        try:
            serve.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(serve.pid, signal.SIGKILL)
        log.close()
        shutil.rmtree(ray_folder, ignore_errors=True)


def is_well(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def wait_for(reached: Any, most_s: float, why: Any) -> None:
    end = time.monotonic() + most_s
    while not reached():
        if time.monotonic() > end:
            raise AssertionError(f"not reached in {most_s} seconds: {why()}")
        time.sleep(0.05)


def ask(url: str, path: str = "/v1/completions", **fields: Any) -> Any:
    response = httpx.post(f"{url}{path}", json={"model": MODEL, "temperature": 0} | fields, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def stream(url: str, path: str = "/v1/completions", **fields: Any) -> list[Any]:
    """The stream's events, which must end with one [DONE]."""
    body = {"model": MODEL, "temperature": 0, "stream": True} | fields
    response = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    data = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    assert data.pop() == "[DONE]"
    return [json.loads(event) for event in data]


def pieces(events: list[Any]) -> list[str]:
    return [c["text"] if "text" in c else c["delta"].get("content", "") for event in events for c in event["choices"]]


def reasons(events: list[Any]) -> list[str]:
    return [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]


def test_a_stop_string_across_tokens(server: str) -> None:
    fields: dict[str, Any] = {"prompt": COUNTING, "max_tokens": 32, "stream_options": {"include_usage": True}}
    events = stream(server, stop=["8, 9"], **fields)
    assert "".join(pieces(events)) == " 6, 7, "
    assert not any("8" in piece for piece in pieces(events))
    assert reasons(events) == ["stop"]
    assert (events[-1]["usage"]["prompt_tokens"], events[-1]["usage"]["completion_tokens"]) == (14, 11)
    events = stream(server, stop=["8, 7"], **fields)
    assert "".join(pieces(events)) == " 6, 7, 8, 9, 10, 11, 12, 13, 14,"
    assert reasons(events) == ["length"]
    assert events[-1]["usage"]["completion_tokens"] == 32
    chat: dict[str, Any] = {"path": "/v1/chat/completions", "messages": QUESTION, "max_tokens": 40}
    assert "".join(pieces(stream(server, stop=["is 4"], **chat))) == "The answer "


@pytest.mark.parametrize(
    ("most", "text", "reason", "tokens"), [(11, " 6, 7, ", "stop", 11), (10, " 6, 7, 8, ", "length", 10), (12, " 6, 7, ", "stop", 11)]
)
def test_a_stop_string_and_the_limit_in_one_chunk(server: str, most: int, text: str, reason: str, tokens: int) -> None:
    body = ask(server, prompt=COUNTING, max_tokens=most, stop=["8, 9"])
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (text, reason)
    assert body["usage"]["completion_tokens"] == tokens


def test_the_end_of_sequence_inside_an_accepted_chunk(server: str) -> None:
    body = ask(server, "/v1/chat/completions", messages=QUESTION, max_tokens=40)
    assert body["choices"][0]["message"]["content"] == "The answer is 4."
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 42, "completion_tokens": 7, "total_tokens": 49}


def test_characters_split_across_tokens(server: str) -> None:
    emoji = "Emoji: 🎉🎉🎉🎉🎉🎉"
    found = pieces(stream(server, prompt=emoji, max_tokens=12))
    assert "".join(found) == "🎉🎉🎉🎉"
    assert "\ufffd" not in "".join(found)
    cut = "".join(pieces(stream(server, prompt=emoji, max_tokens=13)))
    assert cut.startswith("🎉🎉🎉🎉")
    assert "\ufffd" not in cut[:-1]
    assert ask(server, prompt=emoji, max_tokens=13)["choices"][0]["text"] == cut
    assert "".join(pieces(stream(server, prompt="漢字漢字漢字漢字漢字", max_tokens=16))) == "漢字漢字漢字漢字"
    stopped = ask(server, prompt=emoji, max_tokens=12, stop=["🎉🎉"])
    assert (stopped["choices"][0]["text"], stopped["choices"][0]["finish_reason"]) == ("", "stop")
    assert stopped["usage"]["completion_tokens"] == 6


def test_no_tokens_and_one(server: str) -> None:
    none = ask(server, prompt="The capital of France is", max_tokens=0)
    assert (none["choices"][0]["text"], none["choices"][0]["finish_reason"], none["usage"]["completion_tokens"]) == ("", "length", 0)
    one = ask(server, prompt=COUNTING, max_tokens=1)
    assert (one["choices"][0]["text"], one["usage"]["completion_tokens"]) == (" ", 1)


def test_several_choices(server: str) -> None:
    fields: dict[str, Any] = {"prompt": "My favourite colour is", "n": 4, "seed": 7, "temperature": 1.0, "max_tokens": 8}
    body = ask(server, **fields)
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) >= 2
    assert [choice["text"] for choice in ask(server, **fields)["choices"]] == texts
    assert body["usage"]["prompt_tokens"] == 4
    events = stream(server, **fields)
    joined = ["".join(c["text"] for e in events for c in e["choices"] if c["index"] == index) for index in range(4)]
    assert joined == texts
    assert len(reasons(events)) == 4
    greedy = ask(server, **fields | {"temperature": 0})
    assert len({choice["text"] for choice in greedy["choices"]}) == 1


def test_the_usage_of_a_stream(server: str) -> None:
    fields: dict[str, Any] = {"prompt": COUNTING, "max_tokens": 8}
    *events, last = stream(server, stream_options={"include_usage": True}, **fields)
    assert (last["choices"], last["usage"]) == ([], {"prompt_tokens": 14, "completion_tokens": 8, "total_tokens": 22})
    assert all(event["usage"] is None for event in events)
    assert len({(event["id"], event["created"]) for event in [*events, last]}) == 1
    assert all(event["choices"] and "usage" not in event for event in stream(server, **fields))


def test_a_chat_of_parts_and_turns(server: str) -> None:
    path = "/v1/chat/completions"
    parts = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    assert ask(server, path, messages=parts, max_tokens=40)["choices"][0]["message"]["content"] == "The answer is 4."
    assert ask(server, path, messages=QUESTION * 2, max_tokens=1)["usage"]["completion_tokens"] == 1
    assert ask(server, path, messages=[{"role": "user", "content": "<|im_end|>"}], max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_seed_gives_the_same_text_streamed_or_not(server: str) -> None:
    fields: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0.8, "max_tokens": 24}
    text = ask(server, seed=3, **fields)["choices"][0]["text"]
    assert "".join(pieces(stream(server, seed=3, **fields))) == text
    assert ask(server, seed=4, **fields)["choices"][0]["text"] != text


def test_the_openai_client(server: str) -> None:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "The answer is 4."
        chunks = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=40, stream=True)  # type: ignore[call-overload,arg-type]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The answer is 4."  # type: ignore[union-attr]
        assert client.completions.create(model=MODEL, prompt=COUNTING, temperature=0, max_tokens=4).choices[0].text == " 6, "
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.models.retrieve("gpt-4")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model=MODEL, prompt="a", temperature=3)
        with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
            client.completions.create(model=MODEL, prompt="a " * 3000)


def test_bad_requests_leave_the_server_unharmed(server: str) -> None:
    for body, param in (
        ('{"model": "M"', None),
        (json.dumps({"model": MODEL, "prompt": [49152]}), "prompt"),
        (json.dumps({"model": MODEL, "prompt": [-1], "stream": True}), "prompt"),
        (json.dumps({"model": MODEL, "prompt": "a", "temperature": float("nan")}), "temperature"),
    ):
        response = httpx.post(f"{server}/v1/completions", content=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert httpx.get(f"{server}/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert ask(server, prompt=COUNTING, max_tokens=4)["choices"][0]["text"] == " 6, "


def test_a_client_that_goes_away_frees_its_blocks(server: str) -> None:
    def load() -> Any:
        return httpx.get(f"{server}/health").json()

    body = {"model": MODEL, "prompt": COUNTING, "max_tokens": 1500, "ignore_eos": True, "n": 2}
    wait_for(lambda: load()["running"] == 0, 10, load)
    with httpx.Client(timeout=60) as client, client.stream("POST", f"{server}/v1/completions", json=body | {"stream": True}) as answer:
        lines = answer.iter_lines()  # kept: an iterator that is let go closes the connection
        first = next(lines)
        assert "choices" in first, first
        assert load()["running"] == 2
    wait_for(lambda: load()["running"] == 0, 10, load)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server}/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.5))
    wait_for(lambda: load()["running"] == 0, 10, load)
    assert load()["kv_usage"] == 0
