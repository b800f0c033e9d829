"""One server for every test that asks one over HTTP."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from live import ROOT, is_well, wait_for

START_S = 180


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The deployment file's server on a free port, in fp32, with a small cache and a chat template that knows tools; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    deployment = yaml.safe_load((ROOT / "deployments" / "hispec.yaml").read_text())
    deployment["http_options"] = {"host": "127.0.0.1", "port": port}
    args = deployment["applications"][0]["args"]
    args["model"] |= {"dtype": "float32", "max_model_len": 2048, "chat_template": str(Path(__file__).with_name("tools.jinja"))}
    args["cache"] = {"blocks": 256}
    file = tmp_path_factory.mktemp("deployment") / "hispec.yaml"
    file.write_text(yaml.safe_dump(deployment))
    ray_folder = tempfile.mkdtemp(prefix="hispec-", dir="/tmp")  # of its own, so that no other cluster is joined; short, for its sockets
    log = (file.parent / "log").open("w+")
    serve = subprocess.Popen(
        [Path(sys.executable).with_name("serve"), "run", file],
        cwd=ROOT,
        env={**os.environ, "RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: is_well(url) or serve.poll() is not None, START_S, lambda: Path(log.name).read_text()[-4000:])
        assert serve.poll() is None, f"serve run has ended: {Path(log.name).read_text()[-4000:]}"
        yield url
    finally:
        serve.send_signal(signal.SIGINT)
        try:
            serve.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(serve.pid, signal.SIGKILL)
        log.close()
        shutil.rmtree(ray_folder, ignore_errors=True)
