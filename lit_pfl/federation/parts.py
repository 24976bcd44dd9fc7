"""What all parts of a federation know of it."""

from lit_pfl.core import Client
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.data import FederatedDataModule
from lit_pfl.engines.local import LocalEngine
from lit_pfl.engines.ranks import Ranks
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import QuickModule


class Parts(QuickModule):
    """A federation's clients and its server's side, once set up."""

    clients: dict[int, Client]
    ranks: Ranks
    coordinator: Coordinator
    engine: LocalEngine

    @property
    def data(self) -> FederatedDataModule:
        """The data module that the Trainer was given."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, FederatedDataModule):
            raise ConfigError(
                "A Federation needs a federated data module: "
                "trainer.fit(federation, datamodule=CIFAR10(num_clients=20))."
            )
        return data
