"""What the tests of clients ask."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from serving.live import MODEL

ANSWER = "The answer is 4."
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 40}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"], "additionalProperties": False},
    },
}
SUM = [{"role": "user", "content": "What is 2+2?"}]
NEXT_SUM = {"role": "user", "content": "What is 3+5?"}
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "London"]
    big: bool


def joined(chunks: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
