"""The command line: `hispec generate` answers one prompt with a model in this process."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import yaml
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.exceptions import TyperException

from hispec_ray.config import DEFAULT_MODEL, Settings
from hispec_ray.request import RequestError, SamplingParams, TokenDelta

if TYPE_CHECKING:
    from hispec_ray.engine.detokenizer import CharacterStream
    from hispec_ray.llm import LLM

PROGRAM = "hispec"
INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended

app = typer.Typer(
    name=PROGRAM, help="Exact hierarchical speculative decoding: several exits of one model, the full model's text.", no_args_is_help=True,
    add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip


class InputError(ValueError):
    """What was typed, or stands in the file that was named, cannot be used: names it and what is valid."""


def main() -> None:
    """Run the command line. Input that cannot be used ends with one line on stderr and status 2, Ctrl-C with status 130."""
    try:
        sys.exit(app(prog_name=PROGRAM, standalone_mode=False))
    except (InputError, RequestError) as error:
        _fail(str(error))
    except TyperException as error:  # an unknown option, a value of the wrong kind
        _fail(error.format_message())


def _fail(message: str) -> NoReturn:
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM} {version('hispec-ray')}")
        raise typer.Exit


@app.callback()
def _common(
    _version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")] = False,
) -> None:
    """Options of every command."""


_MODEL, _SPECULATION, _ANSWER = "Model", "Speculation (the text is the same whatever stands here)", "Answer"


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to answer.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(help=f"A folder, a .gguf file or a Hugging Face id.  [default: {DEFAULT_MODEL}]", rich_help_panel=_MODEL)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32.  [default: bfloat16]", rich_help_panel=_MODEL)] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.  [default: every core]", rich_help_panel=_MODEL)] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A deployment file: its application's args are the settings; options given here go first.", rich_help_panel=_MODEL),
    ] = None,
    method: Annotated[str | None, typer.Option(help="plain, single or hispec.  [default: hispec]", rich_help_panel=_SPECULATION)] = None,
    draft_exit: Annotated[
        int | None, typer.Option(help="Layers of the draft exit.  [default: an eighth of the depth]", rich_help_panel=_SPECULATION)
    ] = None,
    check_exit: Annotated[
        int | None, typer.Option(help="Layers of the check exit.  [default: a quarter of the depth]", rich_help_panel=_SPECULATION)
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Guesses before a deeper level looks.  [default: 2]", rich_help_panel=_SPECULATION)
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens kept by the check exit before the full depth looks.  [default: 4]", rich_help_panel=_SPECULATION)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to write.", rich_help_panel=_ANSWER)] = 256,
    temperature: Annotated[float, typer.Option(help="0 (the likeliest token) to 2.", rich_help_panel=_ANSWER)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Repeats a sampled answer.  [default: another each time]", rich_help_panel=_ANSWER)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given up to 16 times.", show_default=False, rich_help_panel=_ANSWER)
    ] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Use the model's chat template, or not.  [default: where it has one]", rich_help_panel=_ANSWER)
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Colour each token by the level that settled it; end with figures.")] = False,
) -> None:
    """Answer PROMPT; the text appears as it is decoded."""
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, stop=tuple(stop or ()))
    settings = _settings(
        config,
        {
            "model.path": model, "model.dtype": dtype, "model.threads": threads,
            "speculation.method": method, "speculation.exits.draft": draft_exit, "speculation.exits.check": check_exit,
            "speculation.draft_tokens": draft_tokens, "speculation.window": window,
        },
    )  # fmt: skip
    try:
        llm = _load(settings)
        prompt_ids = _encode(llm, prompt, chat)
        (_traced if trace else _plain)(llm, prompt_ids, params)
    except KeyboardInterrupt:
        print()
        raise typer.Exit(INTERRUPTED) from None


def _settings(config: Path | None, options: dict[str, object]) -> Settings:
    """The settings of a deployment file, or else the defaults, under the options that were given. Raises InputError."""
    tree = _application_args(config) if config else {}
    for name, value in options.items():
        if value is not None:
            *groups, last = name.split(".")
            group = tree
            for key in groups:
                inner = group.get(key)
                group[key] = group = dict(inner) if isinstance(inner, dict) else {}
            group[last] = value
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise InputError(_in_words(error)) from None


def _application_args(path: Path) -> dict[str, Any]:
    """What stands under `args:` of the one application in a deployment file that is ours. Raises InputError."""
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"config is '{path}': {' '.join(str(error).split())}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    ours = [
        one for one in applications if isinstance(one, dict) and str(one.get("import_path", "")).startswith("hispec_ray.")
    ] if isinstance(applications, list) else []  # fmt: skip
    args = (ours[0].get("args") or {}) if len(ours) == 1 else None
    if not isinstance(args, dict):
        raise InputError(f"config is '{path}': it must be a Serve config with exactly one application of hispec_ray, whose args are a mapping")
    return args


def _in_words(error: ValidationError) -> str:
    """What is wrong with the settings: each field, its value, what is valid."""
    return "; ".join(_one_in_words(detail["type"], detail["loc"], detail) for detail in error.errors(include_url=False))


def _one_in_words(kind: str, location: tuple[int | str, ...], detail: Any) -> str:
    field = ".".join(str(part) for part in location)
    if kind == "value_error":  # raised by the settings tree itself, in full words
        return str(detail["ctx"]["error"])
    if kind == "extra_forbidden":
        group: Any = Settings
        for part in location[:-1]:
            group = group.model_fields[part].annotation
        assert issubclass(group, BaseModel)
        return f"{field} is no setting; there are {', '.join(group.model_fields)}"
    return f"{field} is {detail['input']!r}; {detail['msg'].replace('Input', 'it', 1).replace('should', 'must', 1)}"


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
        level = "full"
        for token, level in zip(delta.token_ids, delta.levels, strict=True):
            self._made.append((self._characters.push(token), level))
        if delta.finish_reason is not None:
            self._made.append((self._characters.finish(), level))
        room = len(delta.text)
        while room > 0:
            piece, level = self._made.pop(0)
            if len(piece) > room:
                self._made.insert(0, (piece[room:], level))
            if piece:
                yield piece[:room], level
            room -= len(piece)


def _traced(llm: LLM, prompt_ids: Sequence[int], params: SamplingParams) -> None:
    """Write the text with each token marked by its level, then the figures; these also where Ctrl-C ends the text."""
    from hispec_ray.engine.detokenizer import CharacterStream, Detokenizer  # noqa: PLC0415  see _load

    console = Console(highlight=False, soft_wrap=True)
    names = llm.engine.levels
    console.print(Text("  ").join(_marked(console, f" {name} ", name).append(f" {MARKS[name].meaning}") for name in names), end="\n\n")
    spans = LevelSpans(CharacterStream(Detokenizer(llm.engine.tokenizer), prompt_ids))
    watch = Watch(llm)
    try:
        for delta in llm.stream(prompt_ids, params):
            watch.note(delta)
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
        self._depths = [level.depth for level in levels_for(llm.settings.speculation, llm.engine.source.architecture.layers)]
        self._before = [replace(counts) for counts in self._engine.counts]
        self._start = self._now = self._first = time.perf_counter()
        self._tokens: Counter[str] = Counter()
        self._first_tokens = 0  # of the first delta, which the prompt's pass brings
        self._first_passes = 0

    def note(self, delta: TokenDelta) -> None:
        self._now = time.perf_counter()
        if not self._tokens:
            self._first, self._first_tokens, self._first_passes = self._now, len(delta.token_ids), self._engine.counts[-1].passes
        self._tokens.update(delta.levels)

    def table(self) -> Table:
        """A line for each level: its depth, the tokens that it settled, how many of the level below's it accepted."""
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("level", "layers", "tokens", "accepted"):
            table.add_column(heading, justify="left" if heading == "level" else "right")
        for name, depth, counts, before in zip(self._engine.levels, self._depths, self._engine.counts, self._before, strict=True):
            seen, accepted = counts.seen - before.seen, counts.accepted - before.accepted
            share = f"{accepted} of {seen} ({accepted / seen:.0%})" if seen else "-"
            table.add_row(name, str(depth), str(self._tokens[name]), share)
        return table

    def summary(self) -> str:
        """Tokens, the time to the first of them, and speed and full passes of those after it."""
        total = self._tokens.total()
        if not total:
            return "no tokens"
        line = f"{total} tokens, the first after {1000 * (self._first - self._start):.0f} ms"
        later, seconds = total - self._first_tokens, self._now - self._first
        if later < 1:
            return line
        passes = self._engine.counts[-1].passes - self._first_passes
        return f"{line}, then {later / seconds:.1f} tokens/s with {passes / later:.2f} full passes a token"
