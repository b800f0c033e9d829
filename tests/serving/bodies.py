"""Bodies for tests of the protocol, and how to have them read."""

from __future__ import annotations

import json
from typing import Any

from hispec_ray.serving.protocol import Checked, read_chat, read_completion

COMPLETION: dict[str, Any] = {"model": "M", "prompt": "Hi"}
CHAT: dict[str, Any] = {"model": "M", "messages": [{"role": "user", "content": "Hi"}]}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
NAN = float("nan")


def completion(**fields: Any) -> Checked:
    return read_completion(json.dumps(COMPLETION | fields).encode(), "M")


def chat(**fields: Any) -> Checked:
    return read_chat(json.dumps(CHAT | fields).encode(), "M")
