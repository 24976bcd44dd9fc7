"""Runs in worker processes and in one process, and what they are compared by."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_pfl import Federation
from lit_pfl.core import Client
from lit_pfl.engines.engine import Engine
from lit_pfl.engines.worker import Worker
from lit_pfl.engines.workforce import Workforce
from lit_pfl.lightning_internals import LastCheckpoint, SavedStates, read_checkpoint
from lit_pfl_callbacks import RunLogger
from lit_pfl_callbacks.tensors import tensors_of
from tiny import assert_equal, digits, trainer


@contextmanager
def workers_kept(ray: Any) -> Iterator[list[Any]]:
    """Let worker processes work for one federation after another, since it takes seconds to start one.

    Yields:
        Actors of those that have nothing to do.
    """
    idle: list[Any] = []
    start, end = Workforce._start, Workforce.end

    def take(crew: Workforce) -> Any:
        while idle:
            actor = idle.pop()
            begun = actor.__ray_call__.remote(_again, *crew._job)
            try:
                if ray.wait([begun], timeout=1)[0]:  # else it is being started
                    ray.get(begun)
            except ray.exceptions.RayActorError:  # it has been killed
                continue
            return actor
        return start(crew)

    def keep(crew: Workforce) -> None:
        idle.extend(worker.actor for worker in [*crew.at_work, *crew.coming])
        crew.at_work, crew.coming = [], []

    Workforce._start, Workforce.end = take, keep  # type: ignore[method-assign]
    try:
        yield idle
    finally:
        Workforce._start, Workforce.end = start, end  # type: ignore[method-assign]


def _again(worker: Worker, *job: Any) -> None:
    if hasattr(worker, "engine"):
        worker.engine.abort()
    vars(worker).clear()
    worker.__init__(*job)  # type: ignore[misc]


def tensors(module: Client) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors_of(module).items()}


def states(federation: Federation) -> dict[int, dict[str, torch.Tensor]]:
    return federation.ask(tensors)


def same(one: Federation, other: Federation) -> None:
    assert_equal(states(one), states(other))
    assert one.rows == other.rows
    assert_equal(one.coordinator.state_dict(), other.coordinator.state_dict())


def fit_saved(
    method: Client, engine: Engine, folder: Path, rounds: int, ckpt_path: Path | None = None,
    callbacks: Sequence[L.Callback] = (), **options: Any,
) -> Federation:  # fmt: skip
    """Run a federation of six, half of whom take part, that writes tables and checkpoints."""
    federation = Federation(method, engine=engine, **{"seed": 3, "threads": 1, "participation": 0.5, **options})
    logger, saving = RunLogger(folder.parent, name=folder.name, version=""), LastCheckpoint(folder)
    fitting = trainer(rounds, callbacks=[saving, *callbacks], logger=logger, enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* is left out")  # these modules write nothing to their loggers
        fitting.fit(federation, datamodule=digits(6), ckpt_path=ckpt_path)
    return federation


def same_files(one: Path, other: Path) -> None:
    """See that two runs have written the same tables, and the same checkpoint."""
    names = sorted(path.name for path in one.glob("*.csv"))
    assert names
    assert names == sorted(path.name for path in other.glob("*.csv"))
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    first, second = (read_checkpoint(folder / "last.ckpt")["federation"] for folder in (one, other))
    assert_equal(*({k: dict(v) if isinstance(v, SavedStates) else v for k, v in f.items()} for f in (first, second)))
