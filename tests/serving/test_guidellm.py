"""The load generator guidellm against a live server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hispec_ray.model.weights import ModelSource
from serving.live import COUNTING, MODEL, ask


@pytest.mark.slow
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
