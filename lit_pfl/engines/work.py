"""What an engine is notified of a federation: how clients are made, and how their Trainers are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import lightning as L

from lit_pfl.core import Client, ClientSpec
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.data import ClientData
from lit_pfl.engines.trainers import client_trainer, planned_rounds
from lit_pfl.engines.visitors import Visitors
from lit_pfl.lightning_internals import MemoryCheckpointIO
from lit_pfl.randomness import Draws
from lit_pfl_callbacks import FederatedLoop


class HasData(Protocol):
    """Data of clients, such as a :class:`~lit_pfl.data.FederatedDataModule`."""

    @property
    def clients(self) -> list[int]: ...

    def client(self, client_id: int) -> ClientData: ...


@dataclass
class Work:
    """What there is to do for an engine.

    Args:
        prototype: the method, as a prototype of all clients.
        data: the clients' data.
        seed: seed of everything random.
        local_epochs: epochs that a client trains in a round.
        options: further options of the clients' Trainers.
        trainer: the Trainer whose device, precision and loggers clients have.
        rounds: number of rounds, -1 for no end; by default those that the Trainer plans.
        threads: CPU threads that clients compute with; None as long as that is not settled.
        keep_trained: whether models are kept as they have trained, also where the next reply replaces them.
    """

    prototype: Client
    data: HasData
    seed: int
    local_epochs: int
    options: Mapping[str, Any]
    trainer: L.Trainer
    rounds: int | None = None
    threads: int | None = None
    keep_trained: bool = True

    def __post_init__(self) -> None:
        self.visitors = Visitors(self)

    def goes_on(self, trainer: L.Trainer, rounds: int | None = None) -> None:
        """Go on under another Trainer."""
        self.trainer, self.rounds, self.visitors = trainer, rounds, Visitors(self)

    def fresh(self, client: int, data: ClientData | None = None, spec: ClientSpec | None = None) -> Client:
        """Return a client as it begins, see :meth:`made`, on the Trainer's device."""
        module = self.made(client, data, spec)
        module.place_on(self.trainer.strategy.root_device)
        return module

    def made(self, client: int, data: ClientData | None = None, spec: ClientSpec | None = None) -> Client:
        """Return a client as it begins, on the CPU, which draws the same for every device; all have the same weights.

        Args:
            client: its id.
            data: its data; by default read again, and not kept by the client.
            spec: what it is to learn; by default as its data say.
        """
        spec = spec or ClientSpec.of(client, data or self.data.client(client), self.local_epochs)
        with Draws(self.seed).default_generators("weights"):  # the same stream for all: common initial weights
            module = self.prototype.build(spec)
        module.data = data
        return module

    def joined(self, module: Client) -> ClientInfo:
        """Return what a client that has data sends on joining, which may give its tensors their shapes."""
        assert module.data is not None
        return ClientInfo(module.data.num_samples, self.joining(module))

    def joining(self, module: Client) -> Payload:
        """Return the tensors among that."""
        with self.visitors.lent(module, joins=True):  # a learner may ask for a Trainer in its steps
            initial = module.joining()  # which may give tensors their shapes
            return module.joining() if self.visitors.set_up(module) else initial

    def client_trainer(self, client: Client, loop: FederatedLoop, memory: MemoryCheckpointIO) -> L.Trainer:
        """Return a client's own Trainer, around the callback that joins it and the place for its checkpoints."""
        return client_trainer(client, self.trainer, self.options, loop, memory, self.planned, self.seed)

    @property
    def planned(self) -> int:
        """Number of rounds that are planned, -1 for no end."""
        return planned_rounds(self.trainer) if self.rounds is None else self.rounds
