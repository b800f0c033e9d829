"""A thread that looks up while the process ends; see test_drafters."""

import threading
import time

from hispec_ray.core.plan import SequencePlan, StepPlan
from hispec_ray.speculation.native_lookup import NativeLookup

drafter = NativeLookup()


def forever() -> None:
    id = 0
    while True:
        id += 1
        drafter.begin(StepPlan((SequencePlan(id, tuple(range(200)), 0, (0,), True, 4, 0.0, 0, ()),), (id - 1,)))
        for _ in range(20):
            drafter.propose(id, (), 64, 1e-9)
            drafter.committed(id, [1, 2, 3], [4, 5, 6])


threading.Thread(target=forever, daemon=True).start()
time.sleep(0.3)
