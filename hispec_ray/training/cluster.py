"""Training in several processes: Ray Train's `TorchTrainer` starts them and joins them to one group, DeepSpeed does the rest."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.queue import Queue

from hispec_ray.training.exits import ExitTrainingSettings, prepare, run
from hispec_ray.training.trainer import Report


def run_on_ray(settings: ExitTrainingSettings, report: Callable[[Report], None]) -> None:
    """Train in `settings.workers` processes of the cluster, a local one where none is named. Rank 0 writes the result.

    Reports come back to this process. Raises as `train_exits`, and Ray's `WorkerGroupError` where a process fails otherwise.
    """
    cuda = settings.device == "cuda"
    out = _absolute(settings.out)
    model = _absolute(settings.model) if Path(settings.model).expanduser().exists() else settings.model
    found = settings.model_copy(update={"out": out, "model": model, "data": tuple(map(_absolute, settings.data))})
    with _cluster(), _reports(report) as queue:
        trainer = TorchTrainer(
            _work,
            train_loop_config={"settings": found.model_dump(mode="json"), "reports": queue},
            torch_config=TorchConfig(backend="nccl" if cuda else "gloo"),
            scaling_config=ScalingConfig(num_workers=settings.workers, use_gpu=cuda),
            run_config=RunConfig(name="ray", storage_path=out),
        )
        try:
            trainer.fit()
        except WorkerGroupError as error:
            for cause in error.worker_failures.values():
                if isinstance(cause, (OSError, ValueError)):  # what `run` says in one line
                    raise cause from None
            raise


def _absolute(path: str) -> str:
    """A path as the workers, which run in folders of their own, find it."""
    return str(Path(path).expanduser().absolute())


def _work(config: dict[str, Any]) -> None:
    """What each process does."""
    run(prepare(ExitTrainingSettings.model_validate(config["settings"])), config["reports"].put)


@contextlib.contextmanager
def _cluster() -> Iterator[None]:
    """The cluster that this process is in, or else one for the while of the block."""
    inside = ray.is_initialized()
    if not inside:
        ray.init(log_to_driver=False)
    try:
        yield
    finally:
        if not inside:
            ray.shutdown()


@contextlib.contextmanager
def _reports(report: Callable[[Report], None]) -> Iterator[Queue]:
    """A queue whose reports are handed on in this process while the block runs."""
    queue = Queue()

    def hand_on() -> None:
        while (found := queue.get()) is not None:
            report(found)

    thread = threading.Thread(target=hand_on)
    thread.start()
    try:
        yield queue
    finally:
        queue.put(None)
        thread.join()
        queue.shutdown()
