"""The training loop: the same curve whatever the processes and the ZeRO stage, and going on as if never stopped."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model.tiny import make_checkpoint
from transformers import AutoModelForCausalLM

from hispec_ray.model.heads import ExitNetwork
from hispec_ray.training.data import Line, TextBatches, micro_batches
from hispec_ray.training.student import ExitStudent, next_layer
from hispec_ray.training.trainer import Report, TrainingSettings, train

STEPS = 6
CASES = [("heads", 2), ("heads", 3), ("layerskip", 2), ("layerskip", 3)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama2", num_hidden_layers=3)


def student_of(checkpoint: Path, recipe: str) -> ExitStudent:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    if recipe == "blocks":
        return ExitStudent(model, [1, 2], blocks=[next_layer(model, depth) for depth in (1, 2)])
    networks = [ExitNetwork(model.config.hidden_size, "mlp", 32) for _ in range(2)] if recipe == "heads" else None
    return ExitStudent(model, [1, 2], networks=networks)


def batches_of(count: int = 48, held_out: int = 5) -> TextBatches:
    """Lines of 6 to 17 ids in which each id decides the next."""
    lines = [Line(tuple((start * 7 + 5 * place) % 300 for place in range(6 + start % 12)), 1 + start % 3) for start in range(count)]
    return TextBatches(lines[held_out:], lines[:held_out], 8, seed=1)


def settings_of(recipe: str, zero: int, **others: Any) -> TrainingSettings:
    recipes = {
        "heads": {"text_weight": 0.0, "learning_rate": 1e-2, "micro_lines": 2},
        "blocks": {"text_weight": 0.0, "learning_rate": 1e-2, "micro_lines": 2},
        "layerskip": {"layer_dropout": 0.5, "learning_rate": 2e-3, "micro_lines": 4},
    }
    values = {"steps": STEPS, "lines_per_step": 8, "report_every": 1, "zero_stage": zero, **recipes[recipe]}
    return TrainingSettings(**{**values, **others})


def curve(checkpoint: Path, recipe: str, zero: int, folder: Path, **others: Any) -> tuple[list[Report], ExitStudent]:
    """Train and return the reports and the student."""
    reports: list[Report] = []
    student = student_of(checkpoint, recipe)
    last = train(student, batches_of(), settings_of(recipe, zero, **others), folder, reports.append)
    if reports:
        assert last == reports[-1]
    return reports, student


def figures(reports: list[Report]) -> list[list[float]]:
    return [[report.step, report.loss, *report.divergence, *report.agreement] for report in reports]


def weights(student: ExitStudent) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in student.named_parameters() if parameter.requires_grad}


def one_of_two(rank: int, checkpoint: Path, folder: Path) -> None:
    """What each of two processes does; rank 0 leaves the figures of every case and the weights."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for recipe, zero in CASES:
        reports, student = curve(checkpoint, recipe, zero, folder / f"{recipe}-{zero}")
        torch.save(weights(student), folder / f"{recipe}-{zero}-{rank}.pt")
        if rank == 0:
            (folder / f"{recipe}-{zero}.json").write_text(json.dumps(figures(reports)))
        else:
            assert reports == []
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have left their figures."""
    folder = tmp_path_factory.mktemp("two")
    mp.spawn(one_of_two, (checkpoint, folder), nprocs=2)
    return folder


@pytest.mark.parametrize(("recipe", "zero"), CASES)
def test_two_processes_give_the_curve_of_one(recipe: str, zero: int, two_processes: Path, checkpoint: Path, tmp_path: Path) -> None:
    alone, student = curve(checkpoint, recipe, 1, tmp_path)
    together = json.loads((two_processes / f"{recipe}-{zero}.json").read_text())
    assert len(together) == STEPS + 1
    torch.testing.assert_close(torch.tensor(together), torch.tensor(figures(alone)), atol=1e-3, rtol=0)
    first, last = (report.text or report.loss for report in (alone[0], alone[STEPS - 1]))
    assert last < 0.95 * first
    for rank in range(2):  # both have the whole result
        left = torch.load(two_processes / f"{recipe}-{zero}-{rank}.pt")
        torch.testing.assert_close(left, weights(student), atol=1e-3, rtol=0)


@pytest.mark.parametrize(("recipe", "zero"), [("heads", 1), ("heads", 3), ("blocks", 3), ("layerskip", 2), ("layerskip", 3)])
def test_a_training_that_goes_on_equals_one_that_never_stopped(recipe: str, zero: int, checkpoint: Path, tmp_path: Path) -> None:
    whole, student = curve(checkpoint, recipe, zero, tmp_path / "whole", save_every=2)

    halves: list[Report] = []
    settings = settings_of(recipe, zero, save_every=2)
    with pytest.raises(KeyboardInterrupt):
        train(student_of(checkpoint, recipe), batches_of(), settings, tmp_path / "halves", stop_at(5, halves))
    (tmp_path / "halves" / "checkpoints" / "saving-9").mkdir()  # as a process leaves it that is killed while it saves
    rest, again = curve(checkpoint, recipe, zero, tmp_path / "halves", save_every=2)

    assert rest[0].step == 5
    assert figures(halves[:4]) + figures(rest) == figures(whole)
    assert all(torch.equal(values, weights(again)[name]) for name, values in weights(student).items())
    assert [path.name for path in (tmp_path / "halves" / "checkpoints").glob("s*-*")] == [f"step-{STEPS}"]


def test_a_training_that_has_ended_says_what_it_came_to(checkpoint: Path, tmp_path: Path) -> None:
    whole, student = curve(checkpoint, "heads", 1, tmp_path)
    again, same = curve(checkpoint, "heads", 1, tmp_path)
    assert figures(again) == figures(whole[-1:])
    assert all(torch.equal(values, weights(same)[name]) for name, values in weights(student).items())


@pytest.mark.parametrize(("file", "left"), [("*model_states.pt", 1000), ("*optim_states.pt", 1000), ("*optim_states.pt", None)])
def test_a_damaged_checkpoint_is_named_in_one_line(file: str, left: int | None, checkpoint: Path, tmp_path: Path) -> None:
    """left: bytes of the file; None where it is gone."""
    curve(checkpoint, "heads", 1, tmp_path)
    folder = tmp_path / "checkpoints" / f"step-{STEPS}"
    (damaged,) = folder.glob(file)
    if left is None:
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[:left])
    with pytest.raises(ValueError, match="is damaged") as error:
        curve(checkpoint, "heads", 1, tmp_path)
    assert str(error.value).startswith(f"the checkpoint {folder} is damaged (")
    assert str(error.value).endswith("); delete it to go on from an older one, or to begin anew")
    assert "\n" not in str(error.value)


def test_folders_that_are_no_checkpoints_are_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("step-old", "step-", "step--1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-9").write_text("a file")
    reports, _ = curve(checkpoint, "heads", 1, tmp_path, save_every=2)
    assert reports[0].step == 1
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names >= {"step-old", "step-", "step--1", "step-9", f"step-{STEPS}"}


def stop_at(step: int, reports: list[Report]) -> Callable[[Report], None]:
    def report(given: Report) -> None:
        reports.append(given)
        if given.step == step:
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("[enforce fail]")])
def test_a_full_disk_leaves_the_checkpoint_before(
    error: Exception, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = torch.save

    def save(state: object, path: str, **options: Any) -> None:
        if "saving-4" in str(path) and "optim" in str(path):
            Path(path).write_bytes(b"half")
            raise error
        saved(state, path, **options)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match=f"the checkpoint of step 4 cannot be saved in {tmp_path}"):
        curve(checkpoint, "heads", 1, tmp_path, save_every=2)
    assert [path.name for path in (tmp_path / "checkpoints").glob("s*-*")] == ["step-2"]


def test_only_what_is_trained_is_saved(checkpoint: Path, tmp_path: Path) -> None:
    curve(checkpoint, "heads", 2, tmp_path)
    saved = sum(path.stat().st_size for path in (tmp_path / "checkpoints" / f"step-{STEPS}").iterdir())
    trained = sum(values.nbytes for values in weights(student_of(checkpoint, "heads")).values())
    assert saved < 5 * trained  # themselves, in DeepSpeed's other copy, and the optimizer's two moments


@pytest.mark.parametrize("held_out", [1, 5, 8])
def test_every_held_out_line_counts_once(held_out: int, checkpoint: Path, tmp_path: Path) -> None:
    batches = batches_of(held_out=held_out)
    settings = settings_of("heads", 1, steps=1, micro_lines=4, learning_rate=1e-12)
    last = train(student_of(checkpoint, "heads"), batches, settings, tmp_path, lambda report: None)
    loss, scores = student_of(checkpoint, "heads").eval()(*micro_batches(batches.held_out(), 1)[0], text_weight=0.0)
    assert last.held_out
    assert last.text is None
    assert last.loss == pytest.approx(float(loss.detach() / scores.tokens), rel=1e-5)
    assert last.agreement == pytest.approx((scores.agreement / scores.tokens).tolist())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    return iter(())


def test_lines_that_do_not_divide_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lines_per_step is 8; it must be a multiple of micro_lines x processes, 3 x 1"):
        curve(checkpoint, "heads", 1, tmp_path, micro_lines=3)


def test_a_line_is_in_one_batch_of_an_epoch() -> None:
    batches = batches_of(count=37)
    epoch = [line for step in range(4) for line in batches.batch(step)]
    assert len({id(line) for line in epoch}) == 32
    assert [batches.batch(step) for step in (5, 0, 5)] == [batches_of(count=37).batch(step) for step in (5, 0, 5)]
    assert batches.batch(4) != batches.batch(0)
