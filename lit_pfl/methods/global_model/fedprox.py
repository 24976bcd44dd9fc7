"""FedProx: federated averaging of clients that are held near the global model."""

from typing import Any

from jsonargparse.typing import NonNegativeFloat
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.ops import squared_distance


class FedProx(Client):
    """Clients minimize their loss plus ``mu / 2 ||w - w_t||^2``, with w_t the global model that they began with.

    Everything else is federated averaging. What is kept local, such as a head where labels differ, is not held.

    Args:
        mu: how strongly; 0 is FedAvg. The paper tries 0.001, 0.01, 0.1 and 1.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Li et al. 2020 (Federated Optimization in Heterogeneous Networks), Eq. 2 and Algorithm 2.
    """

    needs_automatic = "adds a proximal term to the loss"

    remembers = True

    shares = EVERYTHING

    def __init__(self, mu: NonNegativeFloat = 0.01, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mu = mu

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().objective(batch, batch_idx)
        if self.mu:
            loss = loss + self.mu / 2 * squared_distance(self.shared_weights(), self.received)
        return loss
