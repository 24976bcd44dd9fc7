"""L2GD: clients' own models, each drawn towards the mean of all."""

from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse.typing import ClosedUnitInterval
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.server import Weighting
from lit_pfl.core.sharing import EVERYTHING


class L2GD(Client):
    """Every client trains a model of its own, and goes a part of the way to the mean of all before each round.

    Loopless gradient descent for ``sum f_i(x_i) / n + lam / (2 n) sum |x_i - x|^2``, x the mean of the models, takes
    either a local step or, with probability p, the step ``x_i <- (1 - mix) x_i + mix x`` with ``mix = eta lam / (n
    p)``. Here a round has the federation's local epochs instead of a random number of local steps, and the clients mix
    as it begins. With ``mix=0`` this is StandAlone, with ``mix=1`` FedAvg with the same weighting, bit for bit. In
    the code of kNN-Per's authors, which has this method too, clients never take the mixture over.

    Args:
        mix: how far a client goes, from 0 to 1; further would overshoot.
        weighting: the mean of the models: ``uniform``, as in the paper, or by numbers of ``samples``.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Hanzely and Richtarik 2020, Algorithm 1.
    """

    shares = EVERYTHING

    def __init__(self, mix: ClosedUnitInterval = 0.5, weighting: Weighting = "uniform", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mix, self.weighting = mix, weighting

    @torch.no_grad()
    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Go a part of the way to the mean; what is not a weight, as running statistics are, becomes its mean."""
        own = super().upload()  # as it is sent: what is not is added to any reply
        weights = self.shared_weights()
        mixed = {
            name: torch.lerp(own[name], mean.to(own[name].device), self.mix) if name in weights else mean
            for name, mean in reply.items()
        }
        super().download(mixed)
