"""LG-FedAvg: local representations, a common classifier."""

from typing import Any

from jsonargparse.typing import PositiveInt

from lit_pfl.core import Client
from lit_pfl.core.server import Weighting
from lit_pfl.core.sharing import EVERYTHING, Role, last_layers, needs_head


class LGFedAvg(Client):
    """Only the last layers are averaged; the rest is each client's own. All train together. FedPer the other way round.

    Where labels differ from client to client the classifier may not be sent, so nothing is, and this is
    :class:`~lit_pfl.methods.StandAlone`. Clients start from common random weights; the authors' code starts from a
    model that FedAvg has trained.

    Args:
        shared_layers: how many of the last layers are averaged, the classifier being one (2 in the authors' code); see
            :class:`~lit_pfl.methods.FedPer`.
        weighting: the mean of what is sent: ``uniform``, as in the authors' code, or by numbers of ``samples``, as in
            FedAvg.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the network has fewer layers.

    Source:
        Liang et al. 2020, Algorithm 1.
    """

    shares = EVERYTHING

    common: frozenset[str]

    def __init__(self, shared_layers: PositiveInt = 1, weighting: Weighting = "uniform", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shared_layers, self.weighting = shared_layers, weighting

    def configure_learner(self) -> None:
        super().configure_learner()
        needs_head(self.learner, self.head_names, "LGFedAvg")
        self.common = last_layers(self.roles(), self.shared_layers, "model.shared_layers")

    def is_shared(self, name: str, role: Role) -> bool:
        return name in self.common and super().is_shared(name, role)
