"""The command line: `hispec generate` answers one prompt with a model in this process; the other commands come from `commands/`."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.exceptions import TyperException

from hispec_ray.commands import doctor, plan, training, tuning
from hispec_ray.commands.errors import INTERRUPTED, InputError
from hispec_ray.commands.settings import settings_from
from hispec_ray.config import DEFAULT_MODEL, Settings
from hispec_ray.request import RequestError, SamplingParams, TokenDelta

if TYPE_CHECKING:
    from hispec_ray.engine.detokenizer import CharacterStream
    from hispec_ray.llm import LLM

PROGRAM = "hispec"

app = typer.Typer(
    help="Exact hierarchical speculative decoding: shallow exits of a model guess, the full model's text comes out.",
    no_args_is_help=True, add_completion=False,
)  # fmt: skip


def main() -> None:
    """Run the command line. Input that cannot be used ends with one line on stderr and status 2, Ctrl-C with status 130."""
    try:
        sys.exit(app(prog_name=PROGRAM, standalone_mode=False))
    except (InputError, RequestError) as error:
        _fail(str(error))
    except TyperException as error:  # an unknown option, a value of the wrong kind; empty where it has shown the help instead
        if not str(error):
            sys.exit(2)
        _fail(error.format_message())


def _fail(message: str) -> NoReturn:
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM} {metadata.version('hispec-ray')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options of every command."""


_model = partial(typer.Option, rich_help_panel="Model")
_decoding = partial(typer.Option, rich_help_panel="Decoding: the text is the same whatever stands here")
_answer = partial(typer.Option, rich_help_panel="Answer")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to answer.")],
    *,
    model: Annotated[str | None, _model(help="A folder, a .gguf file, a Hugging Face id, or abacus.", show_default=DEFAULT_MODEL)] = None,
    dtype: Annotated[str | None, _model(help="bfloat16 or float32.", show_default="bfloat16")] = None,
    threads: Annotated[int | None, _model(help="CPU threads.", show_default="every core")] = None,
    config: Annotated[Path | None, _model(help="Take the settings of a deployment file; options given here override them.")] = None,
    method: Annotated[str | None, _decoding(help="plain, single or hispec.", show_default="hispec")] = None,
    drafter: Annotated[str | None, _decoding(help="Who guesses: exit, lookup or mixed.", show_default="exit")] = None,
    draft_exit: Annotated[int | None, _decoding(help="Layers of the draft exit.", show_default="an eighth of the depth")] = None,
    check_exit: Annotated[int | None, _decoding(help="Layers of the check exit.", show_default="a quarter of the depth")] = None,
    draft_tokens: Annotated[int | None, _decoding(help="Guesses before a deeper level looks.", show_default="2")] = None,
    window: Annotated[int | None, _decoding(help="Tokens kept by the check exit before the full depth looks.", show_default="4")] = None,
    phrases: Annotated[str | None, _decoding(help="A file of phrases for a lookup.", show_default="none")] = None,
    pace: Annotated[str | None, _decoding(help="auto guesses as far as it pays, fixed always that far.", show_default="auto")] = None,
    max_tokens: Annotated[int, _answer(help="Most tokens to write.")] = 256,
    temperature: Annotated[float, _answer(help="From 0, always the likeliest token, to 2.")] = 0.0,
    seed: Annotated[int | None, _answer(help="Repeats a sampled answer.", show_default="another each time")] = None,
    stop: Annotated[list[str] | None, _answer(help="End before this text; may be given up to 16 times.")] = None,
    chat: Annotated[bool | None, _answer("--chat/--raw", help="Use the model's chat template.", show_default="where it has one")] = None,
    trace: Annotated[bool, _answer("--trace", help="Mark each token by the level that settled it; end with figures.")] = False,
) -> None:
    """Answer PROMPT; the text appears as it is decoded."""
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, stop=tuple(stop or ()))
    settings = settings_from(
        config,
        {
            "model.path": model, "model.dtype": dtype, "model.threads": threads,
            "speculation.method": method, "speculation.drafter": drafter,
            "speculation.exits.draft": draft_exit, "speculation.exits.check": check_exit,
            "speculation.draft_tokens": draft_tokens, "speculation.window": window,
            "speculation.phrases": phrases, "speculation.pace": pace,
        },
    )  # fmt: skip
    try:
        llm = _load(settings)
        prompt_ids = _encode(llm, prompt, chat)
        (_traced if trace else _plain)(llm, prompt_ids, params)
    except KeyboardInterrupt:
        print()
        raise typer.Exit(INTERRUPTED) from None


@app.command()
def check(file: Annotated[Path, typer.Argument(metavar="FILE", help="A deployment file, as `serve run` takes it.")]) -> None:
    """Say what is wrong with a deployment FILE before a server is started: its settings, its model, the exits, phrases, the keys."""
    settings = settings_from(file, {})
    from hispec_ray.engine.prompts import read_template  # noqa: PLC0415  torch takes seconds, which a mistyped setting need not wait for
    from hispec_ray.model.weights import open_model  # noqa: PLC0415
    from hispec_ray.serving.keys import read_keys  # noqa: PLC0415
    from hispec_ray.shard.shard import drafter_for, heads_for, levels_for, looks_up  # noqa: PLC0415
    from hispec_ray.shard.stages import deepest_exit, stages_of  # noqa: PLC0415

    try:
        source = open_model(settings.model.path)
        levels = levels_for(settings.speculation, source.architecture.layers)
        heads_for(settings, source)  # the files are read
        drafter_for(settings.speculation, source.architecture.vocabulary)
        if settings.parallel:
            stages_of(settings.parallel, source.architecture, deepest_exit(settings.speculation, source.architecture.layers))
        read_keys(settings.server.api_keys_file, settings.server.api_keys_variable)
        if settings.model.chat_template is not None:
            read_template(settings.model.chat_template)
    except ValueError as error:
        raise InputError(str(error)) from error
    depths = ", ".join(f"{level.name} {level.depth}" for level in levels)
    speculation = settings.speculation
    words = [f"{speculation.method} ({depths} layers)"]
    if looks_up(speculation):
        words.append(speculation.drafter + (f" with phrases of {speculation.phrases}" if speculation.phrases else ""))
    if speculation.exits.heads:
        words.append(f"exits of {speculation.exits.heads}")
    print(f"{file}: {source.name}, {', '.join(words)}")


app.command()(plan.plan)
app.command()(doctor.doctor)
app.command()(training.train_exits)
app.command()(training.distill)
app.command()(training.phrases)
app.command()(tuning.tune)


def _load(settings: Settings) -> LLM:
    """Load the model. Raises InputError where the settings do not fit it or the machine."""
    if sys.stderr.isatty():
        print(f"Loading {settings.model.path}", file=sys.stderr)
    from hispec_ray.llm import LLM  # noqa: PLC0415  torch takes seconds, which a mistyped option need not wait for

    try:
        return LLM(settings)
    except ValueError as error:
        raise InputError(str(error)) from error


def _encode(llm: LLM, prompt: str, chat: bool | None) -> tuple[int, ...]:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InputError("prompt has bytes that are not text; it must be valid UTF-8") from None
    if chat is None:
        chat = llm.engine.tokenizer.chat_template is not None
    return llm.encode_chat([{"role": "user", "content": prompt}]) if chat else llm.encode(prompt)


def _plain(llm: LLM, prompt_ids: Sequence[int], params: SamplingParams) -> None:
    """Write the text to stdout and nothing else."""
    for delta in llm.stream(prompt_ids, params):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    sys.stdout.write("\n")


@dataclass(frozen=True, slots=True)
class Mark:
    """How tokens of a level look: a style where the terminal has colours, otherwise a mark before and after."""

    meaning: str
    style: str
    before: str
    after: str


# Black on a light colour reads on dark and on light backgrounds; blue and amber also where red and green look alike.
MARKS = {
    "lookup": Mark("looked up and accepted", "black on #b9e6b3", "~", "~"),
    "draft": Mark("drafted and accepted", "black on #9cd3ff", "‹", "›"),
    "check": Mark("put in by the check exit", "black on #ffd166", "«", "»"),
    "full": Mark("the full depth's own", "", "", ""),
}


class LevelSpans:
    """Says, for a text that comes in deltas, which level settled which piece of it.

    Text that the stream holds back (an unfinished character, what may become a stop string) keeps the level of the token that made it.
    """

    def __init__(self, characters: CharacterStream) -> None:
        self._characters = characters
        self._made: list[tuple[str, str]] = []  # pieces made but not yet shown, with their levels

    def split(self, delta: TokenDelta) -> Iterator[tuple[str, str]]:
        """Yield the delta's text in pieces, each with its level's name."""
        self._made += [(self._characters.push(token), level) for token, level in zip(delta.token_ids, delta.levels, strict=True)]
        if delta.finish_reason is not None and delta.levels:
            self._made.append((self._characters.finish(), delta.levels[-1]))
        room = len(delta.text)
        while room > 0:
            piece, level = self._made.pop(0)
            if len(piece) > room:
                self._made.insert(0, (piece[room:], level))
            if piece:
                yield piece[:room], level
            room -= len(piece)


def _traced(llm: LLM, prompt_ids: Sequence[int], params: SamplingParams) -> None:
    """Write the text with each token marked by its level, then the figures, also where Ctrl-C ends the text."""
    from hispec_ray.engine.detokenizer import CharacterStream, Detokenizer  # noqa: PLC0415  see _load

    console = Console(highlight=False, soft_wrap=True)
    spans = LevelSpans(CharacterStream(Detokenizer(llm.engine.tokenizer), prompt_ids))
    watch = Watch(llm)
    deltas = watch.follow(llm.stream(prompt_ids, params))
    first = next(deltas)  # a request that is refused is refused here, before anything is written
    legend = [_marked(console, f" {name} ", name).append(f" {MARKS[name].meaning}") for name in llm.engine.levels]
    console.print(Text("   ").join(legend), end="\n\n")
    try:
        for delta in chain([first], deltas):
            for piece, level in spans.split(delta):
                _show(console, piece, level)
    finally:
        console.print(end="\n\n")
        console.print(watch.table())
        console.print(watch.summary())


def _marked(console: Console, piece: str, level: str) -> Text:
    mark = MARKS[level]
    if console.color_system is None or console.no_color:
        return Text(f"{mark.before}{piece}{mark.after}")
    return Text.assemble((piece, mark.style))


def _show(console: Console, piece: str, level: str) -> None:
    """Print a piece; its line ends stay without style, because terminals would colour the rest of the line."""
    for line in piece.splitlines(keepends=True):
        text = line.rstrip("\r\n")
        if text:
            console.print(_marked(console, text, level), end="")
        if text != line:
            console.print()


class Watch:
    """Counts and times one stream of an engine that has nothing else to do."""

    def __init__(self, llm: LLM) -> None:
        from hispec_ray.shard.shard import levels_for  # noqa: PLC0415  see _load

        self._engine = llm.engine
        levels = levels_for(llm.settings.speculation, llm.engine.source.architecture.layers)
        self._depths = {level.name: str(level.depth) for level in levels}
        self._before = [replace(counts) for counts in self._engine.counts]
        self._tokens: Counter[str] = Counter()
        self._seconds = 0.0  # spent in the engine, not in showing what it made
        self._first_seconds = 0.0
        self._first_tokens = 0  # of the first delta, which the prompt's passes bring
        self._first_passes = 0

    def follow(self, deltas: Iterator[TokenDelta]) -> Iterator[TokenDelta]:
        """Pass the stream on, taking note of each delta."""
        while True:
            start = time.perf_counter()
            delta = next(deltas, None)
            if delta is None:
                return
            self._seconds += time.perf_counter() - start
            if not self._tokens:
                self._first_seconds, self._first_tokens = self._seconds, len(delta.token_ids)
                self._first_passes = self._engine.counts[-1].passes
            self._tokens.update(delta.levels)
            yield delta

    def table(self) -> Table:
        """A line for each level: its depth, the tokens that it settled, how many of the level below's it accepted."""
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("level", "layers", "tokens", "accepted"):
            table.add_column(heading, justify="left" if heading == "level" else "right")
        for name, counts, before in zip(self._engine.levels, self._engine.counts, self._before, strict=True):
            seen, accepted = counts.seen - before.seen, counts.accepted - before.accepted
            share = f"{accepted} of {seen} ({accepted / seen:.0%})" if seen else "-"
            table.add_row(name, self._depths.get(name, "-"), str(self._tokens[name]), share)
        return table

    def summary(self) -> str:
        """Tokens, the time to the first of them, and speed and full passes of those after it."""
        total = self._tokens.total()
        later, seconds = total - self._first_tokens, self._seconds - self._first_seconds
        line = f"{total} tokens" + (f", the first after {1000 * self._first_seconds:.0f} ms" if total else "")
        if later:
            passes = self._engine.counts[-1].passes - self._first_passes
            line += f", then {later / seconds:.1f} tokens/s with {passes / later:.2f} full passes a token"
        return line
