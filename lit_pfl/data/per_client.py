"""Existing data modules, one a client."""

from collections.abc import Callable
from typing import Any

import lightning as L
from jsonargparse.typing import PositiveInt
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_pfl.data.federated import ClientData, FederatedDataModule
from lit_pfl.data.loaders import example_of, num_samples
from lit_pfl.errors import ConfigError

#: what a data module may do to batches between its loaders and the model
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class PerClient(FederatedDataModule):
    """A LightningDataModule for every client, used as by a Trainer: prepared, set up, and asked for its loaders once.

    They are not torn down, since scoring and a further fit go on with the same loaders.

    Training loaders are PyTorch DataLoaders over map-style datasets. They shuffle by PyTorch's default generator, which
    each client has for itself: then it does not matter who else trains, and a resumed run is the same run. So they
    have no generator, and no loader has persistent workers.

    Args:
        modules: the data modules; or what makes one from a client's id, with ``num_clients``.
        num_clients: number of clients, where ``modules`` makes them.
        num_classes: number of classes that clients tell apart. By default what a module has under this name; None
            where its task is not to tell classes apart.
        labels_agree: whether label c means the same at every client, so that heads may be shared.

    Raises:
        ConfigError: for modules that cannot be used like this.

    Example::

        PerClient([HospitalData("north"), HospitalData("south")])
        PerClient(lambda client: SiteData(folder=f"site{client}"), num_clients=12)
    """

    def __init__(
        self,
        modules: list[L.LightningDataModule] | Callable[[int], L.LightningDataModule],
        num_clients: PositiveInt | None = None,
        num_classes: PositiveInt | None = None,
        labels_agree: bool = True,
    ) -> None:
        super().__init__()
        if callable(modules):
            if num_clients is None:
                raise ConfigError("data.num_clients: say how many data modules data.modules is to make.")
            modules = [modules(client) for client in range(num_clients)]
        if num_clients not in (None, len(modules)):
            raise ConfigError(f"data.num_clients={num_clients}, but data.modules has {len(modules)}; leave it out.")
        if not modules:
            raise ConfigError("data.modules=[]: give a data module for every client.")
        for client, module in enumerate(modules):
            _check(module, f"data.modules[{client}]")
        self.modules = modules
        self.num_classes = num_classes
        self.labels_agree = labels_agree
        self._is_set_up = False
        self._data: dict[int, ClientData] = {}

    def prepare_data(self) -> None:
        """Prepare every module's data."""
        for module in self.modules:
            module.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Set every module up, once, to train and to test."""
        if self._is_set_up:
            return
        for module in self.modules:
            module.trainer = self.trainer
            for own_stage in ("fit", "test"):
                module.setup(own_stage)
        self._is_set_up = True

    @property
    def clients(self) -> list[int]:
        """Ids of all clients."""
        return list(range(len(self.modules)))

    def client(self, client_id: int) -> ClientData:
        """Return a client's data."""
        if not 0 <= client_id < len(self.modules):
            raise ConfigError(f"There is no client {client_id}; data.modules has {len(self.modules)}.")
        if client_id not in self._data:
            self._data[client_id] = self._client_data(client_id)
        return self._data[client_id]

    def _client_data(self, client: int) -> ClientData:
        module = self.modules[client]
        try:
            train, val, test = (_loader(module, part) for part in ("train", "val", "test"))
            if isinstance(train, tuple):
                raise ConfigError("its train_dataloader returns nothing to train on.")
            if not (n := num_samples(train)):
                raise ConfigError("its train_dataloader has no samples.")
            if sized_len(train) == 0:
                raise ConfigError(
                    f"its train_dataloader makes no batch of its {n} samples; leave out drop_last=True, or give a "
                    "smaller batch_size."
                )
            if any(getattr(drawing, "generator", None) for drawing in (train, getattr(train, "sampler", None))):
                raise ConfigError(
                    "its training DataLoader draws from a generator of its own, which a resumed run does not know; "
                    "leave out generator=."
                )
            if any(getattr(loader, "persistent_workers", False) for loader in (train, val, test)):
                raise ConfigError(
                    "one of its DataLoaders has persistent_workers=True, whose random numbers go on from epoch to "
                    "epoch where a resumed run does not know them; leave it out."
                )
            classes = self.num_classes or getattr(module, "num_classes", None)
            return ClientData(train, val, test, example_of(train), classes, self.labels_agree, module)
        except ConfigError as error:
            raise ConfigError(f"data.modules[{client}], {type(module).__name__}: {error}") from None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the modules that have one, by client."""
        return {str(client): state for client, module in enumerate(self.modules) if (state := module.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the modules their states back."""
        for client, state in state_dict.items():
            self.modules[int(client)].load_state_dict(state)


def _check(module: Any, name: str) -> None:
    if not isinstance(module, L.LightningDataModule):
        raise ConfigError(f"{name} is a {type(module).__name__}; give a LightningDataModule.")
    hooks = [hook for hook in BATCH_HOOKS if is_overridden(hook, module, L.LightningDataModule)]
    if hooks:
        raise ConfigError(
            f"{name}: {type(module).__name__}.{hooks[0]} would not be called; move it into the LightningModule, "
            "or into the Dataset."
        )
    if not is_overridden("train_dataloader", module, L.LightningDataModule):
        raise ConfigError(f"{name}: {type(module).__name__} has no train_dataloader.")


def _loader(module: L.LightningDataModule, part: str) -> Any:
    """Return a module's batches for training, validation or testing; none if it has no such loader."""
    name = f"{part}_dataloader"
    loader = getattr(module, name)() if is_overridden(name, module, L.LightningDataModule) else None
    if isinstance(loader, list | tuple) and len(loader) == 1:
        [loader] = loader
    if loader is None or (isinstance(loader, list | tuple) and not loader):
        return ()
    if isinstance(loader, list | tuple | dict) and part != "train":
        raise ConfigError(f"its {name} returns {len(loader)} loaders; a client's score is of one.")
    return loader
