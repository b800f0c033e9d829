"""One sequence on its way through the scheduler: its tokens, how far they have been run, and on which blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from hispec_ray.request import Shape


class Status(Enum):
    """Where a sequence stands."""

    WAITING = auto()  # in the queue, without blocks: new or preempted
    RUNNING = auto()  # holds blocks
    FINISHED = auto()  # ended or aborted, without blocks


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its continuation. There are no phases: `full` chases len(tokens), and a token is chosen when one row is left to run.

    id: unique among the sequences that a scheduler knows.
    tokens: the prompt, at least one token, then what was committed; this object owns the list.
    limit: most tokens in all, prompt included; more than the prompt has. The last token's row is never run,
        so at most limit - 1 positions of the cache are needed.
    full: rows of tokens that have been run through the full depth; positions below it are final, those from it on are rewritten.
    blocks: the block table; a new tuple when it grows, so that plans may keep it.
    temperature, seed, shape, logprobs: see `SequencePlan`.
    prompt_logprobs: as logprobs, for the prompt's tokens. told: tokens of the prompt that need none or have theirs.
    speculates: whether others than the full depth may guess for it. ends: tokens that end it.
    arrival: place in the order in which sequences were added, kept over preemptions.
    cached: rows that the prefix cache spared this sequence when it was first admitted; None before.

    Raises ValueError when the prompt is empty or limit leaves no token to choose.
    """

    id: int
    request_id: str
    tokens: list[int]
    limit: int
    temperature: float
    seed: int
    shape: Shape | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculates: bool = True
    ends: frozenset[int] = frozenset()
    prompt_len: int = field(init=False)
    full: int = field(default=0, init=False)
    blocks: tuple[int, ...] = field(default=(), init=False)
    status: Status = field(default=Status.WAITING, init=False)
    arrival: int = field(default=-1, init=False)
    cached: int | None = field(default=None, init=False)
    told: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)
        if not 1 <= self.prompt_len < self.limit:
            raise ValueError(f"sequence {self.id} has {self.prompt_len} prompt tokens and a limit of {self.limit} in all")
        if self.prompt_logprobs is None:
            self.told = self.prompt_len

    @property
    def unrun(self) -> int:
        """Known tokens whose rows have not been run: at least 1, the token that was committed last."""
        return len(self.tokens) - self.full
