"""A Ray cluster of several nodes on one machine, for tests and demonstrations: `python -m cluster.local --nodes 3 --cpus 2`.

Each node is a `ray start --block` with ports, a folder and resources of its own, and all its processes are one session of the system, so
that a node can be killed whole and nothing else with it. (`ray.cluster_utils.Cluster` writes its address into the file by which every
other Ray program on the machine finds its cluster, and its nodes cannot be told apart by their processes.)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

HEALTH = {"initial_delay": 1000, "period": 500, "timeout": 1000, "failure_threshold": 3}
"""Ray's `RAY_health_check_*`, milliseconds but for the last, which notice a dead node after 1 to 2 seconds and one that hangs after at most
4.5. Ray's own (periods of 3 s, 10 s of patience, 5 failures) take 15 seconds and more."""
OBJECT_STORE_BYTES = 100_000_000
START_S = 120.0
TRIES = 3
"""Of starting a node: Ray gives up after 30 s, which a busy machine may need, and where a port was taken in between."""
STOP_S = 5.0
_BELOW_EPHEMERAL = range(20000, 32768)  # ports that the system gives to nobody who does not ask for them


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A node that was started. pid: of its `ray start`, and the number of the session that all its processes are in."""

    name: str
    resources: Mapping[str, float]
    pid: int
    folder: Path

    @property
    def pids(self) -> list[int]:
        """Its processes that live now: `ray start`, raylet, agents, workers and what those have started; the head's GCS too."""
        return processes_in([self.pid])


class LocalCluster:
    """A cluster that runs. address: for `ray.init`, `serve run --address` and `ray start --address`; nodes: the head first."""

    def __init__(self, address: str, nodes: Sequence[LocalNode]) -> None:
        self.address = address
        self.nodes = tuple(nodes)

    def node(self, name: str) -> LocalNode:
        """Raises ValueError where no node has this name."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ValueError(f"no node is named {name!r}; the names are {', '.join(node.name for node in self.nodes)}")

    def kill(self, name: str) -> None:
        """Kill -9 every process of a node, as if its machine were gone, and wait until none is left. Raises ValueError as `node`."""
        _kill([self.node(name).pid])


@contextlib.contextmanager
def local_cluster(nodes: Sequence[Mapping[str, float]], dashboard: bool = False) -> Iterator[LocalCluster]:
    """Run a cluster until the block is left.

    nodes: what each has: CPU and GPU (whole numbers, 0 where not named; described, not looked for), and resources of any other name. They
    are named node0 (the head), node1 and so on. dashboard: on the first free port from 8265.
    Raises ValueError where there is no node or an amount cannot be, RuntimeError with the end of its log where one does not come up.
    """
    if not nodes:
        raise ValueError("nodes is empty; a cluster has at least one, its head")
    options = [_options(f"nodes.{number}", resources) for number, resources in enumerate(nodes)]
    root = Path(tempfile.mkdtemp(prefix="hispec-", dir="/tmp"))  # short: Ray puts sockets into it, whose paths are at most 107 characters
    started: list[subprocess.Popen[bytes]] = []

    def start(number: int, more: Sequence[str]) -> tuple[LocalNode, str]:
        folder = root / f"node{number}"
        folder.mkdir()
        for _ in range(TRIES):
            process = _start(folder, [*options[number], *more])
            started.append(process)
            if address := _await_address(folder, process):
                return LocalNode(folder.name, dict(nodes[number]), process.pid, folder), address
            _kill([process.pid])
        raise RuntimeError(f"{folder.name} did not come up:\n{(folder / 'log').read_text()[-3000:]}")

    first = [
        "--head",
        "--port=0",
        "--no-monitor",
        f"--include-dashboard={str(dashboard).lower()}",
        f"--ray-client-server-port={_free_port()}",
    ]
    try:
        head, address = start(0, first)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # more would come up later, not sooner
            workers = [node for node, _ in pool.map(lambda number: start(number, [f"--address={address}"]), range(1, len(nodes)))]
        yield LocalCluster(address, [head, *workers])
    finally:
        _stop(started)
        shutil.rmtree(root, ignore_errors=True)


def _options(place: str, resources: Mapping[str, float]) -> list[str]:
    for name, amount in resources.items():
        if amount < 0 or (name in ("CPU", "GPU") and amount != int(amount)):
            raise ValueError(f"{place}.{name} is {amount}; it must be {'a whole number' if name in ('CPU', 'GPU') else 'a number'} from 0")
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return [
        f"--num-cpus={int(resources.get('CPU', 0))}",
        f"--num-gpus={int(resources.get('GPU', 0))}",
        f"--resources={json.dumps(others)}",
    ]


def _start(folder: Path, options: Iterable[str]) -> subprocess.Popen[bytes]:
    health = {f"RAY_health_check_{name}{'' if name == 'failure_threshold' else '_ms'}": str(value) for name, value in HEALTH.items()}
    # Where the user has a token, Ray's head asks for it unless this is said, and the other nodes do not send it.
    others = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled"), "RAY_USAGE_STATS_ENABLED": "0"}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [
                Path(sys.executable).with_name("ray"),
                "start",
                "--block",
                f"--node-name={folder.name}",
                f"--temp-dir={folder}",
                f"--object-store-memory={OBJECT_STORE_BYTES}",
                "--min-worker-port=0",
                "--max-worker-port=0",
                "--dashboard-agent-listen-port=0",
                "--include-log-monitor=false",
                *options,
            ],
            env={**os.environ, **health, **others},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _await_address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Wait until a node is part of its cluster; return the cluster's address, which it writes down, or "" where it does not come up."""
    written = folder / "ray_current_cluster"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if written.exists() and (address := written.read_text().strip()):
            return address
        time.sleep(0.05)
    return ""


def _free_port() -> int:
    """Return a port that nobody listens on, and that nobody is given by chance before it is used."""
    for port in random.SystemRandom().sample(_BELOW_EPHEMERAL, 100):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", port))
            return port
    raise RuntimeError(f"no free port from {_BELOW_EPHEMERAL.start} to {_BELOW_EPHEMERAL.stop - 1}")


def _stop(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """End nodes: the last first, politely, then by force."""
    for process in reversed(started):
        process.terminate()
    deadline = time.monotonic() + STOP_S
    sessions = [process.pid for process in started]
    while processes_in(sessions) and time.monotonic() < deadline:
        time.sleep(0.1)
    _kill(sessions)
    for process in started:  # only now: nobody else could be given these numbers before
        process.wait()


def _kill(sessions: Sequence[int]) -> None:
    """Kill -9 all processes of sessions, again until none is left: one may have been starting another."""
    while left := processes_in(sessions):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def processes_in(sessions: Sequence[int]) -> list[int]:
    """Return the processes that live in these sessions of the system."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, session, *_ = path.read_text().rpartition(")")[2].split()
            if int(session) in sessions and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def _leave(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def main() -> None:
    """Raise a cluster, say how to use it, and keep it until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m cluster.local", description="A Ray cluster of several nodes on this machine.")
    parser.add_argument("--nodes", type=int, default=3, help="how many nodes, 3 where not given")
    parser.add_argument("--cpus", type=int, default=2, help="CPUs that each node says it has, 2 where not given")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that each node says it has, whatever is there")
    parser.add_argument("--dashboard", action="store_true", help="run Ray's dashboard")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    try:
        with local_cluster([{"CPU": given.cpus, "GPU": given.gpus}] * given.nodes, given.dashboard) as cluster:
            print(f"cluster     {cluster.address}")
            for node in cluster.nodes:
                print(
                    f"{node.name:<11} {given.cpus} CPU, {given.gpus} GPU; kill it: kill -9 $(ps -o pid= -s {node.pid}); logs: {node.folder}"
                )
            print(f"serve       serve run --address {cluster.address} FILE")
            print(f"one more    ray start --address {cluster.address} --num-cpus 2 --min-worker-port 0 --max-worker-port 0")
            print("Ctrl-C ends it", flush=True)
            signal.pause()
    except (ValueError, RuntimeError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
