"""What does HTTP cost? The served engine, streaming, against the same engine in this process: its first token, and each of 16 streams.

Both have the default deployment's settings but for plain decoding, in which every token is a step of its own; both write the same text.
They stream twice: as often as the default deployment sends, where an event has several tokens, and at every step.
They take turns, so neither disturbs the other, and every figure is a median of differences between figures of one turn. The client
shares the machine's cores with the server, and what it costs is counted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks import common, prompts
from benchmarks import server as servers
from benchmarks.server import Server
from hispec_ray import SamplingParams, Settings
from hispec_ray.engine.async_engine import AsyncEngine
from hispec_ray.engine.prompts import PromptEncoder
from hispec_ray.request import GenerationRequest
from hispec_ray.serving.rhythm import Rhythm

STREAMS = 16
PROMPT_WORDS = 45  # about 64 tokens
FIRST_TOKENS = 8  # of an answer whose first is timed: the engine goes on while the first is on its way
PAUSE_S = 0.05  # before a request alone, in which the last one's server comes to rest
TITLES = {"Coordinator": "engine", "Ingress": "ingress", "ProxyActor": "proxy"}
"""A part of a Ray process's title, and what it is called here."""
ROLES = (*TITLES.values(), "client", "Ray's others")


@dataclass(frozen=True, slots=True)
class Streamed:
    """What came of one request, read only when it is asked for, after the race. first: seconds from its sending to its first token.

    body: what came over HTTP; pieces: what the engine in this process said.
    """

    first: float
    body: bytes = b""
    pieces: tuple[str, ...] = ()

    def events(self) -> list[Any]:
        """Raises RuntimeError where the stream was not brought to its end."""
        *events, end = self.body.removesuffix(b"\n\n").split(b"\n\n")
        if end != b"data: [DONE]":
            raise RuntimeError(f"the stream ended with {end.decode()}")
        return [json.loads(event.removeprefix(b"data: ")) for event in events]

    def text(self) -> str:
        texts = [choice["text"] for event in self.events() for choice in event["choices"]] if self.body else self.pieces
        return "".join(texts)


@dataclass(frozen=True, slots=True)
class Turn:
    """What came of the streams that ran together. seconds: of the wall; cpu: seconds of CPU time by process."""

    seconds: float
    tokens: int
    answers: list[Streamed]
    cpu: dict[str, float]

    @property
    def milliseconds(self) -> float:
        """A token's share of the wall's time."""
        return 1e3 * self.seconds / self.tokens


class Connection:
    """A persistent connection for one stream at a time, which takes the events as bytes: a client that costs little."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    @classmethod
    async def open(cls, server: Server) -> Connection:
        return cls(*await asyncio.open_connection(server.host, server.port), f"{server.host}:{server.port}")

    async def stream(self, path: str, body: Mapping[str, Any]) -> Streamed:
        """Post a completion and read its stream. Raises RuntimeError where the server refuses it."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        start = time.perf_counter()
        self._writer.write(head.encode() + content)
        status, *_ = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        if b" 200 " not in status:
            raise RuntimeError(f"the server answered {status.decode()}")
        first = 0.0
        parts = []
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
            first = first or time.perf_counter()
        await self._reader.readexactly(2)
        return Streamed(first - start, b"".join(parts))

    def close(self) -> None:
        self._writer.close()


class Served:
    """The server's side of the contest: one application of a server."""

    def __init__(self, server: Server, connections: Sequence[Connection], prefix: str, model: str) -> None:
        self._server, self._connections, self._path, self._model = server, connections, f"{prefix.rstrip('/')}/v1/completions", model

    async def stream(self, prompt: str, tokens: int, connection: int = 0) -> Streamed:
        body = {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        return await self._connections[connection].stream(self._path, body)

    async def together(self, texts: Sequence[str], tokens: int) -> Turn:
        streams = [self.stream(text, tokens, place) for place, text in enumerate(texts)]
        return await raced(streams, tokens, self._server, "client")


class Direct:
    """The same engine in this process, asked as the coordinator asks its own."""

    def __init__(self, server: Server, engine: AsyncEngine, rhythm: Rhythm) -> None:
        self._server, self._engine, self._rhythm = server, engine, rhythm
        self._encoder = PromptEncoder(engine.tokenizer, engine.max_model_len)
        self._ids = map(str, itertools.count())

    def _request(self, text: str, tokens: int) -> GenerationRequest:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=0)
        return GenerationRequest(next(self._ids), tuple(self._encoder.text(text)), params)

    async def stream(self, text: str, tokens: int) -> Streamed:
        return await self._run(self._request(text, tokens))

    async def _run(self, request: GenerationRequest) -> Streamed:
        start = time.perf_counter()
        first = 0.0
        pieces: list[str] = []
        with self._rhythm.stream():
            async for deltas in self._engine.generate([request], self._rhythm.pause):
                pieces += [delta.text for delta in deltas if delta.text]
                if pieces:  # before that HTTP sends no event either
                    first = first or time.perf_counter()
        return Streamed(first - start, pieces=tuple(pieces))

    async def together(self, texts: Sequence[str], tokens: int) -> Turn:
        streams = [self._run(self._request(text, tokens)) for text in texts]
        return await raced(streams, tokens, self._server, "engine")


async def raced(streams: Sequence[Coroutine[Any, Any, Streamed]], tokens: int, server: Server, here: str) -> Turn:
    """Run streams of so many tokens together. here: what this process is in the race; the server's are looked at even where it idles."""

    def cpu() -> dict[str, float]:
        found = cpu_seconds(server.pid)
        return found | {here: found[here] + time.process_time()}

    before = cpu()
    start = time.perf_counter()
    answers = await asyncio.gather(*streams)
    seconds = time.perf_counter() - start
    after = cpu()
    return Turn(seconds, tokens * len(streams), answers, {name: after[name] - before[name] for name in ROLES})


def cpu_seconds(root: int) -> dict[str, float]:
    """Return the CPU time that a process and its descendants have taken, by what they are."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        pid = int(path.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    found = dict.fromkeys(ROLES, 0.0)
    for pid in parents:
        forebear = pid
        while forebear != root and forebear in parents:
            forebear = parents[forebear]
        if forebear == root:
            found[_role(pid)] += ticks[pid] / os.sysconf("SC_CLK_TCK")
    return found


def _role(pid: int) -> str:
    try:
        title = Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        title = ""
    return next((name for part, name in TITLES.items() if title.startswith("ray::") and part in title), ROLES[-1])


def prompt(number: int) -> str:
    """Return a text of about 64 tokens that begins like no other's, so that no cached block begins it."""
    words = " ".join(prompts.mixed(12, number)).split()
    return f"{10_000 + number}. " + " ".join(words[:PROMPT_WORDS])


def first_token(runs: int, run: Callable[..., Streamed], served: Served, direct: Direct) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds to the first token over HTTP and in this process, by kind of prompt, turn by turn."""

    def timed(side: Served | Direct, numbers: Iterator[int]) -> float:
        time.sleep(PAUSE_S)
        return 1e3 * run(side.stream(prompt(next(numbers)), FIRST_TOKENS)).first

    def contestants(numbers: Callable[[], Iterator[int]]) -> dict[str, Callable[[], float]]:
        return {"http": partial(timed, served, numbers()), "engine": partial(timed, direct, numbers())}

    kinds = {"fresh": lambda: itertools.count(1000), "cached": lambda: itertools.repeat(0)}
    turns = {kind: common.alternate(runs, contestants(numbers)) for kind, numbers in kinds.items()}
    rows = [
        (kind, *(statistics.median(times[side]) for side in ("engine", "http")), difference(times["http"], times["engine"]))
        for kind, times in turns.items()
    ]
    common.table("Time to the first token, one stream, ms", ("prompt", "engine", "HTTP", "difference"), rows)
    return turns


def together(
    runs: int, tokens: int, run: Callable[..., Turn], sides: Mapping[str, tuple[Served, Direct]]
) -> dict[str, dict[str, list[Turn]]]:
    """Return what came of the streams over HTTP and in this process, by how often they may send, turn by turn.

    Raises RuntimeError where the two wrote different text: they would not have done the same work.
    """
    texts = [prompt(1 + number) for number in range(STREAMS)]
    turns: dict[str, dict[str, list[Turn]]] = {name: {"http": [], "engine": []} for name in sides}

    def taken(into: list[Turn], side: Served | Direct) -> float:
        into.append(run(side.together(texts, tokens)))
        return into[-1].milliseconds

    contestants: dict[str, Callable[[], float]] = {}
    for name, (served, direct) in sides.items():
        contestants[f"{name} http"] = partial(taken, turns[name]["http"], served)
        contestants[f"{name} engine"] = partial(taken, turns[name]["engine"], direct)
    common.alternate(runs, contestants)
    written = {tuple(answer.text() for answer in turn.answers) for paths in turns.values() for all in paths.values() for turn in all}
    if len(written) != 1:
        raise RuntimeError("the server and the engine wrote different texts")
    return {name: {path: all[1:] for path, all in paths.items()} for name, paths in turns.items()}  # the first turn warms up


def difference(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a - b for a, b in zip(over, under, strict=True))


def overhead(paths: Mapping[str, Sequence[Turn]]) -> float:
    """Milliseconds of the wall that streaming over HTTP costs a token."""
    return difference(*([turn.milliseconds for turn in paths[path]] for path in ("http", "engine")))


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """What is reported of one path: medians, and CPU milliseconds a token by process."""
    tokens = turns[0].tokens
    return {
        "tokens_per_second": statistics.median(turn.tokens / turn.seconds for turn in turns),
        "ms_per_token": statistics.median(turn.milliseconds for turn in turns),
        "events_per_stream": statistics.median(
            sum(len(answer.events()) for answer in turn.answers if answer.body) / STREAMS for turn in turns
        ),
        "tokens_per_event": statistics.median(
            tokens / events if (events := sum(len(answer.events()) for answer in turn.answers if answer.body)) else 0 for turn in turns
        ),
        "bytes_per_token": statistics.median(sum(len(answer.body) for answer in turn.answers) / tokens for turn in turns),
        "cpu_ms_per_token": {name: statistics.median(1e3 * turn.cpu[name] / tokens for turn in turns) for name in ROLES},
    }


def report(turns: Mapping[str, Mapping[str, Sequence[Turn]]]) -> dict[str, dict[str, Any]]:
    """Print what came of the streams, and return it by path."""
    found = {}
    for name, paths in turns.items():
        found[f"engine, {name}"] = figures(paths["engine"]) | {"overhead_ms": None}
        found[f"HTTP, {name}"] = figures(paths["http"]) | {"overhead_ms": overhead(paths)}
    keys = ("tokens_per_second", "ms_per_token", "overhead_ms", "tokens_per_event", "bytes_per_token")
    rows = [(path, *("-" if line[key] in (None, 0) else line[key] for key in keys)) for path, line in found.items()]
    tokens = next(iter(turns.values()))["http"][0].tokens
    title = f"{STREAMS} streams of {tokens // STREAMS} tokens"
    common.table(title, ("path", "tokens/s", "ms/token", "overhead", "tokens/event", "bytes/token"), rows)
    cpu = [(path, *line["cpu_ms_per_token"].values()) for path, line in found.items()]
    common.table("CPU time by process, ms a token", ("path", *ROLES, "all"), [(*row, sum(row[1:])) for row in cpu])
    return found


def draw(out: Path, firsts: Mapping[str, Mapping[str, Sequence[float]]], streams: Mapping[str, Mapping[str, Any]]) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10, 4), width_ratios=(2, 2, 3), layout="constrained")
    for offset, (side, label) in enumerate((("engine", "engine"), ("http", "over HTTP"))):
        values = [statistics.median(times[side]) for times in firsts.values()]
        left.bar_label(left.bar([i + 0.4 * offset for i in range(len(values))], values, width=0.38, label=label), fmt="%.0f")
    left.set_xticks([0.2 + i for i in range(len(firsts))], [f"{kind}\nprompt" for kind in firsts])
    left.set_ylabel("ms")
    left.set_title("Time to the first token", loc="left")
    left.set_ylim(top=1.25 * left.get_ylim()[1])
    left.legend(frameon=False, loc="upper right")
    labels = [path.replace(", ", "\n") for path in streams]
    colours = ["C1" if path.startswith("HTTP") else "C0" for path in streams]
    bars = middle.barh(labels, [line["ms_per_token"] for line in streams.values()], color=colours)
    middle.bar_label(bars, fmt="%.2f", padding=2)
    middle.set_xlim(right=1.2 * middle.get_xlim()[1])
    middle.set_xlabel("wall time, ms")
    middle.set_title(f"A token of {STREAMS} streams", loc="left")
    reached = [0.0] * len(streams)
    for name, colour in zip(ROLES, ("C0", "C3", "C2", "C4", "C7"), strict=True):
        values = [line["cpu_ms_per_token"][name] for line in streams.values()]
        right.barh(labels, values, left=reached, label=name, color=colour)
        reached = [a + b for a, b in zip(reached, values, strict=True)]
    right.set_yticks(range(len(labels)), [""] * len(labels))
    right.set_ylim(top=len(labels) + 0.6)
    right.set_xlabel("CPU time of all cores, ms")
    right.set_title("The same token, by process", loc="left")
    right.legend(frameon=False, ncols=3, loc="upper left", fontsize=9)
    middle.set_ylim(right.get_ylim())
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "http.png", dpi=100)
    plt.close(figure)


def main() -> None:
    options = common.parser((__doc__ or "").splitlines()[0], "http")
    options.add_argument("--runs", type=int, default=5, help="turns of the streams; three times as many of the first token")
    options.add_argument("--tokens", type=int, default=96, help="of each stream")
    args = options.parse_args()
    runs, tokens = (2, 24) if args.quick else (args.runs, args.tokens)
    changes = {"model": {"threads": args.threads}, "speculation": {"method": "plain"}, "cache": {"blocks": 1024}}
    given = Settings.model_validate(servers.settings(changes))
    default = given.server.stream_interval_ms
    at_once = {"stream_interval_ms": 0, "stream_events_per_s": 1e6}
    applications = {"/": servers.settings(changes), "/every": servers.settings(changes | {"server": at_once})}
    engine = AsyncEngine.from_settings(given)
    with servers.running(servers.side_by_side(applications)) as server, asyncio.Runner() as runner:
        connections = [runner.run(Connection.open(server)) for _ in range(STREAMS)]
        named = given.model.served_name or given.model.path
        rhythms = (Rhythm(default / 1000, given.server.stream_events_per_s), Rhythm(0.0, math.inf))
        names = ("default", "every step")
        sides = {
            name: (Served(server, connections, prefix, named), Direct(server, engine, rhythm))
            for name, prefix, rhythm in zip(names, applications, rhythms, strict=True)
        }
        firsts = first_token(3 * runs, runner.run, *sides[names[0]])
        turns = together(runs, tokens, runner.run, sides)
        for connection in connections:
            connection.close()
    engine.close()
    streams = report(turns)
    draw(args.out, firsts, streams)
    headline = {
        "first_token_overhead_ms": round(difference(firsts["fresh"]["http"], firsts["fresh"]["engine"]), 2),
        "per_token_overhead_ms": round(overhead(turns[names[0]]), 3),
        "per_token_overhead_every_step_ms": round(overhead(turns[names[1]]), 3),
        "tokens_per_event": round(streams[f"HTTP, {names[0]}"]["tokens_per_event"], 1),
    }
    details = {
        "threads": given.model.thread_count(),
        "first_token_ms": firsts,
        "first_token_overhead_cached_ms": difference(firsts["cached"]["http"], firsts["cached"]["engine"]),
        "streams": streams,
        "ms_per_token": {name: {path: [turn.milliseconds for turn in all] for path, all in paths.items()} for name, paths in turns.items()},
    }
    common.finish("http", args.out, headline, details)


if __name__ == "__main__":
    main()
