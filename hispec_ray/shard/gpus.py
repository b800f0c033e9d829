"""What NVML says of this machine's GPUs: memory, links, health. Nothing where there is no NVML."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml

_LINKS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Paths over PCIe, the best first, as `nvidia-smi topo -m` calls them: one switch, several, the host bridge, within and across sockets."""
_NVLINK = re.compile(r"NV(\d+)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    index: as NVML counts, which is by PCI address and knows nothing of CUDA_VISIBLE_DEVICES.
    memory_bytes, free_bytes: 0 where NVML does not say (a GPU that shares the machine's memory).
    links: by the index of another GPU, the path to it as `nvidia-smi topo -m` names it: NV and a number of NVLinks, PIX, PXB, PHB, NODE or
        SYS; one that is not known is left out.
    uncorrected: memory errors that were not corrected since the driver was loaded. pending: pages or rows of memory wait for a reset to be
        taken out of use. remap_failed: the GPU has run out of spare rows. All three 0 or false where it does not say.
    lost: NVML counts it and cannot reach it; nothing else is known of it then.
    """

    index: int
    name: str
    uuid: str
    memory_bytes: int
    free_bytes: int
    links: Mapping[int, str] = field(default_factory=dict)
    uncorrected: int = 0
    pending: bool = False
    remap_failed: bool = False
    lost: bool = False


def gpus(nvml: Any = pynvml) -> list[Gpu]:
    """Return this machine's GPUs by index; none where there is no driver. nvml: the module that asks it."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        every = {index: _ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(nvml.nvmlDeviceGetCount())}
        handles = {index: handle for index, handle in every.items() if handle is not None}
        return [_read(nvml, index, handles) if index in handles else Gpu(index, "", "", 0, 0, lost=True) for index in every]
    except nvml.NVMLError:
        return []
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _read(nvml: Any, index: int, handles: Mapping[int, Any]) -> Gpu:
    handle = handles[index]

    def ask(name: str, *arguments: Any, otherwise: Any = None) -> Any:
        return _ask(nvml, name, handle, *arguments, otherwise=otherwise)

    memory = ask("nvmlDeviceGetMemoryInfo")
    remapped = ask("nvmlDeviceGetRemappedRows", otherwise=(0, 0, 0, 0))  # corrected, uncorrected, pending, failed
    retiring = ask("nvmlDeviceGetRetiredPagesPendingStatus", otherwise=0)  # before Ampere
    return Gpu(
        index,
        _text(ask("nvmlDeviceGetName", otherwise="")),
        _text(ask("nvmlDeviceGetUUID", otherwise="")),
        memory.total if memory else 0,
        memory.free if memory else 0,
        _links(nvml, index, handles),
        ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC, otherwise=0),
        bool(remapped[2] or retiring),
        bool(remapped[3]),
    )


def _ask(nvml: Any, name: str, *arguments: Any, otherwise: Any = None) -> Any:
    """What NVML answers, or `otherwise` where this GPU or this driver does not know."""
    ask: Callable[..., Any] = getattr(nvml, name)
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return otherwise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes in old releases of the package


def _links(nvml: Any, index: int, handles: Mapping[int, Any]) -> dict[int, str]:
    levels = ("INTERNAL", "SINGLE", "MULTIPLE", "HOSTBRIDGE", "NODE", "SYSTEM")  # INTERNAL: two on one board
    paths = {getattr(nvml, f"NVML_TOPOLOGY_{level}"): path for level, path in zip(levels, (_LINKS[0], *_LINKS), strict=True)}
    mine, ends = handles[index], _nvlink_ends(nvml, handles[index])
    found = {}
    for other, handle in handles.items():
        if other == index:
            continue
        if _ask(nvml, "nvmlDeviceGetP2PStatus", mine, handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            address = _ask(nvml, "nvmlDeviceGetPciInfo", handle)
            direct = ends.count(_text(address.busId).upper()) if address else 0
            found[other] = f"NV{direct or len(ends) or 1}"  # none direct: through switches, over all of them
        else:
            level = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", mine, handle)
            if level in paths:
                found[other] = paths[level]
    return found


def _nvlink_ends(nvml: Any, handle: Any) -> list[str]:
    """The PCI addresses at the other ends of a GPU's working NVLinks: other GPUs or switches."""
    ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) == nvml.NVML_FEATURE_ENABLED:
            remote = _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
            ends.append(_text(remote.busId).upper() if remote else "")
    return ends


def link_rank(link: str | None) -> int:
    """Return how good a path is, more is better: each NVLink counts, any of them before PCIe; 0 where it is not known."""
    if link is None:
        return 0
    nvlinks = _NVLINK.fullmatch(link)
    return len(_LINKS) + int(nvlinks[1]) if nvlinks else len(_LINKS) - _LINKS.index(link)


def in_link_order(machine: Sequence[Gpu]) -> list[int]:
    """Return the GPUs' indexes in an order in which neighbours are linked well, as rings of ranks want it.

    Greedy from each GPU in turn (go on to the best linked one that is left), and of those orders the best: not always the best there is.
    Ties go to the lowest index.
    """
    if not any(gpu.links for gpu in machine):
        return [gpu.index for gpu in machine]
    best: list[int] = []
    for first in machine:
        order, left = [first], {gpu.index: gpu for gpu in machine if gpu is not first}
        while left:
            at = order[-1]
            nearest = max(left.values(), key=lambda gpu: (link_rank(at.links.get(gpu.index)), -gpu.index))
            order.append(left.pop(nearest.index))
        indexes = [gpu.index for gpu in order]
        if not best or _worth(machine, indexes) > _worth(machine, best):
            best = indexes
    return best


def seat_of(uuid: str, machine: Sequence[Gpu]) -> tuple[int, str | None]:
    """Return where a GPU stands in `in_link_order` of its machine, and what is wrong with it; 0 and None where NVML does not know it.

    uuid: as torch says it, which is NVML's without its first letters.
    """
    order = in_link_order([gpu for gpu in machine if not gpu.lost])
    mine = next((gpu for gpu in machine if uuid and gpu.uuid.endswith(uuid)), None)
    return (0, None) if mine is None else (order.index(mine.index), faults(mine))


def _worth(machine: Sequence[Gpu], order: Sequence[int]) -> tuple[int, int]:
    """How good an order is: its worst step, which a ring waits for, then all of them; the way back from the last to the first is one."""
    links = {gpu.index: gpu.links for gpu in machine}
    steps = [link_rank(links[a].get(b)) for a, b in zip(order, [*order[1:], order[0]], strict=True) if a != b]
    return min(steps, default=0), sum(steps)


def faults(gpu: Gpu) -> str | None:
    """Return what is wrong with a GPU, with its number; None for nothing that NVML tells of (Xid errors stand in the kernel's log only)."""
    if gpu.lost:
        return f"GPU {gpu.index} does not answer: the kernel's log says why; a reset or a restart of the machine may bring it back"
    found = []
    if gpu.remap_failed:
        found.append("rows of its memory could not be remapped: it is to be replaced")
    if gpu.uncorrected:
        found.append(f"{gpu.uncorrected} uncorrected memory error{'s' * (gpu.uncorrected > 1)} since the driver was loaded")
    if gpu.pending:
        found.append("memory that has failed goes out of use at the next reset of the GPU")
    return f"GPU {gpu.index} ({gpu.name}): {'; '.join(found)}" if found else None
