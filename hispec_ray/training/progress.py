"""What a training shows of itself: a progress bar, a table of the exits now and then, a log, and tensorboard where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hispec_ray.training.trainer import Report


class Progress:
    """Takes the trainer's reports. Writes `log.jsonl` and tensorboard's events under the folder."""

    def __init__(self, folder: Path, steps: int, exits: Sequence[int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = (folder / "log.jsonl").open("a", buffering=1)
        self._exits = exits
        self._console = Console(stderr=True)
        self._bar = Bar(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=self._console)
        self._task = self._bar.add_task("training", total=steps)
        self._board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  an optional package
        except ImportError:
            return
        self._board = SummaryWriter(str(folder / "tensorboard"))

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()
        self._log.close()
        if self._board is not None:
            self._board.close()

    def __call__(self, report: Report) -> None:
        self._log.write(report.as_json() + "\n")
        exits = "  ".join(f"exit {exit} {share:.1%}" for exit, share in zip(self._exits, report.agreement, strict=True))
        if report.held_out:
            text = "" if report.text is None else f", text {report.text:.3f}"
            self._console.print(f"step {report.step}, held out: loss {report.loss:.3f}{text}, agreement {exits}", highlight=False)
        else:
            self._bar.update(
                self._task, completed=report.step, description=f"loss {report.loss:.3f}  {exits}  {report.tokens_per_second:.0f} tok/s"
            )
        if self._board is not None:
            split = "held_out" if report.held_out else "train"
            self._board.add_scalar(f"{split}/loss", report.loss, report.step)
            if report.text is not None:
                self._board.add_scalar(f"{split}/text", report.text, report.step)
            for exit, share in zip(self._exits, report.agreement, strict=True):
                self._board.add_scalar(f"{split}/agreement_exit_{exit}", share, report.step)
