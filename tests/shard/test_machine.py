"""Machines: described in a few characters, and how much memory a process may take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hispec_ray.shard.gpus import Gpu
from hispec_ray.shard.machine import Machine, described, free_memory, in_gib, this_machine

GIB = 2**30


def test_a_described_cluster_has_what_it_says() -> None:
    two = described("2x4x80GiB")
    assert [machine.name for machine in two] == ["node 1", "node 2"]
    assert all([gpu.free_bytes for gpu in machine.gpus] == [80 * GIB] * 4 for machine in two)
    assert two[0].resources() == {"CPU": 4, "GPU": 4}
    small = described("3 x 2cpu x 16 GiB")
    assert [(machine.cpus, machine.memory_bytes, machine.gpus) for machine in small] == [(2, 16 * GIB, ())] * 3
    mixed = described("1x8x80gb+2x1cpux512MiB")
    assert [machine.resources() for machine in mixed] == [{"CPU": 8, "GPU": 8}, {"CPU": 1, "GPU": 0}, {"CPU": 1, "GPU": 0}]
    assert mixed[0].gpus[0].memory_bytes == 80 * 10**9
    assert mixed[2].memory_bytes == GIB // 2
    assert described("1x1x0.5GiB")[0].gpus[0].free_bytes == GIB // 2


@pytest.mark.parametrize(
    "text",
    ["", "2x4", "2x4x80", "2x4x80GiB+", "-1x4x80GiB", "2x4gpux80GiB", "2x4x80 gibberish", "1.5x2x3GiB", "２x４x80GiB", f"1x1x{9**99}GiB"],
)
def test_another_description_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(ValueError, match=r"^cluster is '.*'; it must be NODESxGPUSxMEMORY .*2x4x80GiB, or NODESxCPUScpuxMEMORY"):
        described(text)


@pytest.mark.parametrize("text", ["0x4x80GiB", "2x0x80GiB", "2x4x0GiB", "5000x1x80GiB", "1x65x80GiB"])
def test_a_description_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"it must have 1 to 1000 nodes of 1 to 64 devices, and memory"):
        described(text)


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 MiB"), (300 << 20, "300 MiB"), (GIB, "1.0 GiB"), (-8.06 * GIB, "-8.1 GiB"), (2000 * GIB, "2,000.0 GiB")],
)
def test_sizes_are_said_in_gib_or_mib(size: float, words: str) -> None:
    assert in_gib(size) == words


def test_this_machine_is_found() -> None:
    found = this_machine()
    assert found.cpus == len(os.sched_getaffinity(0))
    assert GIB // 8 < found.memory_bytes < 2**50
    assert found.problem == ""


def test_a_container_ends_before_the_machine_does(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    proc.write_text("MemTotal:       1000000 kB\nMemAvailable:    500000 kB\nHugePages_Total:       0\n")
    assert free_memory(proc, cgroup) == 500_000 * 1024
    cgroup.mkdir()
    (cgroup / "memory.current").write_text("90000000\n")
    (cgroup / "memory.stat").write_text("anon 40000000\ninactive_file 50000000\n")
    (cgroup / "memory.max").write_text("max\n")
    assert free_memory(proc, cgroup) == 500_000 * 1024
    (cgroup / "memory.max").write_text("100000000\n")
    assert free_memory(proc, cgroup) == 60_000_000
    (cgroup / "memory.max").write_text("10000000\n")
    assert free_memory(proc, cgroup) == 0


def test_a_gpu_that_does_not_answer_is_named_and_not_used() -> None:
    found = Machine("a", 8, GIB, (Gpu(0, "H100", "", 80, 80), Gpu(1, "", "", 0, 0, lost=True), Gpu(2, "H100", "", 80, 80, uncorrected=2)))
    assert found.resources() == {"CPU": 8, "GPU": 2}
    assert [gpu.index for gpu in found.usable_gpus()] == [0, 2]
    assert [fault[:5] for fault in found.faults()] == ["GPU 1", "GPU 2"]
