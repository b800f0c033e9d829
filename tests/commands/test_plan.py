"""`hispec plan`: the table, the verdict and one piece of advice, for described clusters and models that are not here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from shared import Run

from hispec_ray.model import weights
from hispec_ray.shard import machine
from hispec_ray.shard.gpus import Gpu
from hispec_ray.shard.machine import Machine

GIB = 2**30
SEVENTY = {
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
    "intermediate_size": 28672, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def seventy(tmp_path: Path) -> Path:
    """A model of which there is a config alone."""
    folder = tmp_path / "seventy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SEVENTY))
    return folder


def deployment(path: Path, **args: Any) -> Path:
    path.write_text(yaml.safe_dump({"applications": [{"import_path": "hispec_ray.serving.app:build", "args": args}]}))
    return path


def lines(out: str) -> dict[str, str]:
    """What stands below the table, by label."""
    return dict(re.findall(r"^(cache|sequences|fits|instead|warning) +(.*)$", out, re.MULTILINE))


def test_a_deployment_on_two_nodes_is_a_table(hispec: Run, seventy: Path, tmp_path: Path) -> None:
    stages = [{"layers": 20, "tp": 4}, {"layers": 60, "tp": 4}]
    speculation = {"exits": {"draft": 10, "check": 20}}
    file = deployment(
        tmp_path / "70b.yaml", model={"path": str(seventy), "device": "cuda"}, speculation=speculation, parallel={"stages": stages}
    )
    status, out, err = hispec("plan", file, "--cluster", "2x4x80GiB")
    assert (status, err) == (0, "")
    assert out.startswith(
        f"{seventy} in bfloat16, hispec (draft 10, check 20, full 80 layers)\non 2 nodes with 8 GPUs, 640.0 GiB of their memory"
    )
    rows = re.findall(
        r"^ +(\d) +(\d+-\d+) +(\d) +(node \d) +(GPU \d) +([\d.]+) GiB +([\d,]+) +([\d.]+) GiB +([\d.]+) GiB$", out, re.MULTILINE
    )
    assert [row[:5] for row in rows] == [
        (str(stage), ("0-19", "20-79")[stage], str(rank), f"node {stage + 1}", f"GPU {rank}") for stage in (0, 1) for rank in range(4)
    ]
    assert {row[6] for row in rows} == {"53,928"}
    assert [row[5] for row in rows] == ["8.2"] * 4 + ["24.0"] * 4
    assert all(79.9 < float(row[5]) + float(row[7]) + float(row[8]) < 80.1 for row in rows)
    assert lines(out) == {
        "cache": "862,848 tokens: 53,928 blocks of 16 on every rank",
        "sequences": "210 of 4,096 tokens at a time (the longest there may be), 842 of 1,024; scheduler.max_sequences is 16",
        "fits": "yes",
    }


def test_without_a_layout_the_smallest_is_shown(hispec: Run, seventy: Path) -> None:
    status, out, _ = hispec("plan", "--model", seventy / "config.json", "--cluster", "2x4x80GiB", "--typical", 4000)
    assert status == 0
    assert lines(out)["fits"] == "yes; the smallest layout that does: --stages 80:2, in a file parallel: {stages: [{layers: 80, tp: 2}]}"
    assert "21 of 4,096 tokens at a time (the longest there may be), 21 of 4,000" in lines(out)["sequences"]


def test_what_does_not_fit_has_the_numbers_and_one_way_out(hispec: Run, seventy: Path) -> None:
    model = ("plan", "--model", seventy)
    status, out, _ = hispec(*model, "--cluster", "2x4x24GiB", "--tp", 4)
    assert status == 1
    assert "-8.1 GiB" in out
    assert lines(out)["fits"].startswith("no: node 1, GPU 0: no room for a cache: of the 24.0 GiB free on the GPU the weights take 32.1")
    assert lines(out)["instead"] == (
        "--stages 40:3,40:3, in a file parallel: {stages: [{layers: 40, tp: 3}, {layers: 40, tp: 3}]} fits, the smallest of those tried"
    )
    status, out, _ = hispec(*model, "--cluster", "1x2x24GiB", "--tp", 8)
    assert status == 1
    assert lines(out) == {
        "fits": "no: parallel.stages.0.tp is 8 and each rank takes 1 CPU, 1 GPU; stages of 8 ranks do not fit into this cluster, "
        "whose nodes have 2 CPU, 2 GPU",
        "instead": "a larger cluster: the weights alone take 128.5 GiB",
    }
    _, out, _ = hispec(*model, "--cluster", "1x2x24GiB", "--dtype", "float32")
    assert lines(out)["instead"] == "a larger cluster: the weights alone take 257.0 GiB, half of that in bfloat16"


def test_a_cache_that_is_too_small_for_the_longest_is_said(hispec: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(SEVENTY | {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 131072})
    )
    status, out, _ = hispec("plan", "--model", config, "--cluster", "1x1x32GiB")
    assert status == 0
    found = lines(out)
    assert found["fits"].startswith("yes, with sequences of up to ")
    assert found["sequences"].startswith("none of 131,072 tokens at a time")
    assert re.fullmatch(r"model.max_model_len: \d+ is what the cache holds; longer requests are refused", found["instead"])
    _, out, _ = hispec("plan", "--model", config, "--cluster", "1x8cpux64GiB")
    assert lines(out)["instead"] == "cache.memory_gib: 16.00 (of each process) holds a sequence of 131,072 tokens"


def test_no_weights_are_read(hispec: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "safe_open", None)
    monkeypatch.setattr(weights, "snapshot_download", None)
    status, out, _ = hispec("plan", "--model", tiny_folder, "--cluster", "1x2cpux1GiB", "--stages", "4:1,4:1", "--dtype", "float32")
    assert (status, lines(out)["fits"]) == (1, "no: node 1 has 1.0 GiB free; weights and cache take 2.0 GiB there")


def test_of_a_hub_id_the_config_alone_is_fetched(hispec: Run, seventy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(*names: str) -> str:
        asked.append(names)
        return str(seventy / "config.json")

    monkeypatch.setattr(weights, "hf_hub_download", fetch)
    status, out, _ = hispec("plan", "--model", "somebody/seventy", "--cluster", "2x4x80GiB")
    assert (status, asked) == (0, [("somebody/seventy", "config.json")])
    assert out.startswith("somebody/seventy in bfloat16")


def test_this_machine_is_planned_for_where_no_other_is_named(hispec: Run, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = hispec("plan", "--model", tiny_folder, "--max-model-len", 128)
    assert status == 0
    assert re.search(r"^on 1 node with \d+ CPUs?, .* of memory free$", out, re.MULTILINE)
    assert lines(out)["fits"] == "yes; the smallest layout that does: one process with all layers"
    cards = (Gpu(0, "A100", "", 8 * GIB, 8 * GIB, uncorrected=3), Gpu(1, "A100", "", 8 * GIB, 8 * GIB))
    monkeypatch.setattr(machine, "this_machine", lambda: Machine("here", 8, GIB, cards))
    status, out, _ = hispec("plan", "--model", tiny_folder)
    assert status == 0
    assert re.search(r"^ +0 +0-7 +0 +here +GPU 0 ", out, re.MULTILINE)
    assert lines(out)["warning"] == "here: GPU 0 (A100): 3 uncorrected memory errors since the driver was loaded"
    file = deployment(Path(tiny_folder).parent / "cpu.yaml", model={"path": str(tiny_folder)})  # which a server would run on the CPU
    assert re.search(r"^ +0 +0-7 +0 +here +every core ", hispec("plan", file)[1], re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--stages", "10:2,70:2"],
            "parallel.stages.0.layers is 10; drafting and checking never leave the first stage, so it must be from 20",
        ),
        (["--stages", "80"], "stages is '80'; it must be LAYERS:TP for each stage with commas between them, for example 20:4,60:4"),
        (["--stages", "0:2"], "parallel.stages.0.layers is 0; it must be greater than or equal to 1"),
        (["--stages", f"{'9' * 5000}:2"], "stages is '"),
        (["--tp", "0"], "parallel.stages.0.tp is 0; it must be greater than or equal to 1\n"),
        (["--stages", "80:2", "--tp", "2"], "stages is '80:2' and tp is 2; give one of them"),
        (["--tp", "65"], "parallel.stages.0.tp is 65; it must be from 1 to 64 for this model"),
        (["--cluster", "two"], "cluster is 'two'; it must be NODESxGPUSxMEMORY"),
        (["--cluster", "1x2cpux8GiB", "--device", "cuda"], "model.device is 'cuda' and no node of the cluster has a GPU"),
        (["--device", "cpu"], "model.device is 'cpu' and the cluster is described by its GPUs alone"),
        (["--max-model-len", "5000"], "model.max_model_len is 5000; for this model it must be from 1 to 4096"),
        (["--model", "/nowhere"], "model.path is '/nowhere': there is no such file or folder"),
        (["--address", "127.0.0.1:1", "--cluster", ""], "cluster is ''"),
    ],
)
def test_bad_input_is_one_line(hispec: Run, seventy: Path, options: list[str], message: str) -> None:
    status, out, err = hispec("plan", "--model", seventy, "--cluster", "2x4x80GiB", *options)
    assert (status, out) == (2, "")
    assert err.startswith(f"hispec: error: {message}")
    assert err.count("\n") == 1


def test_a_cluster_that_does_not_answer_is_one_line(hispec: Run, seventy: Path) -> None:
    for command in (["plan", "--model", seventy], ["doctor"]):
        status, out, err = hispec(*command, "--address", "127.0.0.1:1")
        assert (status, out) == (2, "")
        assert err.startswith("hispec: error: address is '127.0.0.1:1': no Ray cluster answers there (")
        assert err.count("\n") == 1
