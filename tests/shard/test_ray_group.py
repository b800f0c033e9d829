"""Shards in processes of their own, in a real Ray cluster: the same text, and what happens when one dies or hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util import placement_group_table
from shard.test_ranks import ASKED, PROMPTS, texts
from shared import settings_of

from hispec_ray import LLM, SamplingParams, Settings
from hispec_ray.shard.executor import ShardsLostError
from hispec_ray.shard.ray_group import RayExecutor

CPUS = 8
HISPEC = ("hispec", 1, 3, 2, 4)
LONG = SamplingParams(temperature=0.8, seed=5, max_tokens=300, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=CPUS, include_dashboard=False, log_to_driver=False, address="local", logging_level="error")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def alone(tiny_folder: Path) -> LLM:
    return LLM(settings(tiny_folder))


def settings(folder: Path, *stages: dict[str, int], **parallel: Any) -> Settings:
    found = settings_of({"path": str(folder), "dtype": "float32", "threads": 1}, *HISPEC).model_dump()
    if stages:
        found["parallel"] = {"stages": stages, **parallel}
    return Settings.model_validate(found)


def group(folder: Path, *stages: dict[str, int], **parallel: Any) -> LLM:
    """Ranks add up by gloo, which waits where shared memory spins: these tests share two cores with Ray."""
    return LLM(settings(folder, *stages, **{"shared_memory": False, **parallel}))


def executor_of(llm: LLM) -> RayExecutor:
    assert isinstance(llm.engine.executor, RayExecutor)
    return llm.engine.executor


def pids(llm: LLM) -> list[int]:
    return [ray.get(member.alive.remote()) for member in executor_of(llm)._members]


def there() -> set[str]:
    """Members that live, reservations, and shared memory that nobody cleans up."""
    running = psutil.Process().children(recursive=True)
    members = {f"member {process.pid}" for process in running if "ray::Actor" in " ".join(_words(process))}
    groups = {str(group["name"]) for group in placement_group_table().values() if group["state"] != "REMOVED"}
    return members | groups | {path.name for path in Path("/dev/shm").glob("deepspeed*")}


def leftovers(before: AbstractSet[str] = frozenset()) -> set[str]:
    """What is there and was not before, once Ray has had the time to end it."""
    deadline = time.monotonic() + 10
    while (left := there() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has just ended
        return []


@pytest.fixture(scope="module")
def shards(tiny_folder: Path) -> Iterator[LLM]:
    """Two ranks, then one: sums, gathers and rows that go from stage to stage."""
    llm = group(tiny_folder, {"tp": 2, "layers": 4}, {"tp": 1, "layers": 4}, patience_s=2)
    yield llm
    llm.engine.close()
    assert not leftovers()


def test_the_text_of_one_process(shards: LLM, alone: LLM) -> None:
    assert texts(shards) == texts(alone)
    rows = [(llm.engine.counts[-1].rows, llm.engine.counts[-1].own) for llm in (shards, alone)]
    assert rows[0] == rows[1], "and the full depth does the work of one process"


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages", [[{"tp": 2}], [{"tp": 3}], [{"layers": 3}, {"layers": 5}], [{"layers": 4}, {"layers": 2}, {"layers": 2}]], ids=str
)
def test_the_text_of_one_process_in_other_layouts(stages: list[dict[str, int]], tiny_folder: Path, alone: LLM) -> None:
    before = there()
    llm = group(tiny_folder, *stages)
    assert texts(llm) == texts(alone)
    llm.engine.close()
    assert not leftovers(before)


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)], ids=["a rank of the first stage", "the last stage"])
def test_a_killed_shard_costs_nobody_a_token(victim: int, shards: LLM, alone: LLM) -> None:
    """A member is killed in the middle: the texts come out whole, and all were started anew."""
    expected = [done.choices[0].token_ids for done in alone.generate(PROMPTS, LONG)]
    before, rebuilds = pids(shards), shards.engine.rebuilds
    after_a_while = threading.Timer(0.3, os.kill, (before[victim], signal.SIGKILL))
    after_a_while.start()
    assert [done.choices[0].token_ids for done in shards.generate(PROMPTS, LONG)] == expected
    after_a_while.join()
    assert not set(before) & set(pids(shards))
    assert shards.engine.rebuilds == rebuilds + 1
    shards.engine.scheduler.check_integrity()
    assert shards.engine.pool.used == 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 2], ids=["a rank", "the last stage"])
def test_a_shard_that_hangs_is_noticed_and_replaced(victim: int, shards: LLM, alone: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = alone.generate(PROMPTS[0], LONG)[0].choices[0].token_ids
    stopped: list[float] = []
    noticed: list[float] = []
    executor = executor_of(shards)
    pid, rebuild = pids(shards)[victim], executor.rebuild

    def stop() -> None:
        stopped.append(time.monotonic())
        os.kill(pid, signal.SIGSTOP)

    def rebuilding() -> None:
        noticed.append(time.monotonic())
        rebuild()

    monkeypatch.setattr(executor, "rebuild", rebuilding)
    after_a_while = threading.Timer(0.3, stop)
    after_a_while.start()
    assert shards.generate(PROMPTS[0], LONG)[0].choices[0].token_ids == expected
    after_a_while.join()
    assert len(noticed) == 1
    assert noticed[0] - stopped[0] < 5


@pytest.mark.slow
def test_three_losses_in_a_row_are_the_end(tiny_folder: Path) -> None:
    before = there()
    llm = group(tiny_folder, {"tp": 1, "layers": 4}, {"tp": 1, "layers": 4})
    executor = executor_of(llm)

    def lost() -> Any:
        raise ShardsLostError("a shard is lost: for the test")

    executor.collect = lost  # type: ignore[method-assign]
    with pytest.raises(ShardsLostError, match="for the test"):
        llm.generate(PROMPTS[0], ASKED[0])
    assert llm.engine.rebuilds == 3
    llm.engine.close()
    assert not leftovers(before)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"tp": 7}], "parallel.stages.0.tp is 7; it must be from 1 to 6 for this model of 6 query heads"),
        ([{"layers": 2}, {"layers": 6}], r"parallel.stages.0.layers is 2; .* it must be from 3 \(the deepest exit\) to 7"),
        ([{"layers": 4}, {"layers": 5}], r"parallel.stages have 4 \+ 5 = 9 layers; they must add up to the model's 8"),
        ([{"layers": 9}], "parallel.stages have 9 layers; they must add up to the model's 8"),
        ([{"layers": 4}, {}], "parallel.stages.1.layers is missing"),
        ([{"tp": 5, "layers": 4}, {"tp": 5, "layers": 4}], "stages of 5, 5 ranks do not fit into this cluster, whose nodes have 8 CPU"),
    ],
)
def test_layouts_that_cannot_be_are_refused_before_anything_is_read(stages: list[dict[str, int]], message: str, tiny_folder: Path) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        group(tiny_folder, *stages)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_two_groups_share_a_machine_and_its_memory(tiny_folder: Path, alone: LLM) -> None:
    """By shared memory here: neither reads what the other writes."""
    before = there()
    one, other = (group(tiny_folder, {"tp": 2}, shared_memory=True, patience_s=60) for _ in range(2))
    asked = SamplingParams(temperature=0, max_tokens=6)
    expected = alone.generate(PROMPTS[0], asked)
    assert one.generate(PROMPTS[0], asked) == other.generate(PROMPTS[0], asked) == expected
    one.engine.close()
    other.engine.close()
    assert not leftovers(before)
