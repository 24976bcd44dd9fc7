"""FedAMP and HeurFedAMP: similar clients draw each other near, by messages of the server."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, PositiveFloat
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.mixing import MixingServer
from lit_pfl.core.payload import Payload
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.ops import cosines, softmax_over, squared_distance, squared_distances


class FedAMP(Client):
    """Every client trains a model w_i on its loss and ``lam / (2 alpha) |w_i - u_i|^2``; u_i is its mixture of all.

    The server mixes ``u_i = sum_j xi_ij w_j`` of the clients' latest models, for j other than i with
    ``xi_ij = alpha / sigma * exp(-|w_i - w_j|^2 / sigma)``: those that are near already draw each other nearer. What is
    left to 1 is the client's own weight; where the others come to more than 1, they are divided by their sum. Distances
    are over the trained weights that are sent. With ``lam=0`` and ``start="own"`` this is StandAlone, bit for bit. In
    PFLlib's code the term has no gradient, so that is what its clients do.

    Args:
        lam: how strongly a model is drawn to its mixture, together with alpha.
        alpha: the server's step.
        sigma: how fast the weight of others falls with their squared distance.
        start: where a round begins: at the client's ``own`` model, or at its ``mixture``.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Huang et al. 2021, Algorithm 1 and Eq. 4 to 6.
    """

    needs_automatic = "adds a proximal term to the loss"
    may_unfreeze = False

    shares = EVERYTHING

    def __init__(
        self,
        lam: NonNegativeFloat = 1.0,
        alpha: PositiveFloat = 1.0,
        sigma: PositiveFloat = 1.0,
        start: Literal["own", "mixture"] = "own",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.lam, self.alpha, self.sigma, self.start = lam, alpha, sigma, start
        self._mixture: dict[str, Tensor] = {}

    def configure_server(self) -> MixingServer:
        return FedAMPServer(frozenset(self.shared_weights()), self.alpha, self.sigma)

    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Take note of the mixture, and load it where the round begins there."""
        self._mixture = {name: reply[name].to(w.device).clone() for name, w in self.shared_weights().items()}
        if self.start == "mixture":
            super().download(reply)

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().objective(batch, batch_idx)
        if self.lam and self._mixture:
            loss = loss + self.lam / (2 * self.alpha) * squared_distance(self.shared_weights(), self._mixture)
        return loss

    def end_round(self) -> None:
        self._mixture = {}  # a sleeping client keeps no copy


class HeurFedAMP(FedAMP):
    """FedAMP whose server compares models by their cosine, and gives a client's own a fixed weight.

    For j other than i, ``xi_ij = (1 - self_weight) exp(sigma cos(w_i, w_j)) / sum_h exp(sigma cos(w_i, w_h))``, the sum
    over all h other than i. A client that is alone has the weight 1. PFLlib's early code never keeps the mixture.

    Args:
        self_weight: the weight xi_ii of a client's own model.
        lam: how strongly a model is drawn to its mixture, together with alpha.
        alpha: divides lam.
        sigma: scale of the cosines in the softmax; 0 weighs all others equally.
        start: where a round begins: at the client's ``own`` model, or at its ``mixture``.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Huang et al. 2021, Eq. 9.
    """

    def __init__(
        self,
        self_weight: ClosedUnitInterval = 0.1,
        lam: NonNegativeFloat = 1.0,
        alpha: PositiveFloat = 1.0,
        sigma: NonNegativeFloat = 0.1,
        start: Literal["own", "mixture"] = "own",
        **kwargs: Any,
    ) -> None:
        super().__init__(lam=lam, alpha=alpha, sigma=sigma, start=start, **kwargs)
        self.self_weight = self_weight

    def configure_server(self) -> MixingServer:
        return HeurFedAMPServer(frozenset(self.shared_weights()), self.self_weight, self.sigma)


class FedAMPServer(MixingServer):
    """Mixes by distances.

    Args:
        compared: names of what is compared.
        alpha: see :class:`FedAMP`.
        sigma: see :class:`FedAMP`.
    """

    def __init__(self, compared: frozenset[str], alpha: float, sigma: float) -> None:
        self.compared, self.alpha, self.sigma = compared, alpha, sigma

    def mixing_matrix(self, round: int, latest: Mapping[int, Payload]) -> Tensor:
        distances = squared_distances(list(latest.values()), sorted(self.compared))
        others = (self.alpha / self.sigma * torch.exp(-distances / self.sigma)).fill_diagonal_(0)
        others /= others.sum(1, keepdim=True).clamp(min=1)
        return others + torch.diag((1 - others.sum(1)).clamp(min=0))


class HeurFedAMPServer(MixingServer):
    """Mixes by cosines.

    Args:
        compared: names of what is compared.
        self_weight: see :class:`HeurFedAMP`.
        sigma: see :class:`HeurFedAMP`.
    """

    def __init__(self, compared: frozenset[str], self_weight: float, sigma: float) -> None:
        self.compared, self.self_weight, self.sigma = compared, self_weight, sigma

    def mixing_matrix(self, round: int, latest: Mapping[int, Payload]) -> Tensor:
        itself = torch.eye(len(latest), dtype=torch.float64)
        if len(latest) == 1:
            return itself
        similarity = cosines(list(latest.values()), sorted(self.compared))
        others = softmax_over(itself == 0, similarity, self.sigma)
        return self.self_weight * itself + (1 - self.self_weight) * others
