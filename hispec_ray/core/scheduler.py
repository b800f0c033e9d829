"""Who runs in the next step, on which blocks: first come, first served, with the youngest giving way when blocks run out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from itertools import chain, pairwise

from hispec_ray.core.block_pool import BlockPool, IntegrityError
from hispec_ray.core.plan import SequencePlan, StepPlan, Told
from hispec_ray.core.sequence import Sequence, Status
from hispec_ray.request import QueueFullError, RequestError


class Scheduler:
    """Turns the sequences that wait and run into one StepPlan at a time.

    The engine's loop: `schedule`, run the plan, `update` each of its sequences; `add` and `abort` in between.

    Every running sequence arrived before every waiting one: admission takes the queue's head and never overtakes, preemption
    takes the last arrived and puts it back at the head. Running sequences are served in that order, and one that finds no block
    for a single row preempts those behind it one by one; the last arrived has nobody behind it and sits the step out, holding
    its blocks until somebody older wants them. So the oldest always gets a row: it may take every block of the pool, and `add`
    refused what that cannot hold. As it runs on it finishes, and the next one is the oldest: no livelock.

    Nothing here can change a text: a plan only says which rows run when, and a preempted sequence replays its own tokens.
    """

    def __init__(self, pool: BlockPool, max_sequences: int, max_batch_rows: int, max_queued: int, window: int, branches: int = 0) -> None:
        """Schedule onto `pool`.

        max_sequences: most sequences that run at once.
        max_batch_rows: most rows of chunks (prompts and replays) in a step; the one row of a decoding sequence is not counted.
        max_queued: waiting sequences from which on `add` refuses.
        window: most tentative tokens of a round; 0 for plain decoding.
        branches: blocks that a decoding sequence holds beside its table where the pool has plenty, for second candidates.
        Raises ValueError when one is out of range.
        """
        if min(max_sequences, max_batch_rows, max_queued) < 1 or min(window, branches) < 0:
            raise ValueError(
                f"max_sequences {max_sequences}, max_batch_rows {max_batch_rows}, max_queued {max_queued} must be 1 or more, "
                f"window {window} and branches {branches} 0 or more"
            )
        self.pool = pool
        self.max_sequences = max_sequences
        self.max_batch_rows = max_batch_rows
        self.max_queued = max_queued
        self.window = window
        self.branches = branches
        self.preemptions = 0
        """Times that a sequence gave its blocks up, since the start."""
        self.cached_rows = 0
        """Rows that the prefix cache spared, replays after a preemption included, since the start."""
        self._arrivals = 0
        self._running: list[Sequence] = []  # in order of arrival
        self._waiting: deque[Sequence] = deque()  # in order of arrival, all after the running ones
        self._sequences: dict[int, Sequence] = {}
        self._planned: dict[int, SequencePlan] = {}  # of the plans in flight, not yet updated
        self._leaving: set[int] = set()  # of these, aborted ones
        self._told: set[int] = set()  # running sequences whose tokens the shards know
        self._ended: list[int] = []  # that were told, and gave their blocks up since the last plan
        self._taken: tuple[int, ...] = ()  # of these, what the last plan carries

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences in the queue, new and preempted."""
        return len(self._waiting)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The ids of the sequences of plans in flight."""
        return tuple(self._planned)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` would return a plan."""
        return bool(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence at the queue's end.

        Raises RequestError when the whole pool could not hold it, QueueFullError when max_queued sequences wait already, and
        ValueError when its id is taken or it is not new. Nothing has changed then.
        """
        pool = self.pool
        if sequence.id in self._sequences or sequence.status is not Status.WAITING or sequence.blocks:
            raise ValueError(f"sequence {sequence.id} is known already")
        needed = pool.blocks_for(sequence.limit - 1)
        if needed > pool.blocks:
            most = pool.blocks * pool.block_size + 1
            answer = sequence.limit - sequence.prompt_len
            raise RequestError(
                f"a prompt of {sequence.prompt_len} tokens and an answer of {answer} need {needed} cache blocks "
                f"of {pool.block_size} tokens; the cache has {pool.blocks}, so both together must be at most {most} tokens",
                "prompt" if sequence.prompt_len >= most else "max_tokens",
                "context_length_exceeded",
            )
        if len(self._waiting) >= self.max_queued:
            raise QueueFullError(f"{len(self._waiting)} requests wait already; at most {self.max_queued} may (scheduler.max_queued)")
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._sequences[sequence.id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> list[Sequence]:
        """Drop the request's sequences, waiting or running, free their blocks, and return them (none when unknown).

        The blocks of one that is in flight, which its plan may still write into, are free when that is updated: `update` finishes it
        whatever it is told.
        """
        dropped = [s for s in self._sequences.values() if s.request_id == request_id and s.id not in self._leaving]
        for sequence in dropped:
            if sequence.id in self._planned:
                self._leaving.add(sequence.id)
            else:
                self._finish(sequence)
        return dropped

    def schedule(self, lanes: int = 1) -> StepPlan | None:
        """Return the next step, or None when there is nothing to do.

        Sequences of plans in flight sit it out. lanes: how many plans may be in flight; each takes that part of the sequences, so that
        all lanes have some.
        With one row left to run a sequence decodes: that row, and as much of the window as its limit and the free blocks allow.
        With more it runs a chunk of them, room 0, as long as the step's max_batch_rows and the blocks allow.
        """
        plans: list[SequencePlan] = []
        budget = self.max_batch_rows
        running = self._running
        most = -(-min(len(running) + len(self._waiting), self.max_sequences) // lanes)
        idle = [sequence for sequence in running if sequence.id not in self._planned]
        if self.branches and self._scarce(0):
            for sequence in idle:  # plans in flight write into all that they were given
                self._drop_spare(sequence)
        for sequence in idle:
            if len(plans) == most:
                break
            if sequence.status is not Status.RUNNING:  # preempted for one before it
                continue
            wanted = self._wanted(sequence, budget)
            rows = self._claim(sequence, wanted)
            while not rows and wanted and (victim := self._behind(sequence)):
                self._preempt(victim)
                rows = self._claim(sequence, wanted)
            if rows:
                budget -= self._plan(sequence, rows, plans)
        while self._waiting and budget and len(running) < self.max_sequences and len(plans) < most:
            sequence = self._waiting[0]
            if not self._admit(sequence, budget):
                break
            rows = self._claim(sequence, self._wanted(sequence, budget))
            budget -= self._plan(sequence, rows, plans)
        if not plans:
            return None
        self._taken, self._ended = tuple(self._ended), []
        return StepPlan(tuple(plans), self._taken)

    def update(self, sequence_id: int, tokens: Items[int], finished: bool) -> None:
        """Record what the step in flight did for one of its sequences.

        tokens: what was committed and is kept, in order: 1 to room + 1 of them after a plan that samples, none after one that
        does not. A sequence that is finished (as it must be at its limit) may keep fewer; its blocks are freed.
        Raises ValueError when that does not hold, or the sequence is not in the step.
        """
        plan = self._planned.get(sequence_id)
        if plan is None:
            raise ValueError(f"sequence {sequence_id} is not in the step in flight")
        sequence = self._sequences[sequence_id]
        if sequence_id in self._leaving:
            self._finish(sequence)
            return
        count = len(tokens)
        most = plan.room + 1 if plan.samples else 0
        if count > most or (plan.samples and not count and not finished):
            raise ValueError(f"sequence {sequence_id} got {count} tokens; its plan allows {'1 to ' if plan.samples else ''}{most}")
        if len(sequence.tokens) + count >= sequence.limit and not finished:
            raise ValueError(f"sequence {sequence_id} reached its limit of {sequence.limit} tokens and must be finished")
        del self._planned[sequence_id]
        # All of the new tokens but the last have been run; a plan cut to no token at all leaves its own last row unclaimed.
        sequence.full += len(plan.tokens) + (count - 1 if plan.samples else 0)
        if plan.told:
            sequence.told += len(plan.told.tokens)
        sequence.tokens.extend(tokens)
        self.pool.register(sequence.blocks, sequence.tokens, sequence.full)
        if finished:
            self._finish(sequence)

    def forget_plan(self) -> None:
        """Take back what is in flight, which failed: its rows will be planned again, from the last full block of each sequence on.

        What the shards keep of a sequence from round to round may be lost with the round, such as rows that wait for an exit's own layer.
        """
        self._planned.clear()
        for id in self._leaving.copy():
            self._finish(self._sequences[id])
        for sequence in self._running:
            sequence.full -= sequence.full % self.pool.block_size
        self._ended += self._taken  # it may have failed before anybody took note of these
        self._ended += self._told  # what the shards have seen is not known: the next plans bring it all
        self._told.clear()

    def start_over(self) -> None:
        """Take back the step in flight and put every running sequence back into the queue: what the cache held is lost.

        Each will be replayed from its tokens, in the order in which they arrived.
        """
        self.forget_plan()
        while self._running:
            self._preempt(self._running[-1])
        self._ended.clear()  # whoever runs plans from here on has seen none of them
        self.pool.forget()

    def check_integrity(self) -> None:
        """Raise IntegrityError when an invariant of the scheduler or of its pool is broken."""
        self.pool.check_integrity(sequence.blocks for sequence in self._running)
        everyone = [*self._running, *self._waiting]
        if {sequence.id: sequence for sequence in everyone} != self._sequences or len(everyone) != len(self._sequences):
            raise IntegrityError("the sequences known are not those that run and wait")
        if any(one.arrival >= other.arrival for one, other in pairwise(everyone)):
            raise IntegrityError("running and waiting sequences are not in order of arrival")
        if any(sequence.status is not Status.RUNNING for sequence in self._running) or any(
            sequence.status is not Status.WAITING or sequence.blocks or sequence.full for sequence in self._waiting
        ):
            raise IntegrityError("a sequence's status, blocks or watermark contradict the list it is in")
        if not self._planned.keys() <= {sequence.id for sequence in self._running}:
            raise IntegrityError("a sequence is planned and not running")
        if any(plan.blocks != self._sequences[id].blocks for id, plan in self._planned.items()):
            raise IntegrityError("a plan in flight has other blocks than its sequence")
        readers = list(chain.from_iterable(sequence.blocks for sequence in self._running))
        for sequence in self._running:
            for block in sequence.blocks[sequence.full // self.pool.block_size :]:
                if readers.count(block) > 1 or self.pool.findable(block):
                    raise IntegrityError(f"sequence {sequence.id} may write into block {block}, which others can read")

    def _wanted(self, sequence: Sequence, budget: int) -> int:
        """Rows for which this sequence wants space in this step, the window's included."""
        unrun = sequence.unrun
        if unrun == 1:  # it decodes; at most room + 1 tokens may be committed before its limit
            return 1 + min(self.window if sequence.speculates else 0, sequence.limit - len(sequence.tokens) - 1)
        return min(unrun, budget)

    def _claim(self, sequence: Sequence, rows: int) -> int:
        """Grow the block table for `rows` rows from the watermark on, and return for how many the free blocks were enough."""
        pool = self.pool
        end = sequence.full + rows
        missing = pool.blocks_for(end) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += tuple(pool.allocate(min(missing, pool.free_count)))
            end = min(end, len(sequence.blocks) * pool.block_size)
        return end - sequence.full

    def _plan(self, sequence: Sequence, rows: int, plans: list[SequencePlan]) -> int:
        """Append the sequence's plan for `rows` claimed rows; return what it takes of the step's budget for chunks."""
        start = sequence.full
        unrun = sequence.unrun
        known = min(rows, unrun)
        if rows > known:
            self._add_spare(sequence, rows)
        plan = SequencePlan(
            id=sequence.id,
            tokens=tuple(sequence.tokens[start : start + known]),
            start=start,
            blocks=sequence.blocks,
            samples=known == unrun,
            room=rows - known,
            temperature=sequence.temperature,
            seed=sequence.seed,
            history=None if sequence.id in self._told else tuple(sequence.tokens[:start]),
            shape=sequence.shape,
            logprobs=sequence.logprobs,
            told=_told(sequence, start, start + known),
            ends=sequence.ends,
        )
        self._told.add(sequence.id)
        self._planned[sequence.id] = plan
        plans.append(plan)
        return known if unrun > 1 else 0

    def _add_spare(self, sequence: Sequence, rows: int) -> None:
        """Let a sequence that decodes hold blocks for its branches, as long as that leaves every running sequence some to grow into."""
        pool = self.pool
        missing = pool.blocks_for(sequence.full + rows) + self.branches - len(sequence.blocks)
        if missing > 0 and not self._scarce(missing):
            sequence.blocks += tuple(pool.allocate(missing))

    def _drop_spare(self, sequence: Sequence) -> None:
        """Give back the blocks behind those that the known tokens need."""
        needed = self.pool.blocks_for(len(sequence.tokens))
        if len(sequence.blocks) > needed:
            self.pool.release(sequence.blocks[needed:])
            sequence.blocks = sequence.blocks[:needed]

    def _scarce(self, taken: int) -> bool:
        """Whether, with so many more blocks taken, running sequences might soon find none to grow into."""
        return self.pool.free_count - taken <= 4 * len(self._running)

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Let the queue's head run if its first chunk finds blocks and each running sequence could still take one more.

        Without that reserve the newcomer would be preempted as soon as an older one steps into its next block.
        """
        pool = self.pool
        reserve = len(self._running)
        if pool.free_count <= reserve:  # a newcomer needs at least one block of its own
            return False
        hit = pool.match(sequence.tokens if sequence.told == sequence.prompt_len else sequence.tokens[: sequence.told])
        full = len(hit) * pool.block_size
        chunk = min(len(sequence.tokens) - full, budget)
        if pool.blocks_for(full + chunk) - len(hit) + reserve > pool.free_count:
            pool.release(hit)
            return False
        sequence.blocks = tuple(hit)
        sequence.full = full
        sequence.status = Status.RUNNING
        self.cached_rows += full
        if sequence.cached is None:
            sequence.cached = full
        self._running.append(self._waiting.popleft())
        return True

    def _behind(self, sequence: Sequence) -> Sequence | None:
        """The one to give way to a sequence: the last arrived, where it came after that and is not in flight."""
        last = self._running[-1]
        return None if last is sequence or last.id in self._planned else last

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks of the sequence that arrived last, and put it back at the queue's head."""
        self._running.pop()
        self._surrender(sequence)
        sequence.status = Status.WAITING
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _finish(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        (self._running if sequence.status is Status.RUNNING else self._waiting).remove(sequence)
        self._planned.pop(sequence.id, None)
        self._leaving.discard(sequence.id)
        del self._sequences[sequence.id]
        self._surrender(sequence)
        sequence.status = Status.FINISHED

    def _surrender(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = ()
        sequence.full = 0
        if sequence.id in self._told:
            self._told.remove(sequence.id)
            self._ended.append(sequence.id)


def _told(sequence: Sequence, start: int, end: int) -> Told | None:
    """What the rows of positions [start, end) can tell of the prompt that is still wanted."""
    first = max(start, sequence.told - 1)
    tokens = sequence.tokens[first + 1 : min(end + 1, sequence.prompt_len)]
    if sequence.prompt_logprobs is None or not tokens:
        return None
    return Told(first - start, tuple(tokens), sequence.prompt_logprobs)
