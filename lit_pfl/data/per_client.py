"""Existing data modules, one a client."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
from jsonargparse.typing import PositiveInt
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_pfl.data.federated import ClientData, FederatedDataModule, held_out
from lit_pfl.data.loaders import example_of, num_samples
from lit_pfl.data.several import scoring_loader, training_loader
from lit_pfl.errors import ConfigError, refuse_other_lightning


class PerClient(FederatedDataModule):
    """A LightningDataModule for every client, used as by a Trainer: prepared, set up, and asked for its loaders once.

    They are not torn down, since scoring and a further fit use the same loaders. Batches pass the hooks of
    their client's module on the way to its learner (``on_after_batch_transfer`` and the two before it).

    Training loaders are PyTorch DataLoaders over datasets of any kind, several of them in lists, dicts or a
    ``CombinedLoader``, which a Trainer combines, or other iterables of batches. They shuffle by the default generators
    of PyTorch, NumPy or Python, which each client has for itself, or by one of their own, as
    ``DataLoader(generator=...)``: so it does not matter who else trains, and a resumed run is the same run. The same
    holds for random transforms. If several modules have the same generator, each client draws from a copy, which begins
    in a state of its own. Workers end with every epoch, also persistent ones, and a stream starts again at every
    iteration.

    Args:
        modules: the data modules; or what makes one from a client's id, with ``num_clients``.
        num_clients: number of clients, where ``modules`` makes them.
        num_classes: number of classes. By default what a module has under this name; None
            where its task is something else.
        labels_agree: whether label c means the same at every client, so that heads may be shared.
        new_clients: ids of clients that are held out of training. A test scores them as clients that join after it, see
            :class:`~lit_pfl.Federation`.

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
        new_clients: Sequence[int] = (),
    ) -> None:
        super().__init__()
        if callable(modules):
            if num_clients is None:
                raise ConfigError("data.num_clients: say how many data modules data.modules is to make.")
            modules = [modules(client) for client in range(num_clients)]
        if not isinstance(modules, Sequence):
            raise ConfigError(
                f"data.modules is a {type(modules).__name__}; give a list of LightningDataModules, one for every "
                "client, or what makes one from a client's id."
            )
        if num_clients not in (None, len(modules)):
            raise ConfigError(f"data.num_clients={num_clients}, but data.modules has {len(modules)}; leave it out.")
        if not modules:
            raise ConfigError("data.modules=[]: give a data module for every client.")
        for client, module in enumerate(modules):
            _check(module, f"data.modules[{client}]")
        self.modules = list(modules)
        self.num_classes = num_classes
        self.labels_agree = labels_agree
        self.held = held_out(new_clients, range(len(self.modules)))
        self._is_set_up = False
        self._data: dict[int, ClientData] = {}

    def prepare_data(self) -> None:
        """Prepare every module's data."""
        for module in self.modules:
            module.trainer = self.trainer  # some look how many devices it has
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
        """Ids of the clients that take part: all that are not held out."""
        return [client for client in range(len(self.modules)) if client not in self.held]

    @property
    def held_out(self) -> list[int]:
        return self.held

    def client(self, client_id: int) -> ClientData:
        """Return a client's data."""
        if not 0 <= client_id < len(self.modules):
            raise ConfigError(f"There is no client {client_id}; data.modules has {len(self.modules)}.")
        if not self._data:  # all at once, so that what they share does not depend on who is asked for first
            loaders = [self._loaders(client) for client in range(len(self.modules))]  # may seed what they share
            self._data = {client: self._client_data(client, *own) for client, own in enumerate(loaders)}
            known: set[int] = set()
            for client, data in self._data.items():
                data.generators.begin_apart(client, known)
                known |= data.generators.ids
        return self._data[client_id]

    def _loaders(self, client: int) -> tuple[Any, Any, Any]:
        with self._named(client):
            module = self.modules[client]
            return _loader(module, "train"), _loader(module, "val"), _loader(module, "test")

    def _client_data(self, client: int, train: Any, val: Any, test: Any) -> ClientData:
        with self._named(client):
            if isinstance(train, tuple):
                raise ConfigError("its train_dataloader returns nothing to train on.")
            if not (n := num_samples(train)):
                raise ConfigError("its train_dataloader has no samples.")
            if sized_len(train) == 0:
                raise ConfigError(
                    f"its train_dataloader makes no batch of its {n} samples; leave out drop_last=True, or give a "
                    "smaller batch_size."
                )
            module = self.modules[client]
            own = getattr(module, "num_classes", None)
            classes = self.num_classes or (None if callable(own) else own)
            return ClientData(train, val, test, example_of(train), classes, self.labels_agree, module)

    @contextmanager
    def _named(self, client: int) -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"data.modules[{client}], {type(self.modules[client]).__name__}: {error}") from None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the modules that have one, by client."""
        return {str(client): state for client, module in enumerate(self.modules) if (state := module.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the modules their states back."""
        for client, state in state_dict.items():
            self.modules[int(client)].load_state_dict(state)


def _check(module: Any, name: str) -> None:
    if not isinstance(module, L.LightningDataModule):
        refuse_other_lightning(name, module, "LightningDataModule")
        raise ConfigError(f"{name} is a {type(module).__name__}; give a LightningDataModule.")
    if not is_overridden("train_dataloader", module, L.LightningDataModule):
        raise ConfigError(f"{name}: {type(module).__name__} has no train_dataloader.")


def _loader(module: L.LightningDataModule, part: str) -> Any:
    """Return a module's batches for training, validation or testing; none if it has no such loader."""
    name = f"{part}_dataloader"
    loader = getattr(module, name)() if is_overridden(name, module, L.LightningDataModule) else None
    return training_loader(loader) if part == "train" else scoring_loader(loader, name)
