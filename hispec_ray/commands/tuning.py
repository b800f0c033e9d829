"""`hispec tune`: which drafter, exits and windows are fastest for a model on this machine."""

from __future__ import annotations

import random
import statistics
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from hispec_ray.commands.errors import InputError, in_one_line, in_words
from hispec_ray.config import DEFAULT_MODEL, Settings

if TYPE_CHECKING:
    from rich.table import Table

    from hispec_ray.tuning.planner import Plan
    from hispec_ray.tuning.tune import Tuning

_model = partial(typer.Option, rich_help_panel="Model and prompts")
_course = partial(typer.Option, rich_help_panel="Course")
_machine = partial(typer.Option, rich_help_panel="Machine")
_STEADY = 0.1
"""How much a plan's turns may differ, of their median, on a machine that does nothing else."""


def tune(
    *,
    prompts: Annotated[
        list[Path], _model(help="A .txt file, a prompt a line, or .jsonl with 'prompt' or 'messages'; may be given several times.")
    ],
    model: Annotated[str, _model(help="A folder, a .gguf file, a Hugging Face id, or abacus.")] = DEFAULT_MODEL,
    heads: Annotated[str | None, _model(help="A file of trained exits.", show_default="none")] = None,
    phrases: Annotated[str | None, _model(help="A file of phrases for lookups.", show_default="none")] = None,
    chat: Annotated[bool | None, _model("--chat/--raw", help="Use the model's chat template.", show_default="where it has one")] = None,
    count: Annotated[int, _course(min=1, help="Prompts to take, spread over what is given.")] = 16,
    max_tokens: Annotated[int, _course(min=8, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, _course(min=0, max=2, help="Of the answers.")] = 0.0,
    checks: Annotated[int, _course(min=1, help="Plans to run, besides plain decoding.")] = 4,
    runs: Annotated[int, _course(min=1, help="Times that each of them is run, beside the others.")] = 3,
    out: Annotated[Path, _course(help="Folder for tune.yaml and tune.png.")] = Path("tuned"),
    dtype: Annotated[str | None, _machine(help="bfloat16 or float32.", show_default="bfloat16")] = None,
    device: Annotated[str | None, _machine(help="cpu or cuda.", show_default="cpu")] = None,
    threads: Annotated[int | None, _machine(help="CPU threads.", show_default="every core")] = None,
) -> None:
    """Measure exits and passes, predict every plan, run the best few, and write the settings block of the fastest."""
    given = {"path": model, "dtype": dtype, "device": device, "threads": threads}
    with in_one_line("stopped; nothing was written"):
        try:
            settings = Settings.model_validate(
                {
                    "model": {name: value for name, value in given.items() if value is not None},
                    "speculation": {"method": "plain", "exits": {"heads": heads}, "phrases": phrases},
                    "cache": {"memory_gib": 1.0},  # several engines share the weights, on a GPU too
                }
            )
        except ValidationError as error:
            raise InputError(in_words(error)) from None
        from rich.console import Console  # noqa: PLC0415  torch takes seconds, and rich some of one
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        from hispec_ray.distill import read_prompts  # noqa: PLC0415
        from hispec_ray.llm import LLM  # noqa: PLC0415
        from hispec_ray.training.claim import make_folder, refuse_file  # noqa: PLC0415
        from hispec_ray.tuning.tune import draw, tune  # noqa: PLC0415

        console = Console(stderr=True)
        refuse_file(out)
        llm = LLM(settings)
        every = read_prompts(prompts, llm, chat, max_tokens)
        make_folder(out)
        random.Random(0).shuffle(every)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:  # its thread would be measured too
            task = progress.add_task("tuning", total=None)
            said = ""

            def tell(what: str, done: int, total: int) -> None:
                nonlocal said
                progress.update(task, description=what, completed=done, total=total, refresh=True)
                if what != said and not console.is_terminal:  # where no bar is drawn: a line for each thing
                    console.print(what, highlight=False)
                said = what

            found = tune(
                settings, every[:count], max_tokens=max_tokens, temperature=temperature, checks=checks, runs=runs, like=llm,
                tell=tell,
            )  # fmt: skip
        block = f"{_origin(found, settings)}\n{found.settings_block()}"
        (out / "tune.yaml").write_text(block)
        Console().print(_table(found))
        if doubt := _doubt(found):
            console.print(doubt, highlight=False)
        print(block, end="")
        try:
            draw(found, out / "tune.png")
        except ImportError:
            console.print("no figure: matplotlib is not installed")
        console.print(f"written to {out}: the block belongs under `args:` in a deployment file", highlight=False)


def _origin(found: Tuning, settings: Settings) -> str:
    """Say in a comment what the block was measured for."""
    model = f"{settings.model.path}, {settings.model.dtype}, {settings.model.device}"
    texts = f"{len(found.recordings)} texts of temperature {found.recordings[0].temperature:g}"
    return f"# hispec tune: {model}, batch 1, {texts}: {found.pick.measured:.1f} tokens/s, {found.plain.measured:.1f} plainly"


def _doubt(found: Tuning) -> str | None:
    """What to say where a plan's turns differ by more than `_STEADY` of their median."""
    plan = max(found.checked, key=_scatter)
    if _scatter(plan) <= _STEADY:
        return None
    return (
        f"{plan.name()} ran at {min(plan.turns):.2f} to {max(plan.turns):.2f} times plain decoding's speed, turn by turn: the machine was "
        "busy, or the answers are short; tune again when nothing else runs, or with more tokens"
    )


def _scatter(plan: Plan) -> float:
    return (max(plan.turns) - min(plan.turns)) / statistics.median(plan.turns)


def _table(found: Tuning) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table(
        title="Plans that were run, tokens a second at batch 1", title_justify="left", caption_justify="left",
        caption=(
            "a plan: method, drafter (exit where none is named), layers of its exits, draft_tokens/window, other settings; "
            "x plain: times plain decoding's speed, the median of its turns; turns: the least and the most of them"
        ),
    )  # fmt: skip
    for heading in ("plan", "expected", "measured", "x plain", "turns"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for plan in found.checked:
        times, turns = f"{statistics.median(plan.turns):.2f}", f"{min(plan.turns):.2f}-{max(plan.turns):.2f}"
        table.add_row(plan.name(), f"{plan.predicted:.1f}", f"{plan.measured:.1f}", times, turns)
    return table
