"""FedADMM: consensus among clients by dual variables."""

from typing import Any, Literal

import torch
from jsonargparse.typing import PositiveFloat
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.errors import ConfigError
from lit_pfl.nn import Memory


class FedADMM(Client):
    """Clients minimize their loss plus ``<y_i, w - theta> + rho / 2 |w - theta|^2``, theta the model that they receive.

    After training, ``y_i <- y_i + rho (w_i - theta)``. With ``u_i = w_i + y_i / rho``, a client sends theta plus the
    change of its u_i, and the server takes the plain mean: ``theta <- theta + sum (change of u_i) / |S|``. A step of
    another length is ``server_optimizer=ServerMomentum(lr=0.5, momentum=0)``, the authors' from round 60 on. Where this
    comes to rest ``-y_i`` is the gradient of client i's loss.

    A client trains on from its own w_i of the last time, at first from the initial weights, in whichever round that is.
    So theta is the mean of all u_i where the server's lr is the share of the clients that take part. With
    ``start="global"``, as in the authors' code, it trains from theta, which then counts as its former w_i: what it
    sends is ``theta + 2 (w_i - theta)``.

    The server begins with the first client's initial weights, which all clients of a simulation, and of Flower's nodes,
    have in common. A client that a Trainer is given alone may have others: its first w_i is the theta that it receives
    first, which is only the initial one if it takes part in round 1.

    Args:
        rho: how strongly clients are held.
        start: where a client begins a round: at its ``own`` last weights, or at the ``global`` model.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: for factorized weights.

    Source:
        Gong et al. 2022, Algorithm 1.
    """

    needs_automatic = "adds dual variables to the gradients of one loss"
    needs_full_steps = "adds its whole step to y_i"
    may_unfreeze = False

    shares = EVERYTHING
    weighting = "uniform"

    dual: Memory
    own: Memory
    begun: Tensor

    def __init__(self, rho: PositiveFloat = 0.01, start: Literal["own", "global"] = "own", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.rho, self.start = rho, start
        self._theta: dict[str, Tensor] = {}
        self._sent: dict[str, Tensor] = {}  # in place of the weights, until the upload is handed over

    def configure_state(self) -> None:
        if self.factorization is not None:
            raise ConfigError("model.factorization: FedADMM adds up how weights change, and takes dense ones only.")
        self.dual = Memory(self.shared_weights()).zero_()
        self.own = Memory(self.shared_weights() if self.start == "own" else {})
        # whether its own w_i is known: theta^0 at first, which a client that is alone has not seen
        self.register_buffer("begun", torch.tensor(not self.alone))

    @torch.no_grad()
    def begin_round(self) -> None:
        weights = self.shared_weights()
        self._theta = {name: weight.detach().clone() for name, weight in weights.items()}
        self._sent = {}
        if self.begun:
            for name, last in self.own.items():
                weights[name].copy_(last)
        self.own.copy_(weights)

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, with ``y_i + rho (w - theta)`` added to its gradient."""
        # Zeros that have a gradient, so that the training loss that is reported stays the loss.
        zeros = [
            ((weight - weight.detach()) * (self.dual[name] + self.rho * (weight.detach() - self._theta[name]))).sum()
            for name, weight in self.shared_weights().items()
        ]
        return super().objective(batch, batch_idx) + torch.stack(zeros).sum()

    @torch.no_grad()
    def end_round(self) -> None:
        """Step the dual variables, and take note of what is sent."""
        weights = self.shared_weights()
        away = {name: weight - self._theta[name] for name, weight in weights.items()}
        former = dict(self.own.items()) or self._theta
        # theta + (w - former w) + (y - former y) / rho
        self._sent = {
            name: self._theta[name] + (weight - former[name]) + away[name] for name, weight in weights.items()
        }
        # A client whose training ran away is refused by the server, which knows of no change; nor may the client.
        if all(tensor.isfinite().all() for tensor in away.values()):
            self.dual.copy_({name: self.dual[name] + self.rho * tensor for name, tensor in away.items()})
            self.own.copy_(weights)
            self.begun.fill_(True)
        self._theta = {}  # a sleeping client keeps no copy

    def upload(self) -> Payload:
        """Return theta plus the change of ``w_i + y_i / rho``; on joining, the weights."""
        return super().upload().with_(self._sent)

    def release_round_state(self) -> tuple[float, int]:
        self._sent = {}
        return super().release_round_state()
