"""What a machine has of what serving needs, and what is to be done where something is missing. Runs on any node; knows no Ray."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from hispec_ray.config import DEFAULT_MODEL
from hispec_ray.model.attention import flash_attention_reads_blocks, runs_flash_attention
from hispec_ray.model.weights import default_model_problem
from hispec_ray.native.library import NativeUnavailableError, cache_folder, load
from hispec_ray.shard.collectives import shared_memory_problem
from hispec_ray.shard.gpus import Gpu, faults
from hispec_ray.shard.machine import Machine, in_gib, this_machine

State = Literal["ok", "warning", "problem"]
_GIB = 2**30
_SHARED = Path("/dev/shm")
_PACKAGES = ("hispec-ray", "ray", "torch", "transformers")
"""Of which all nodes should have the same release."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. state: a warning costs speed or a part of what is offered, with a problem there is no serving."""

    state: State
    topic: str
    words: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a machine says of itself. releases: of packages, empty where one is not installed."""

    machine: Machine
    findings: tuple[Finding, ...]
    releases: dict[str, str]


def checkup() -> Report:
    """Look at this machine. Builds what is compiled at first use, which takes a minute or two where that has not been done."""
    machine = this_machine()
    findings = [*_processor(machine), *_gpus(machine), *_software(machine), *_folders()]
    return Report(machine, tuple(findings), {name: _release(name) for name in _PACKAGES})


def differences(reports: Sequence[Report]) -> list[Finding]:
    """Return what differs between nodes that should be alike: releases of packages."""
    found = []
    for name in _PACKAGES:
        releases: dict[str, list[str]] = {}
        for report in reports:
            releases.setdefault(report.releases[name] or "none", []).append(report.machine.name)
        if len(releases) > 1:
            words = "; ".join(f"{release} on {', '.join(nodes)}" for release, nodes in sorted(releases.items()))
            found.append(Finding("problem", name, f"nodes have different releases: {words}; install one of them everywhere"))
    return found


def _release(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _processor(machine: Machine) -> Iterator[Finding]:
    yield Finding("ok", "processor", f"{machine.cpus} cores for this process, {platform.machine()}")
    yield Finding("ok", "memory", f"{in_gib(machine.memory_bytes)} free")


def _gpus(machine: Machine) -> Iterator[Finding]:
    if not machine.gpus:
        yield Finding("ok", "GPUs", "none that NVML knows of; models run on the CPUs")
    for gpu in machine.gpus:
        fault = faults(gpu)
        memory = f"{in_gib(gpu.free_bytes)} of {in_gib(gpu.memory_bytes)} free" if gpu.memory_bytes else "memory not known"
        words = fault or f"{gpu.name}, {memory}{_links(gpu)}"
        yield Finding("problem" if fault else "ok", f"GPU {gpu.index}", words)


def _links(gpu: Gpu) -> str:
    by_path: dict[str, list[int]] = {}
    for other, path in gpu.links.items():
        by_path.setdefault(path, []).append(other)
    return "".join(f", {path} to {' '.join(map(str, others))}" for path, others in by_path.items())


def _software(machine: Machine) -> Iterator[Finding]:
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Finding("ok", "torch", f"{torch.__version__} ({built}), Python {platform.python_version()}")
    if machine.gpus:
        yield from _cuda()
    ray = importlib.util.find_spec("ray") and importlib.util.find_spec("ray.serve")
    yield Finding("ok", "ray", _release("ray")) if ray else Finding("problem", "ray", "not installed: pip install 'ray[serve]'")
    try:
        load()
    except NativeUnavailableError as error:
        yield Finding("warning", "kernels", f"torch runs the layers on CPUs, several times slower: {error}")
    else:
        yield Finding("ok", "kernels", "the native CPU kernels are built")
    try:
        problem = shared_memory_problem()
    except OSError as error:  # where there is no /dev/shm
        problem = str(error)
    if problem:
        yield Finding("warning", "collectives", f"ranks on this machine's CPUs add up by gloo, a hundred times slower: {problem}")
    else:
        yield Finding("ok", "collectives", "DeepSpeed's shared memory, for ranks on this machine's CPUs")


def _cuda() -> Iterator[Finding]:
    if torch.version.cuda is None:
        yield Finding("warning", "CUDA", "this build of torch is for CPUs only, and the GPUs go unused; install a CUDA build of torch")
    elif os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # as Ray sets it for a process that asks for none
        yield Finding(
            "ok", "CUDA", f"torch is built for CUDA {torch.version.cuda}; GPUs are hidden from this process, so no more was tried"
        )
    elif not torch.cuda.is_available():
        yield Finding("warning", "CUDA", f"torch (CUDA {torch.version.cuda}) cannot use the GPUs; the driver may be too old for it")
    elif not runs_flash_attention():
        yield Finding("warning", "CUDA", "attention gathers blocks row by row, which is slow: what reads blocks runs on Hopper GPUs alone")
    elif flash_attention_reads_blocks():
        yield Finding("ok", "CUDA", "torch sees the GPUs; attention by Flash Attention 3")
    else:
        yield Finding(
            "warning", "CUDA", "attention gathers blocks row by row, which is slow; install Flash Attention 3 (flash_attn_interface)"
        )


def _folders() -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(_SHARED).free
    except OSError:
        free = 0
    enough = free >= _GIB
    advice = "" if enough else "; Ray and ranks on CPUs want 1 GiB: in a container, docker run --shm-size=2g"
    yield Finding("ok" if enough else "warning", "/dev/shm", f"{in_gib(free)} free{advice}")
    yield _cache()
    problem = default_model_problem()
    words = problem or f"{DEFAULT_MODEL} is installed"
    yield Finding("warning" if problem else "ok", "model", words)


def _cache() -> Finding:
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
    except (OSError, RuntimeError) as error:  # RuntimeError where there is no home folder
        return Finding("problem", "cache", f"kernels and converted models cannot be kept ({error}); name another folder in XDG_CACHE_HOME")
    state: State = "ok" if free >= _GIB else "warning"
    return Finding(state, "cache", f"{in_gib(free)} free in {folder}" + ("" if state == "ok" else "; a converted model may not find room"))
