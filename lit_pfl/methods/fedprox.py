"""FedProx: federated averaging of clients that are held near the global model."""

from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.sharing import EVERYTHING


class FedProx(Client):
    """Clients minimise their loss plus ``mu / 2 ||w - w_t||^2``, with w_t the global model that they began with.

    Everything else is federated averaging. What stays at home, such as a head where labels differ, is not held.

    Args:
        mu: how strongly; 0 is FedAvg. The paper tries 0.001, 0.01, 0.1 and 1.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Li et al. 2020 (Federated Optimization in Heterogeneous Networks), Eq. 2 and Algorithm 2.
    """

    needs_automatic = "adds a proximal term to the loss"

    shares = EVERYTHING

    def __init__(self, mu: NonNegativeFloat = 0.01, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mu = mu
        self._start: dict[str, Tensor] = {}

    def begin_round(self) -> None:  # noqa: D102
        if self.mu:
            self._start = {name: weight.detach().clone() for name, weight in self.shared_weights().items()}

    def objective(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: D102
        loss = super().objective(batch, batch_idx)
        if self.mu:
            loss = loss + self.mu / 2 * squared_distance(self.shared_weights(), self._start)
        return loss

    def end_round(self) -> None:  # noqa: D102
        self._start = {}  # a sleeping client keeps no copy


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the squares of all differences between tensors of the same names."""
    return torch.stack([(a[name] - b[name]).square().sum() for name in b]).sum()
