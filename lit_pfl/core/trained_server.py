"""A server with a network and an optimizer of its own."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn

from lit_pfl.core.payload_state import saved
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl_callbacks.random_state import torch_state_kept

CPU = torch.device("cpu")


class TrainedServer(Server):
    """A server that trains a module on what clients upload: a hypernetwork, a generator, a head.

    A method defines which, in :meth:`make`, and trains it in :meth:`aggregate` inside of :meth:`training`. Module and
    optimizer are in checkpoints, and what is drawn depends on the seed and the round alone. The module is on the CPU,
    whatever the clients' device, so that the numbers are the same on any: take uploads there by ``.cpu()``.

    Args:
        seed: of first weights and of all draws, as from ``int(torch.randint(2**31, ()))`` in ``configure_server``.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @abstractmethod
    def make(self, clients: Mapping[int, ClientInfo]) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the module and its optimizer, on the CPU; :meth:`start` calls this, with seeded random numbers."""

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        with self.training(0):
            self.module, self.optimizer = self.make(clients)

    @contextmanager
    def training(self, round: int) -> Iterator[None]:
        """Let gradients be taken, and random numbers be drawn that depend on the seed and the round."""
        entropy = int(np.random.SeedSequence([self.seed, round]).generate_state(1, np.uint64)[0])
        with torch_state_kept(), torch.inference_mode(False), torch.enable_grad():
            torch.manual_seed(entropy >> 1)
            yield

    def state_dict(self) -> dict[str, Any]:
        own = {"module": dict(self.module.state_dict()), "optimizer": self.optimizer.state_dict()}
        return {**super().state_dict(), **saved(own, type(self).__name__)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.module.load_state_dict(move_data_to_device(state["module"], CPU))
        self.optimizer.load_state_dict(move_data_to_device(state["optimizer"], CPU))
