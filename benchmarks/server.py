"""`serve run` for benchmarks and tests: a deployment on a free port, in a Ray cluster of its own."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml

from cluster.local import processes_in

ROOT = Path(__file__).parent.parent
START_S = 180
STOP_S = 60


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs. pid: of `serve run`, whose descendants are all of Ray's processes."""

    host: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def deployment() -> dict[str, Any]:
    """Return the default deployment file."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "deployments" / "hispec.yaml").read_text())
    return content


def settings(changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the default deployment's settings with some changed. changes: group, key, value; None leaves a key as it was."""
    found: dict[str, Any] = deployment()["applications"][0].get("args", {})
    for group, values in changes.items():
        found[group] = found.get(group, {}) | {key: value for key, value in values.items() if value is not None}
    return found


def side_by_side(applications: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the default deployment with its application once for each route prefix, with these settings.

    They share a proxy; those that nobody asks cost nothing but memory.
    """
    content = deployment()
    one = content["applications"][0]
    for options in one["deployments"]:  # so that one core is enough to start them
        options["ray_actor_options"]["num_cpus"] /= len(applications)
    content["applications"] = [
        copy.deepcopy(one) | {"name": f"{one['name']}{number}", "route_prefix": prefix, "args": dict(arguments)}
        for number, (prefix, arguments) in enumerate(applications.items())
    ]
    return content


@contextlib.contextmanager
def running(content: Mapping[str, Any]) -> Iterator[Server]:
    """Run what a deployment file says, on a free port in place of its own, until the block is left. Only from the main thread.

    Raises RuntimeError, with the end of its log, when an application does not come up.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host, port = free.getsockname()
    http = {**content.get("http_options", {}), "host": host, "port": port, "keep_alive_timeout_s": 600}
    # A short path, for its sockets, and none that another cluster uses: `serve run` would join it.
    folder = Path(tempfile.mkdtemp(prefix="hispec-", dir="/tmp"))
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump({**content, "http_options": http}))
    before = signal.signal(signal.SIGTERM, _leave)
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("serve"), "run", path],
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            server = Server(host, port, process.pid)
            for application in content["applications"]:
                _await_health(f"{server.url}{application['route_prefix'].rstrip('/')}/health", process, Path(log.name))
            yield server
        finally:
            process.send_signal(signal.SIGTERM)  # a shell may have had it ignore Ctrl-C
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            _end_session(process.pid)
            shutil.rmtree(folder, ignore_errors=True)
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    """End as Ctrl-C does, so that the server is not left behind."""
    sys.exit(128 + number)


def _await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not come up:\n{log.read_text()[-3000:]}")


def _end_session(session: int) -> None:
    """Wait for the processes of a session, all of Ray's, to end; they write to its folder until then. Kill those that stay."""
    deadline = time.monotonic() + 10
    while (left := processes_in([session])) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
