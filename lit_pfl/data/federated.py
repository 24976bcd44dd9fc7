"""What a federation asks of its data: one part for every client."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from lit_pfl.data.loaders import num_samples


@dataclass(frozen=True)
class ClientData:
    """One client's data.

    Args:
        train: batches for training, anew at every iteration: a loader of this package such as
            :class:`~lit_pfl.data.BatchLoader`, or a PyTorch DataLoader over a map-style ``Dataset``.
        val: batches of validation data; ``()`` for none.
        test: batches of test data; ``()`` for none.
        example: a batch of one sample or a few, made without random numbers, from which networks learn the shapes of
            what they will see.
        num_classes: number of classes this client tells apart; None where its task is not to tell classes apart.
        labels_agree: whether label c means the same at every client, so that heads may be shared.
    """

    train: Any
    val: Any
    test: Any
    example: Any
    num_classes: int | None = None
    labels_agree: bool = True

    @property
    def num_samples(self) -> int:
        """Number of training samples."""
        return num_samples(self.train)


class FederatedDataModule(L.LightningDataModule, ABC):
    """Data split among clients. A new kind overrides :attr:`clients` and :meth:`client`, and what Lightning calls."""

    @property
    @abstractmethod
    def clients(self) -> list[int]:
        """Ids of the clients that have training data; there after :meth:`setup`."""

    @abstractmethod
    def client(self, client_id: int) -> ClientData:
        """Return a client's data.

        Args:
            client_id: its id, from 0.

        Raises:
            ConfigError: when there is no such client.
        """

    def move_to(self, device: torch.device) -> None:
        """Hold the data on a device, if this kind holds data at all; otherwise batches are moved one by one."""
