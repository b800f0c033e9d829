"""The training loop, on DeepSpeed: one process or many, ZeRO 1 to 3, resumable."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from hispec_ray.config import Group
from hispec_ray.training.data import NOTHING, Batches, micro_batches
from hispec_ray.training.student import ExitStudent, Scores, layers_to_drop

logger = logging.getLogger(__name__)


class TrainingSettings(Group):
    """How long and how hard. A step's loss is a mean over its learned tokens, so it does not depend on the number of processes."""

    steps: int
    lines_per_step: int
    micro_lines: int
    """Lines that one process reads in one pass."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    warmup: float = 0.02
    """Share of the steps in which the learning rate rises."""
    decay: float = 0.4
    """Share of the steps, at the end, in which it falls to nothing."""
    layer_dropout: float = 0.0
    """LayerSkip's p_max: the last layer's probability to be skipped by a batch."""
    text_weight: float = 1.0
    exit_weight: float = 1.0
    zero_stage: Literal[1, 2, 3] = 1
    save_every: int = 200
    report_every: int = 10
    evaluate_every: int = 200
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Where a training stands, on held-out lines where `held_out`, else on the step's own.

    text: cross-entropy of the full depth, in nats a token, None where it is no part of the loss. agreement, divergence: one for
    each exit. tokens_per_second: 0 where it is not measured.
    """

    step: int
    loss: float
    text: float | None
    agreement: list[float]
    divergence: list[float]
    tokens_per_second: float
    held_out: bool

    def as_json(self) -> str:
        rounded = {name: [round(v, 5) for v in value] if isinstance(value, list) else value for name, value in self._fields()}
        return json.dumps(rounded)

    def _fields(self) -> Iterator[tuple[str, Any]]:
        for name in self.__slots__:
            yield name, getattr(self, name)


def train(student: ExitStudent, batches: Batches, settings: TrainingSettings, folder: Path, report: Callable[[Report], None]) -> Report:
    """Train what of the student wants gradients, from the last checkpoint under `folder` on, and leave the result in the student.

    Returns the last report on held-out lines. Every process of the group calls this with the same arguments; without a group this
    process is one by itself. Only rank 0 reports. Raises OSError, with nothing half-written left, where a checkpoint cannot be saved, and
    ValueError where one is damaged, or where the loss is not finite.
    """
    device = next(student.parameters()).device.type
    rank, world = join_group(device)
    return _Loop(student, batches, settings, folder, report, rank, world).run()


class _Loop:
    def __init__(
        self,
        student: ExitStudent,
        batches: Batches,
        settings: TrainingSettings,
        folder: Path,
        report: Callable[[Report], None],
        rank: int,
        world: int,
    ) -> None:
        import deepspeed  # noqa: PLC0415  seconds to import, and only training needs it

        # its all-reduce for inference on CPUs: unused here, and compiled for minutes at the first start
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.settings = settings
        self.batches = batches
        self.report = report
        self.rank, self.world = rank, world
        parts, left = divmod(settings.lines_per_step, settings.micro_lines * world)
        if left or not parts:
            raise ValueError(
                f"lines_per_step is {settings.lines_per_step}; it must be a multiple of micro_lines x processes, "
                f"{settings.micro_lines} x {world}"
            )
        self.accumulation = parts
        self.layers = student.backbone.config.num_hidden_layers
        self.checkpoints = folder / "checkpoints"
        wanted = [p for p in student.parameters() if p.requires_grad]
        self.some_frozen = len(wanted) < len(list(student.parameters()))
        decayed, plain = [p for p in wanted if p.ndim > 1], [p for p in wanted if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.learning_rate, betas=(0.9, 0.95))
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=student,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": settings.micro_lines,
                "gradient_accumulation_steps": parts,
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": settings.zero_stage},
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": next(student.parameters()).dtype == torch.bfloat16},
                "steps_per_print": 10**9,
            },
        )

    def run(self) -> Report:
        last: Report | None = None
        step = self._resume()
        seen, since = 0, time.monotonic()
        while step < self.settings.steps:
            self._set_learning_rate(step)
            telling = self._is_due(step + 1, self.settings.report_every)
            scores, loss = self._step(step, telling)
            step += 1
            seen += int(scores.tokens)
            if telling:
                self._tell(self._report(step, loss, scores, seen / (time.monotonic() - since)))
                seen, since = 0, time.monotonic()
            if self._is_due(step, self.settings.evaluate_every):
                last = self._evaluate(step)
                since = time.monotonic()
            if self._is_due(step, self.settings.save_every):
                self._save(step)
                since = time.monotonic()
        last = last or self._evaluate(step)  # the training had ended before
        self._gather()
        return last

    def _is_due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.settings.steps

    def _step(self, step: int, agreement: bool) -> tuple[Scores, float]:
        settings = self.settings
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        dropped = layers_to_drop(self.layers, settings.layer_dropout, generator)
        parts = micro_batches(self.batches.batch(step), self.accumulation * self.world)
        tokens = sum(int((targets >= 0).sum()) for _, targets in parts)
        scale = self.world * self.accumulation / tokens  # DeepSpeed divides by both
        if settings.zero_stage == 3:  # DeepSpeed would take a dropped layer's last gradient once more
            self.optimizer.grad_partitions_flat_buffer.zero_()
        found: list[Scores] = []
        loss_sum = 0.0
        for ids, targets in parts[self.rank :: self.world]:
            loss, scores = self._forward(ids, targets, dropped, agreement)
            self.engine.backward(loss * scale)
            self.engine.step()
            loss_sum += float(loss.detach())
            found.append(scores)
        total, loss_sum = self._total(found, loss_sum)
        return total, self._finite(loss_sum / tokens, step + 1)

    def _forward(
        self, ids: torch.Tensor, targets: torch.Tensor, dropped: frozenset[int] = frozenset(), agreement: bool = True
    ) -> tuple[torch.Tensor, Scores]:
        device, settings = self.engine.device, self.settings
        loss, scores = self.engine(ids.to(device), targets.to(device), dropped, settings.exit_weight, settings.text_weight, agreement)
        return loss, scores

    def _total(self, scores: list[Scores], loss: float) -> tuple[Scores, float]:
        """Add scores over a step's batches and over the ranks."""
        exits = len(scores[0].divergence)
        values = torch.stack([torch.cat((torch.stack((s.tokens, s.text)), s.divergence, s.agreement)).double() for s in scores])
        summed = torch.cat((values.sum(dim=0), torch.tensor([loss], dtype=torch.float64, device=values.device)))
        if self.world > 1:
            dist.all_reduce(summed)
        return Scores(summed[0], summed[1], summed[2 : 2 + exits], summed[2 + exits : 2 + 2 * exits]), float(summed[-1])

    @torch.no_grad()
    def _evaluate(self, step: int) -> Report:
        lines = list(self.batches.held_out())
        lines += [NOTHING] * (-len(lines) % (self.settings.micro_lines * self.world))
        self.engine.eval()
        found, loss_sum = [], 0.0
        for ids, targets in micro_batches(lines, len(lines) // self.settings.micro_lines)[self.rank :: self.world]:
            loss, scores = self._forward(ids, targets)
            found.append(scores)
            loss_sum += float(loss)
        self.engine.train()
        scores, loss_sum = self._total(found, loss_sum)
        report = self._report(step, self._finite(loss_sum / float(scores.tokens), step), scores, held_out=True)
        self._tell(report)
        return report

    def _finite(self, loss: float, step: int) -> float:
        if not math.isfinite(loss):
            raise ValueError(f"the loss is not finite at step {step}; lower learning_rate ({self.settings.learning_rate})")
        return loss

    def _report(self, step: int, loss: float, scores: Scores, speed: float = 0.0, *, held_out: bool = False) -> Report:
        n = float(scores.tokens)
        text = float(scores.text) / n if self.settings.text_weight else None
        agreement, divergence = [float(a) / n for a in scores.agreement], [float(d) / n for d in scores.divergence]
        return Report(step, loss, text, agreement, divergence, speed, held_out)

    def _tell(self, report: Report) -> None:
        if self.rank == 0:
            self.report(report)

    def _set_learning_rate(self, step: int) -> None:
        settings = self.settings
        rise = min(1.0, (step + 1) / max(1.0, settings.warmup * settings.steps))
        fall = min(1.0, (settings.steps - step) / max(1.0, settings.decay * settings.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(rise, fall)

    def _resume(self) -> int:
        for torn in self.checkpoints.glob("saving-*"):  # of a process that was killed while it saved
            shutil.rmtree(torn, ignore_errors=True)
        done = self._saved()
        if not done:
            return 0
        step = max(done)
        path = done[step]
        try:
            found, _ = self.engine.load_checkpoint(str(self.checkpoints), tag=path.name, load_module_strict=not self.some_frozen)
            if found is None:
                raise ValueError("it has no weights")
            if (found_of := len(list(path.glob("*_optim_states.pt")))) < self.world:  # DeepSpeed would go on without
                raise ValueError(f"it has {found_of} of {self.world} files of the optimizer")
        except Exception as error:  # of pickle, zip and DeepSpeed, whatever they find first
            raise ValueError(
                f"the checkpoint {path} is damaged ({one_line(error)}); delete it to go on from an older one, or to begin anew"
            ) from error
        logger.info("resumed at step %d from %s", step, self.checkpoints)
        return step

    def _saved(self) -> dict[int, Path]:
        """The checkpoints that are whole, by their steps."""
        folders = [path for path in self.checkpoints.glob("step-*") if re.fullmatch("step-[0-9]+", path.name) and path.is_dir()]
        return {int(path.name.removeprefix("step-")): path for path in folders}

    def _save(self, step: int) -> None:
        """Save what is trained under a name that is no checkpoint's until all is written, then let the older ones go."""
        scratch, done = self.checkpoints / f"saving-{step}", self.checkpoints / f"step-{step}"
        try:
            self.engine.save_checkpoint(
                str(self.checkpoints), tag=scratch.name, save_latest=False, exclude_frozen_parameters=self.some_frozen
            )
            if self.rank == 0:
                scratch.rename(done)
                for old in self._saved().values():
                    if old != done:
                        shutil.rmtree(old)
        except (OSError, RuntimeError) as error:  # torch raises the second where a disk is full
            shutil.rmtree(scratch, ignore_errors=True)
            raise OSError(f"the checkpoint of step {step} cannot be saved in {self.checkpoints}: {one_line(error)}") from error
        if self.world > 1:
            dist.barrier()

    def _gather(self) -> None:
        """Give every process whole parameters, which ZeRO 3 has in parts."""
        if self.settings.zero_stage < 3:
            return
        import deepspeed  # noqa: PLC0415  see __init__

        parameters = list(self.engine.module.parameters())
        with deepspeed.zero.GatheredParameters(parameters):
            whole = [parameter.detach().clone() for parameter in parameters]
        for parameter, values in zip(parameters, whole, strict=True):
            parameter.data = values


def one_line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def join_group(device: str) -> tuple[int, int]:
    """Return (rank, processes) of this process's group. Where there is none it makes one of itself alone, which needs no port.

    That group stays, as DeepSpeed keeps what it has derived from it.
    """
    os.environ.setdefault("DS_ACCELERATOR", device)  # what DeepSpeed would else guess from the machine
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads its device's number here
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()
