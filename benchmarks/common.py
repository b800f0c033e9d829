"""What every benchmark shares: options, timing in alternation, the figure's file, the closing line."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID
from rich.table import Table

console = Console()
if not console.is_terminal:
    console.width = 160  # a file's lines are as long as a table wants


def parser(description: str, name: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark takes."""
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    options.add_argument("--quick", action="store_true", help="a smaller run, a minute or two")
    options.add_argument("--threads", type=int, default=None, help="CPU threads of the model (default: every core)")
    options.add_argument("--out", type=Path, default=Path("benchmarks/out"), help="folder of the figure and the JSON file")
    return options


def alternate(runs: int, contestants: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Run each contestant in turn, A B A B ..., after one warm-up turn that does not count.

    A contestant returns its own figure (seconds, or tokens a second). A machine's drift then meets all of them alike.
    """
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(runs + 1):
        for name, run in contestants.items():
            figure = run()
            if turn:
                figures[name].append(figure)
    return figures


def progress(*columns: ProgressColumn) -> Progress:
    """Return a progress bar that is drawn when it is told to: a thread that draws it would be measured too."""
    return Progress(*columns, console=console, transient=True, auto_refresh=False)


def tell(bar: Progress, task: TaskID, what: str, done: int, total: int) -> None:
    """Show what is being done, and how much of it is."""
    bar.update(task, description=what, completed=done, total=total, refresh=True)


def seconds(run: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios of figures taken in the same turn."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; all but the first column are flush right."""
    view = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        view.add_column(column, justify="right" if i else "left")
    for row in rows:
        view.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(view)


def finish(name: str, out: Path, headline: Mapping[str, object], details: Mapping[str, object]) -> None:
    """Write `<name>.json` with everything and print the headline as the last line."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps({**headline, "details": details}, indent=1) + "\n")
    print(json.dumps(headline))
