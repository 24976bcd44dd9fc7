"""Which methods somebody's module can be federated with."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
from torch import nn
from torch.utils.data import DataLoader

import lit_pfl.methods
from lit_pfl.core import Client
from lit_pfl.data import PerClient
from lit_pfl.errors import ConfigError, first_line, refuse_other_lightning
from lit_pfl.federation import Federation
from lit_pfl.testing.method_tester import trainer
from lit_pfl_callbacks.random_state import torch_state_kept


class LearnerReport(dict[str, str | None]):
    """What is in the way of every method, by its name: a line, or None where it works."""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{method:{width}}  {reason or 'yes'}" for method, reason in self.items())

    @property
    def works(self) -> list[str]:
        """The methods that work."""
        return [method for method, reason in self.items() if reason is None]


class _Loaders(L.LightningDataModule):
    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader:
        # Somebody's batches as samples: a loader of one a batch gives them back as they are.
        return DataLoader(self.batches, batch_size=1, collate_fn=lambda batches: batches[0])  # type: ignore[arg-type]

    val_dataloader = train_dataloader
    test_dataloader = train_dataloader


def check_learner(
    make: Callable[[], L.LightningModule] | L.LightningModule,
    batches: Iterable[Any],
    methods: Iterable[type[Client]] | None = None,
    **options: Any,
) -> LearnerReport:
    """Try which methods can federate a module: two clients train two rounds each, on a few batches.

    Args:
        make: the module, or what makes it, such as its class. It stays as it is.
        batches: a few of its training batches, such as ``itertools.islice(my_loader, 3)``.
        methods: which methods; by default all of this library.
        options: options that the methods get for the module, ``head="^out"`` and ``encoder="net.encoder"``.

    Returns:
        For every method None, or the line that says why not. Printed, it is a table.

    Raises:
        ConfigError: when there is no batch, or no LightningModule.

    Example::

        print(check_learner(MyModule(), itertools.islice(my_loader, 3), head="^out"))
    """
    given = list(batches)
    if not given:
        raise ConfigError("check_learner(batches=...): give at least one batch.")
    learner = make if isinstance(make, nn.Module) else make()
    if not isinstance(learner, L.LightningModule):
        refuse_other_lightning("check_learner", learner, "LightningModule")
        raise ConfigError(f"check_learner: {type(learner).__name__} is not a LightningModule; give one.")
    kinds = [getattr(lit_pfl.methods, name) for name in lit_pfl.methods.__all__] if methods is None else methods
    return LearnerReport({kind.__name__: _in_the_way(kind, learner, given, options) for kind in kinds})


def _in_the_way(
    kind: type[Client], learner: L.LightningModule, batches: list[Any], options: dict[str, Any]
) -> str | None:
    with torch_state_kept():
        try:
            federation = Federation(kind(learner=copy.deepcopy(learner), **options), seed=0, threads=1, quorum=0)
            trainer(2).fit(federation, datamodule=PerClient([_Loaders(batches), _Loaders(batches)]))
        except ConfigError as error:
            return str(error)
        except Exception as error:  # whatever somebody's module does
            return f"{type(error).__name__}: {first_line(error)}"
    return str(federation.coordinator.refused[0]) if federation.coordinator.refused else None
