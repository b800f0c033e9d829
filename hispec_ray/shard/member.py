"""What runs in one process of a group of shards: it meets the others, loads its piece, and runs plans. Knows no Ray."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hispec_ray.config import Settings
from hispec_ray.core.plan import StepPlan, StepResult
from hispec_ray.model.parallel import ALONE, Collective, Piece
from hispec_ray.model.weights import open_model
from hispec_ray.shard.collectives import Group, Watched, collective_on_one_machine
from hispec_ray.shard.gpus import gpus, seat_of
from hispec_ray.shard.line import Line
from hispec_ray.shard.shard import Shard, blocks_that_fit

logger = logging.getLogger(__name__)

_MEETING = timedelta(minutes=5)  # for all to start, slow imports and downloads included
_GONE = 70
"""Exit status of a process that waited for the others in vain."""
_SIOCGIFADDR = 0x8915  # netdevice(7)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a member says of itself once it has loaded. sources: see `Round`; window: of the full depth."""

    weight_bytes: int
    cache_bytes: int
    sources: tuple[str, ...]
    window: int


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a member runs.

    machine: its name, the same for all members on it. place: of its GPU among the machine's, neighbours linked well; 0 on a CPU.
    """

    machine: str
    place: int


class Member:
    """One rank of one stage. Called in this order: `seat`, `bind` (the first member only), `join`, `room`, `load`, then `execute` again and
    again.

    host: the address by which members on other machines reach this one; what its own name resolves to may be the loopback's.
    Ends its process when it has waited for another member for longer than `parallel.patience_s`: whoever drives the group sees that.
    """

    def __init__(self, settings: Settings, host: str) -> None:
        assert settings.parallel
        self._settings = settings
        self._host = host
        self._watched = Watched()
        self._shard: Shard | None = None
        self._collective: Collective = ALONE
        self._line: Line | None = None
        threading.Thread(target=self._watch, args=(settings.parallel.patience_s,), name="hispec-watch", daemon=True).start()

    def _watch(self, patience: float) -> None:
        while True:
            time.sleep(patience / 8)
            if self._watched.seconds() > patience:
                logger.error("another rank did not come to a collective within %s s: this process ends", patience)
                os._exit(_GONE)

    def bind(self, members: int) -> tuple[str, int]:
        """Open the place where members meet, on a port that is free; return its address."""
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            self._host, 0, members, is_master=True, wait_for_workers=False, timeout=_MEETING
        )
        return self._host, self._store.port

    def seat(self) -> Seat:
        """Return where this process is. A GPU with errors is named in the log: it may serve for long, and is the first to be suspected."""
        place, fault = 0, None
        if self._settings.model.device == "cuda" and torch.cuda.is_available():
            place, fault = seat_of(str(torch.cuda.get_device_properties(0).uuid), gpus())
        if fault:
            logger.warning("%s: %s", socket.gethostname(), fault)
        return Seat(f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}", place)

    def join(self, stage: int, rank: int, address: tuple[str, int], name: str, machines: list[list[str]]) -> None:
        """Meet the others. name: of the group, unlike any other's; machines: by stage and rank, the machine that a member is on."""
        members = [(s, r) for s, ranks in enumerate(machines) for r in range(len(ranks))]
        me = members.index((stage, rank))
        if me:
            self._store = dist.TCPStore(*address, len(members), is_master=False, timeout=_MEETING)  # type: ignore[attr-defined]
        self._stage, self._rank = stage, rank
        cuda = self._settings.model.device == "cuda"
        if len(members) > 1:
            if interface := _interface(self._host):
                os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo", store=self._store, rank=me, world_size=len(members), timeout=_MEETING
            )
        first = 0
        for s, ranks in enumerate(machines):
            if len(ranks) > 1:  # every member makes every group: torch wants it so
                group = dist.new_group(list(range(first, first + len(ranks))), timeout=_MEETING)
                if s == stage:
                    self._collective = self._together(group, f"{name}-{s}", shared=not cuda and len(set(ranks)) == 1)
            first += len(ranks)
        if len(machines) > 1:
            self._line = Line([len(ranks) for ranks in machines], stage, rank, "cuda" if cuda else "cpu")

    def _together(self, group: dist.ProcessGroup, name: str, *, shared: bool) -> Collective:
        assert self._settings.parallel
        if shared and self._settings.parallel.shared_memory:
            return collective_on_one_machine(group, name, self._watched)
        return Group(group, self._watched)

    def room(self, piece: Piece) -> int:
        """Return how many blocks of the cache there is memory for here. piece: what this member has of the model.

        Raises ValueError where the settings do not fit the model.
        """
        self._source, self._piece = open_model(self._settings.model.path), piece
        return blocks_that_fit(self._settings, self._source, piece)

    def load(self, blocks: int) -> Facts:
        """Read the weights and make a cache of so many blocks, the same for all members."""
        cache = self._settings.cache.model_copy(update={"blocks": blocks})
        settings = self._settings.model_copy(update={"cache": cache})
        self._shard = Shard(settings, self._source, piece=self._piece, collective=self._collective)
        shard = self._shard
        return Facts(shard.weight_bytes, shard.cache_bytes, shard.sources, shard.levels[-1].window)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> tuple[bytes, StepResult | None]:
        """Do this member's part of a round.

        Returns a digest of the tokens, the same from all ranks of a stage that agree, and from the first of them what was done.
        """
        shard = self._shard
        assert shard
        if self._line is None:
            result = shard.execute(plan)
            said: object = [(s.id, s.tokens) for s in result.sequences]
        elif self._stage == 0:
            asked, hidden, result = shard.ask(plan)
            self._line.send(asked, hidden)
            said = asked
        else:
            asked, hidden = self._line.receive()
            hidden, result = shard.answer(plan, asked, hidden)
            self._line.send(asked, hidden)
            said = asked, [s.tokens for s in result.sequences]
        return hashlib.blake2b(repr(said).encode(), digest_size=8).digest(), result if self._rank == 0 else None

    @torch.inference_mode()
    def look_ahead(self) -> None:
        """Guess on while the stages above look at what was asked; see `Round.look_ahead`."""
        assert self._shard
        self._shard.look_ahead()

    def sent_bytes(self) -> int:
        """Return how many bytes have gone on to the next stage since the start."""
        return self._line.sent_bytes if self._line else 0


def _interface(host: str) -> str | None:
    """Return the name of the network interface with this IPv4 address; None where none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # of one that has no address
                if fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == socket.inet_aton(host):
                    return name
    return None
