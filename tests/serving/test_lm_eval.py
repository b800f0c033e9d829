"""EleutherAI's evaluation harness against a live server, held against transformers."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hispec_ray.model.weights import ModelSource
from serving.live import COUNTING, MODEL

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
def scored(reference: tuple[Any, Any], text: str, choice: str) -> tuple[float, bool, int]:
    """The log-probability of a choice behind a text, whether it is what greedy decoding writes, and its tokens."""
    model, tokenizer = reference
    context, whole = (tokenizer.encode(part, add_special_tokens=False) for part in (text, f"{text} {choice}"))
    assert whole[: len(context)] == context
    rows = torch.log_softmax(model(torch.tensor([whole])).logits[0, len(context) - 1 : -1], -1)
    ids = torch.tensor(whole[len(context) :])
    return rows.gather(1, ids[:, None]).sum().item(), bool((rows.argmax(-1) == ids).all()), len(ids)


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
        assert [greedy for _, greedy in sample["filtered_resps"]] == [greedy for _, greedy, _ in expected]
        for (score, _), (right, _, tokens) in zip(sample["filtered_resps"], expected, strict=True):
            assert math.isclose(score, right, abs_tol=1e-3 * tokens)
        scores = [score for score, *_ in expected]
        shares = [score / len(choice) for score, choice in zip(scores, document["choices"], strict=True)]
        best += scores.index(max(scores)) == document["gold"]
        best_for_its_length += shares.index(max(shares)) == document["gold"]
    assert found["results"]["quiz"]["acc,none"] == best / len(QUIZ)
    assert found["results"]["quiz"]["acc_norm,none"] == best_for_its_length / len(QUIZ)
    assert [sample["filtered_resps"] for sample in found["samples"]["words"]] == [[document["said"]] for document in written]
    assert found["results"]["words"]["exact_match,none"] == 1
