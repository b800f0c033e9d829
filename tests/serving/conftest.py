"""One server for every test that asks one over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import server as servers


@pytest.fixture(scope="package")
def server() -> Iterator[str]:
    """The deployment file's server in fp32, with a small cache and a chat template that knows tools; its address.

    Its pace is fixed: it guesses in every round, whatever that costs on the machine.
    """
    content = servers.deployment()
    args = content["applications"][0]["args"]
    args["model"] |= {"dtype": "float32", "max_model_len": 2048, "chat_template": str(Path(__file__).with_name("tools.jinja"))}
    args["speculation"]["pace"] = "fixed"
    args["cache"] = {"blocks": 256}
    with servers.running(content) as running:
        yield running.url
