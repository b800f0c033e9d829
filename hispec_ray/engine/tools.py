"""Tool calls: how a model's chat template wants them written, a grammar for them, and the way back from text to calls."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from hispec_ray.grammar import JSON_OPTIONS
from hispec_ray.request import RequestError


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a call is written: `begin`, the name, `middle`, the arguments in JSON, `end`.

    tag: what in a text begins a call, and `begin` itself; none where only a whole answer can be one. close: what `end` ends with.
    Both may be tokens of their own.
    """

    name: str
    begin: str
    middle: str
    end: str
    tag: str = ""
    close: str = ""


HERMES = ToolFormat("hermes", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "<tool_call>", "</tool_call>")
"""NousResearch's Hermes, Qwen2 and Qwen3."""
LLAMA = ToolFormat("llama", '{"name": "', '", "parameters": ', "}")
"""Llama 3.1 and later, whose answer is one call or a text."""
TAGS = frozenset({HERMES.tag, HERMES.close})
"""What is read from the text of an answer, and so must stand in it, whatever a tokenizer calls it."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called; parameters is the JSON schema of its arguments. given: as the client wrote it.

    Raises RequestError where the schema is that of something else than an object.
    """

    name: str
    parameters: Mapping[str, Any]
    given: Mapping[str, Any]

    def __post_init__(self) -> None:
        kind = self.parameters.get("type", "object")
        if kind != "object":
            raise RequestError(
                f"the parameters of {self.name!r} are of type {kind!r:.80}; the type must be 'object', for so are the arguments of a call",
                "tools.function.parameters",
            )


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about calls: the tools, whether there must be one, and whether there may be several.

    named: the choice of a single tool by its name, of which OpenAI says that the answer ends with a reason of stop.
    """

    tools: tuple[Tool, ...]
    required: bool = False
    several: bool = True
    named: bool = False


def format_of(template: str | None) -> ToolFormat:
    """Return the format that a chat template teaches. Raises RequestError where it knows no tools, or none of our formats."""
    template = template or ""
    if "tools" not in template:
        raise RequestError("this model's chat template knows no tools; leave tools out or set tool_choice to none", "tools")
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if '"parameters"' in template and ("ipython" in template or "python_tag" in template):
        return LLAMA
    raise RequestError(
        "this model's chat template has tools in a format that this server does not know; it knows Hermes's and Llama 3's", "tools"
    )


def grammar_for(use: ToolUse, written: ToolFormat, special: Callable[[str], bool], spoken: Sequence[str] = ()) -> str:
    """Return the grammar of answers that may, or must, call tools; see `hispec_ray.grammar`.

    special: whether a text is one of the model's special tokens, which no text can spell. spoken: those of them that may stand in a text,
    such as what begins a thought.
    """
    several = use.several and bool(written.tag)
    own = special(written.tag)
    tag = written.tag if own else json.dumps(written.tag)
    rest = written.begin.removeprefix(written.tag)
    end = json.dumps(written.end)
    if special(written.close):
        end = f"{json.dumps(written.end.removesuffix(written.close))} {written.close}"
    rules = ["%llguidance {}"]
    bodies = []
    for number, tool in enumerate(use.tools):
        schema = dict(tool.parameters) | {"type": "object", "x-guidance": JSON_OPTIONS}
        bodies.append(f"body_{number}")
        rules.append(f"body_{number}: {json.dumps(rest + tool.name + written.middle)} %json {json.dumps(schema)} {end}")
    body = f"({' | '.join(bodies)})"
    if not written.tag:
        rules += [f"start: {body}" if use.required else f"start: {body} | TEXT?", r"TEXT: /[^{](.|\n)*/"]
    elif use.required:
        rules += ["start: call" + (r' ("\n" call)*' if several else ""), f"call: {tag} {body}"]
    else:
        rules += ["start: call* text" if several else "start: call | text", r"TEXT: /(.|\n)*/"]
        rules += [f"spoken: {' | '.join(spoken)}", "text: TEXT (spoken TEXT)*"] if spoken else ["text: TEXT"]
        if own:
            rules.append(f"call: text {tag} {body}")
        else:
            rules += [f"call: {'(TEXT spoken)* ' if spoken else ''}begun {body}", f"begun[lazy]: TEXT {tag}"]
    return "\n".join(rules)


class _At(Enum):
    TEXT = auto()
    NAME = auto()
    MIDDLE = auto()
    ARGUMENTS = auto()
    END = auto()


class CallPart(NamedTuple):
    """A piece of a call that was found in a text: the first of each has an id and the name, the others more of the arguments.

    number: the call's, from 0 on.
    """

    number: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(slots=True)
class CallReader:
    """Takes an answer apart as it comes: texts, and the calls between them. It trusts that the grammar was followed.

    calls: how many have begun. Blanks that follow a call are no text.
    """

    written: ToolFormat
    calls: int = 0
    _at: _At = _At.TEXT
    _held: str = ""  # text that may yet become what begins a call, or a name; blanks behind a call
    _skip: int = 0  # characters of `middle` or `end` still to come
    _depth: int = 0
    _quoted: bool = False
    _escaped: bool = False
    _said: bool = False  # the answer began with something else than a call
    _parts: list[CallPart] = field(default_factory=list)

    def feed(self, piece: str) -> tuple[str, list[CallPart]]:
        """Return the text that may be shown now, and pieces of calls."""
        shown: list[str] = []
        self._parts = []
        while piece:
            if self._at is _At.TEXT:
                piece = self._text(piece, shown)
            elif self._at is _At.NAME:
                name, quote, after = piece.partition('"')
                self._held += name
                piece = quote + after
                if quote:
                    self._parts.append(CallPart(self.calls, "call_" + secrets.token_hex(12), self._held, ""))
                    self.calls += 1
                    self._held, self._at, self._skip = "", _At.MIDDLE, len(self.written.middle)
            elif self._at is _At.ARGUMENTS:
                piece = self._arguments(piece)
            else:
                taken = min(self._skip, len(piece))
                piece, self._skip = piece[taken:], self._skip - taken
                if not self._skip:
                    self._at = _At.ARGUMENTS if self._at is _At.MIDDLE else _At.TEXT
        return "".join(shown), self._parts

    @property
    def complete(self) -> bool:
        """Whether the last call has all its arguments; False where there is no call."""
        return self.calls > 0 and self._at in (_At.TEXT, _At.END)

    def finish(self) -> str:
        """Return the text that was held back."""
        held = self._held if self._at is _At.TEXT else ""
        return held if held.strip() or not self.calls else ""

    def _text(self, piece: str, shown: list[str]) -> str:
        """Take text up to what begins a call; return what comes after that."""
        begin = self.written.begin
        text = self._held + piece
        self._held = ""
        if not self.written.tag:  # an answer is a call from its first character on, or none
            if self._said or self.calls:
                shown.append(text)
            elif text.startswith(begin):
                self._at = _At.NAME
                return text[len(begin) :]
            elif begin.startswith(text):
                self._held = text
            else:
                self._said = True
                shown.append(text)
            return ""
        start = text.find(begin)
        end = start if start >= 0 else len(text) - _overlap(text, begin)
        before = text[:end]
        if self.calls and not before.strip():
            if start < 0:
                self._held = text
                return ""
        elif before:
            shown.append(before)
        if start < 0:
            self._held = text[end:]
            return ""
        self._at = _At.NAME
        return text[start + len(begin) :]

    def _arguments(self, piece: str) -> str:
        """Take a JSON object's text up to its end; return what comes after it."""
        for place, character in enumerate(piece, 1):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._quoted = False
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._more(piece[:place])
                    self._at, self._skip = _At.END, len(self.written.end)
                    return piece[place:]
        self._more(piece)
        return ""

    def _more(self, arguments: str) -> None:
        last = self._parts[-1] if self._parts else None
        if last and last.number == self.calls - 1:
            self._parts[-1] = last._replace(arguments=last.arguments + arguments)
        else:
            self._parts.append(CallPart(self.calls - 1, None, None, arguments))


def _overlap(text: str, begin: str) -> int:
    """Return the length of the longest end of the text that begins `begin`."""
    return next((n for n in range(min(len(text), len(begin) - 1), 0, -1) if text.endswith(begin[:n])), 0)


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them: the arguments of earlier calls as objects. Raises RequestError where they are none."""
    return [{**m, "tool_calls": [_opened(call, f"messages.{i}") for call in m["tool_calls"]]} if m.get("tool_calls") else dict(m)
            for i, m in enumerate(messages)]  # fmt: skip


def _opened(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(
            f"{where} has a call whose arguments are {function['arguments']!r:.80}; they must be a JSON object in a string", where
        )
    return {**call, "function": {**function, "arguments": arguments}}
