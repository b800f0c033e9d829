"""`hispec train-exits`, `distill` and `phrases`: exits and lookups that predict, and the text that they learn from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from hispec_ray.commands.errors import InputError, in_one_line, in_words
from hispec_ray.config import DEFAULT_MODEL, Settings

_model = partial(typer.Option, rich_help_panel="Model and data")
_recipe = partial(typer.Option, rich_help_panel="Recipe")
_course = partial(typer.Option, rich_help_panel="Course")
_machine = partial(typer.Option, rich_help_panel="Machine")


def train_exits(
    *,
    data: Annotated[list[str], _model(help="A .txt or .jsonl file, or a folder of them; may be given several times.")],
    exits: Annotated[str, _model(help="Depths to train, in layers from the bottom, for example 4,8.")],
    out: Annotated[str, _model(help="Folder for the result, the log and the checkpoints; the same again goes on.")],
    model: Annotated[str, _model(help="A folder, a .gguf file, a Hugging Face id, or abacus.")] = DEFAULT_MODEL,
    held_out: Annotated[float | None, _model(help="Share of the data that is only measured with.", show_default="0.02")] = None,
    line_tokens: Annotated[int | None, _model(help="Tokens of a line: texts are packed into and cut to it.", show_default="256")] = None,
    recipe: Annotated[
        str | None, _recipe(help="heads (a network at each exit) or layerskip (the model itself).", show_default="heads")
    ] = None,
    kind: Annotated[str | None, _recipe(help="heads: linear, mlp or block (a layer like the model's own).", show_default="mlp")] = None,
    inner: Annotated[int | None, _recipe(help="heads: inner width of the mlp.", show_default="the model's width")] = None,
    vocabulary: Annotated[int | None, _recipe(help="heads: how many frequent ids the exits score.", show_default="all")] = None,
    lora_rank: Annotated[int | None, _recipe(help="layerskip: rank of adapters; 0 trains the whole model.", show_default="0")] = None,
    layer_dropout: Annotated[
        float | None, _recipe(help="layerskip: how likely a batch skips the last layer, earlier ones less.", show_default="0.1")
    ] = None,
    exit_weight: Annotated[
        float | None, _recipe(help="layerskip: weight of the exits' divergence; the text's loss weighs 1.", show_default="1.0")
    ] = None,
    steps: Annotated[int | None, _course(help="Steps of the optimizer.", show_default="1000")] = None,
    lines_per_step: Annotated[int | None, _course(help="Lines that a step reads, over all processes.", show_default="16")] = None,
    learning_rate: Annotated[float | None, _course(help="Its peak.", show_default="0.001 heads, 0.0001 layerskip")] = None,
    seed: Annotated[int | None, _course(help="Of the data's order and the networks.", show_default="0")] = None,
    save_every: Annotated[int | None, _course(help="Steps from checkpoint to checkpoint.", show_default="200")] = None,
    zero: Annotated[int | None, _machine(help="DeepSpeed's ZeRO stage, 1 to 3.", show_default="1")] = None,
    workers: Annotated[int | None, _machine(help="Processes; more than one run in Ray Train.", show_default="1")] = None,
    device: Annotated[str | None, _machine(help="cpu or cuda.", show_default="cpu")] = None,
    dtype: Annotated[
        str | None, _machine(help="heads: bfloat16 or float32, of the model itself.", show_default="bfloat16 on cuda, float32 on cpu")
    ] = None,
    threads: Annotated[int | None, _machine(help="CPU threads of each process.", show_default="torch's choice")] = None,
) -> None:
    """Train exits of a model to say what its full depth says; prints where the result is."""
    options = {name: value for name, value in locals().items() if value is not None}
    try:
        options["exits"] = [int(depth) for depth in exits.split(",")]
    except ValueError:
        raise InputError(f"exits is {exits!r}; it must be numbers of layers with commas between them, for example 4,8") from None
    with in_one_line(f"stopped; the same command goes on from the last checkpoint in {out}"):
        from hispec_ray.training.exits import ExitTrainingSettings, train_exits  # noqa: PLC0415  torch takes seconds

        try:
            settings = ExitTrainingSettings.model_validate(options)
        except ValidationError as error:
            raise InputError(in_words(error)) from None
        print(train_exits(settings))


def distill(
    *,
    prompts: Annotated[
        list[Path], _model(help="A .txt file, a prompt a line, or .jsonl with 'prompt' or 'messages'; may be given several times.")
    ],
    out: Annotated[Path, _model(help="A .jsonl file for the answers; the same again goes on.")],
    model: Annotated[str, _model(help="A folder, a .gguf file, a Hugging Face id, or abacus.")] = DEFAULT_MODEL,
    chat: Annotated[bool | None, _model("--chat/--raw", help="Use the model's chat template.", show_default="where it has one")] = None,
    tokens: Annotated[int, _course(min=1, help="Tokens to write in all; prompts come again with another seed.")] = 100_000,
    max_tokens: Annotated[int, _course(min=1, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, _course(min=0, max=2, help="0 answers each prompt once, with the likeliest tokens.")] = 0.7,
    seed: Annotated[int, _course(min=0, max=2**40, help="Of the answers.")] = 0,
    dtype: Annotated[str | None, _machine(help="bfloat16 or float32.", show_default="bfloat16")] = None,
    device: Annotated[str | None, _machine(help="cpu or cuda.", show_default="cpu")] = None,
    threads: Annotated[int | None, _machine(help="CPU threads.", show_default="every core")] = None,
) -> None:
    """Let the model answer PROMPTS, as text for its exits to learn from: --data of train-exits."""
    given = {"path": model, "dtype": dtype, "device": device, "threads": threads}
    with in_one_line(f"stopped; the same command goes on after the answers in {out}"):
        from hispec_ray.distill import AT_ONCE, Wish, check_out, distill, read_prompts  # noqa: PLC0415  torch takes seconds

        check_out(out, prompts)
        tree = {"speculation": {"method": "plain"}, "scheduler": {"max_sequences": AT_ONCE}}
        try:
            settings = Settings.model_validate({"model": {name: value for name, value in given.items() if value is not None}, **tree})
        except ValidationError as error:
            raise InputError(in_words(error)) from None
        from hispec_ray.llm import LLM  # noqa: PLC0415

        llm = LLM(settings)
        wish = Wish(tokens, max_tokens, temperature, seed)
        print(f"{distill(llm, read_prompts(prompts, llm, chat, max_tokens), out, wish)} tokens in {out}")


def phrases(
    *,
    data: Annotated[list[Path], _model(help="Texts, as for train-exits; the model's own (distill) pay. May be given several times.")],
    out: Annotated[Path, _model(help="A .safetensors file, for speculation.phrases.")],
    model: Annotated[str, _model(help="A folder, a .gguf file, a Hugging Face id, or abacus.")] = DEFAULT_MODEL,
    most: Annotated[
        int, _course(min=1, max=10_000_000, help="N-grams to keep, of about 100 bytes each in a process that looks up.")
    ] = 200_000,
) -> None:
    """Count what usually follows what in texts, for a lookup to begin with."""
    with in_one_line("stopped; nothing was written"):
        from hispec_ray.phrases import write_phrases  # noqa: PLC0415  torch takes seconds

        read, kept = write_phrases(model, data, out, most)
        print(f"{kept} n-grams of {read} tokens in {out}")
