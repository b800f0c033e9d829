"""What NVML says of GPUs, told by a stand-in for its module: memory, links, health, and what it does not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from hispec_ray.shard.gpus import Gpu, faults, gpus, in_link_order, link_rank, seat_of
from hispec_ray.shard.member import Seat
from hispec_ray.shard.ray_group import seated


class Nvml:
    """The module pynvml on a machine with these cards. What a card does not say raises, as for a GPU that lacks it."""

    NVMLError = pynvml.NVMLError
    NVML_NVLINK_MAX_LINKS = pynvml.NVML_NVLINK_MAX_LINKS

    def __init__(self, cards: Sequence[dict[str, Any]]) -> None:
        self.cards = cards
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVML_"):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def _said(self, handle: int, name: str) -> Any:
        assert self.open == 1
        if name not in self.cards[handle]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.cards[handle][name]

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.cards[index].get("lost"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetName(self, handle: int) -> Any:
        return self._said(handle, "name")

    def nvmlDeviceGetUUID(self, handle: int) -> Any:
        return self._said(handle, "uuid")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        total, free = self._said(handle, "memory")
        return SimpleNamespace(total=total, free=free)

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=self._said(handle, "bus"))

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> Any:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return self._said(handle, "uncorrected")

    def nvmlDeviceGetRemappedRows(self, handle: int) -> Any:
        return self._said(handle, "remapped")

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: int) -> Any:
        return self._said(handle, "retiring")

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, what: int) -> int:
        assert what == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
        joined = other in self._said(one, "nvlink")
        return pynvml.NVML_P2P_STATUS_OK if joined else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> Any:
        return self._said(one, "levels")[other]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return int(link < len(self._said(handle, "ends")))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(busId=self._said(handle, "ends")[link])


def test_everything_that_is_known_is_told() -> None:
    card = {"name": "H100", "uuid": "GPU-1", "memory": (80, 79), "uncorrected": 0, "remapped": (3, 0, 0, 0), "retiring": 0}
    nvml = Nvml([card])
    assert gpus(nvml) == [Gpu(0, "H100", "GPU-1", 80, 79)]
    assert nvml.open == 0
    assert faults(gpus(nvml)[0]) is None


def test_what_a_gpu_does_not_know_is_left_open() -> None:
    assert gpus(Nvml([{"name": b"GTX", "uuid": b"GPU-2"}])) == [Gpu(0, "GTX", "GPU-2", 0, 0)]


def test_without_a_driver_there_are_none() -> None:
    class Missing(Nvml):
        def nvmlInit(self) -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    class Gone(Nvml):
        def nvmlDeviceGetCount(self) -> int:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    assert gpus(Missing([])) == []
    assert gpus(Gone([])) == []
    assert all(gpu.uuid for gpu in gpus())  # whatever is in this machine


def test_links_are_named_as_nvidia_smi_does() -> None:
    pcie = {1: pynvml.NVML_TOPOLOGY_SINGLE, 2: pynvml.NVML_TOPOLOGY_NODE, 3: pynvml.NVML_TOPOLOGY_SYSTEM}
    bridged = [{"bus": "0:1", "nvlink": {1}, "ends": [b"0:2", b"0:2"], "levels": {2: pynvml.NVML_TOPOLOGY_HOSTBRIDGE}}, {"bus": b"0:2"}, {}]
    switched = [{"bus": "0:1", "nvlink": {1, 2}, "ends": ["0:f"] * 18}, {"bus": "0:2"}, {"bus": "0:3"}]
    assert gpus(Nvml([{"levels": pcie, "nvlink": ()}, {}, {}, {}]))[0].links == {1: "PIX", 2: "NODE", 3: "SYS"}
    assert gpus(Nvml(bridged))[0].links == {1: "NV2", 2: "PHB"}
    assert gpus(Nvml(switched))[0].links == {1: "NV18", 2: "NV18"}
    assert gpus(Nvml([{}, {}]))[0].links == {}


def test_a_gpu_with_errors_is_named() -> None:
    cards: list[dict[str, Any]] = [
        {"name": "A100", "uncorrected": 1},
        {"name": "A100", "uncorrected": 4, "remapped": (0, 1, 1, 0)},
        {"name": "A100", "remapped": (0, 9, 0, 1)},
        {"name": "V100", "retiring": 1},
        {"lost": True},
        {"name": "A100", "remapped": (5, 0, 0, 0)},
    ]
    found = gpus(Nvml(cards))
    assert [faults(gpu) for gpu in found] == [
        "GPU 0 (A100): 1 uncorrected memory error since the driver was loaded",
        "GPU 1 (A100): 4 uncorrected memory errors since the driver was loaded; "
        "memory that has failed goes out of use at the next reset of the GPU",
        "GPU 2 (A100): rows of its memory could not be remapped: it is to be replaced",
        "GPU 3 (V100): memory that has failed goes out of use at the next reset of the GPU",
        "GPU 4 does not answer: the kernel's log says why; a reset or a restart of the machine may bring it back",
        None,
    ]


def machine(links: dict[tuple[int, int], str], count: int) -> list[Gpu]:
    """GPUs whose links are these, both ways, and SYS else."""

    def path(a: int, b: int) -> str:
        return links.get((a, b)) or links.get((b, a)) or "SYS"

    return [Gpu(a, "", str(a), 1, 1, {b: path(a, b) for b in range(count) if b != a}) for a in range(count)]


def test_paths_are_ordered() -> None:
    paths = [None, "SYS", "NODE", "PHB", "PXB", "PIX", "NV1", "NV2", "NV18"]
    assert sorted(paths, key=link_rank) == paths
    assert len({link_rank(path) for path in paths}) == len(paths)


@pytest.mark.parametrize(
    ("links", "count", "order"),
    [
        ({}, 0, []),
        ({}, 1, [0]),
        ({}, 4, [0, 1, 2, 3]),
        ({(0, 2): "NV4", (1, 3): "NV4"}, 4, [0, 2, 1, 3]),  # pairs stay together
        ({(0, 1): "NV1", (1, 2): "NV2", (2, 3): "NV1", (3, 0): "NV2", (0, 2): "NV1", (1, 3): "NV1"}, 4, [0, 3, 1, 2]),
        ({(0, 3): "PIX", (3, 1): "PIX", (1, 2): "PIX", (2, 0): "PIX"}, 4, [0, 2, 1, 3]),  # a ring through all
    ],
)
def test_neighbours_are_linked_best(links: dict[tuple[int, int], str], count: int, order: list[int]) -> None:
    assert in_link_order(machine(links, count)) == order


def test_ranks_sit_by_machine_and_by_link() -> None:
    pairs = [replace(gpu, uuid=f"GPU-{gpu.index}") for gpu in machine({(0, 2): "NV4", (1, 3): "NV4"}, 4)]
    places = [seat_of(str(index), pairs) for index in range(4)]
    assert places == [(0, None), (2, None), (1, None), (3, None)]
    assert seat_of("9", pairs) == seat_of("", pairs) == (0, None)
    broken = [replace(pairs[0], lost=True), replace(pairs[1], remap_failed=True), *pairs[2:]]
    assert [seat_of(str(index), broken)[0] for index in (1, 2, 3)] == [0, 2, 1]
    assert "to be replaced" in (seat_of("1", broken)[1] or "")
    mixed = [Seat("b", 3), Seat("a", 1), Seat("b", 0), Seat("a", 0), Seat("a", 2)]
    assert seated([0, 0, 0, 0, 1], mixed) == [2, 0, 3, 1, 4]
    assert seated([0, 0, 1], [Seat("a", 0)] * 3) == [0, 1, 2], "on CPUs they stay as they are"


def test_indexes_may_have_gaps() -> None:
    one, two, three = Gpu(1, "", "", 1, 1, {4: "SYS", 6: "NV2"}), Gpu(4, "", "", 1, 1, {6: "SYS"}), Gpu(6, "", "", 1, 1, {1: "NV2"})
    assert sorted(in_link_order([one, two, three])) == [1, 4, 6]
    assert in_link_order([one, two, three])[:2] in ([1, 6], [4, 6])
