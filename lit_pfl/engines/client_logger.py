"""A federation's loggers as one client's module sees them."""

from collections.abc import Mapping, Sequence
from functools import cache
from inspect import signature
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.logger import DummyExperiment, DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.core import Client

#: what loggers call the parameter by which something is named, or several things in a mapping
NAMES = {"tag", "main_tag", "key", "name", "artifact_file", "artifact_path", "data", "metrics", "metrics_dict"}


class ClientLogger(Logger):
    """Pass what a module writes to ``self.logger`` on to a logger of the federation, named by the client.

    ``self.logger.experiment.add_image("masks", ...)`` writes ``client_3/masks``, and so do ``log_image`` and
    ``log_metrics``. What the federation's logger cannot take is left out, with one warning. To ``isinstance`` this is
    the logger behind it, as modules ask what theirs is before they write to it. A client's Trainer writes nothing to
    it on its own: the scores of all clients are in ``clients.csv``.
    """

    muted = False  # whether nothing is written, as before the first round

    def __init__(self, logger: Logger, client: Client) -> None:
        self._behind, self.client = logger, client

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._behind.__class__

    @property
    def name(self) -> str | None:
        """Name of the federation's experiment."""
        return self._behind.name

    @property
    def version(self) -> int | str | None:
        """Version of the federation's experiment."""
        return self._behind.version

    @property
    def save_dir(self) -> str | None:
        """Folder of the federation's logger."""
        return self._behind.save_dir

    @property
    def log_dir(self) -> str | None:
        """The client's own folder in that of the federation's logger, if it has one, to be made by who needs it."""
        return None if (folder := self._behind.log_dir) is None else str(Path(folder) / self._prefix)

    @property
    def experiment(self) -> Any:
        """The experiment of the federation's logger, in which names begin with the client's."""
        if self.muted:
            return DummyExperiment()
        return _Named(getattr(self._behind, "experiment", None), type(self._behind).__name__, self._prefix)

    @property
    def _prefix(self) -> str:
        return f"client_{self.client.spec.client_id}/"

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write metrics of a step; a logger of CSV files has one row a round, so they join that of the round."""
        if self.muted:
            return
        named = {self._prefix + name: value for name, value in metrics.items()}
        if isinstance(self._behind, CSVLogger):
            named["round"] = step = self.client.completed_rounds + 1
        self._behind.log_metrics(named, step)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the federation has logged the hyperparameters that all clients share."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("log_"):
            named = _Named(self._behind, type(self._behind).__name__, self._prefix)
            return _leave_out if self.muted else getattr(named, name)
        return getattr(self._behind, name)


class _Named:
    """Something that is written to by names, before which a client's is put.

    Args:
        behind: what is written to; None where there is nothing.
        logger: the logger's name.
        prefix: what names begin with.
    """

    def __init__(self, behind: Any, logger: str, prefix: str) -> None:
        self._behind, self._logger, self._prefix = behind, logger, prefix

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._behind, name, None)
        if found is None:
            _warn_once(self._logger, name)
            return _leave_out
        if not callable(found) or not name.startswith(("add_", "log")):
            return found

        parameters = [*signature(found).parameters]

        def write(*args: Any, **kwargs: Any) -> Any:
            # a mapping that comes first holds values by name, whatever the logger calls it
            given = enumerate(zip_longest(parameters[: len(args)], args))
            renamed = [
                self._renamed(value) if parameter in NAMES or (place == 0 and isinstance(value, Mapping)) else value
                for place, (parameter, value) in given
            ]
            options = {key: self._renamed(value) if key in NAMES else value for key, value in kwargs.items()}
            return found(*renamed, **options)

        return write

    def _renamed(self, names: Any) -> Any:
        if isinstance(names, str):
            return self._prefix + names
        if isinstance(names, Mapping):
            return {self._prefix + name if isinstance(name, str) else name: value for name, value in names.items()}
        return names


def _leave_out(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


@cache
def _warn_once(logger: str, name: str) -> None:
    rank_zero_warn(
        f"{logger} has no {name}, so what clients' modules write by it is left out; add a logger that has it, such as "
        "TensorBoardLogger or WandbLogger, to trainer.logger."
    )


class ElsewhereLogger(DummyLogger):
    """Leaves out what a client's module writes, with one warning: loggers are in the process of the federation.

    Args:
        folder: the run's folder.
        kind: which logger this stands for, to ``isinstance``.
    """

    def __init__(self, folder: str, kind: type[Logger]) -> None:
        super().__init__()
        self._folder, self._kind = folder, kind
        self._experiment = _Elsewhere()  # at which Lightning looks, too

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._kind

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return self._folder

    log_dir = save_dir

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""
        _warn_elsewhere()

    def __getattr__(self, name: str) -> Any:
        return _Elsewhere().nop


class _Elsewhere(DummyExperiment):
    def nop(self, *args: Any, **kwargs: Any) -> None:
        _warn_elsewhere()


@cache
def _warn_elsewhere() -> None:
    rank_zero_warn(
        "federation.engine=Ray: what clients' modules write to self.logger is left out, as loggers are in the process "
        "that was started; federation.engine=Local writes it."
    )


def client_loggers(loggers: Sequence[Logger], client: Client) -> list[ClientLogger]:
    """Return a federation's loggers as a client's module sees them, those that take more than numbers first."""
    ordered = sorted(loggers, key=lambda logger: isinstance(logger, CSVLogger))
    return [ClientLogger(logger, client) for logger in ordered]
