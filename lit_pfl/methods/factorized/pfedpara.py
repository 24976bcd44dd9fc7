"""FedPara and pFedPara: weights as Hadamard products of low-rank ones."""

from typing import Any

from jsonargparse.typing import NonNegativeFloat

from lit_pfl.core import Client
from lit_pfl.core.sharing import Role
from lit_pfl.errors import ConfigError
from lit_pfl.nn import RankRule, hadamard, hadamard_layers


class PFedPara(Client):
    """Every weight of the body is ``W1 * (W2 + 1)``: W1's factors are averaged, W2's never leave their client.

    Everything else is as in FedAvg: biases, affine parameters of normalization layers and the classifier, which stays
    dense, are averaged, the classifier only where labels mean the same at every client.

    Not ``personal``, it is FedPara: weights are ``W1 * W2``, and both are averaged.

    Args:
        ratio: how large the factors are, W1's and W2's together, as a share of the dense weights; with
            ``rank_rule="gamma"``, gamma from 0 to 1. With 0.72 the papers' ResNet-9 sends the 7.4 GB, with 0.78 the
            15.98 GB that Factorized-FL, Table 1, reports for pFedPara in its label and its domain scenario (running
            statistics of norm layers sent too), although its text speaks of 90 to 99 %.
        rank_rule: how a layer's rank follows: ``ratio``, smallest rank with that share of the dense parameters, as in
            the authors' released notebook; ``gamma``, ``(1 - gamma) r_min + gamma r_max``, as in their paper.
        personal: whether W2 is each client's own.
        kwargs: see :class:`~lit_pfl.Client`; ``factorization`` is not for this method.

    Raises:
        ConfigError: when a ``factorization`` is given; when the body has no layer whose weights could be products.

    Source:
        Nam et al. 2022, Propositions 1 and 2, and pFedPara.
    """

    needs_dense = "has weights of a form of its own"

    shares: frozenset[Role] = frozenset({"body", "norm", "head", "adapter"})

    private: frozenset[str]

    def __init__(
        self,
        ratio: NonNegativeFloat = 0.72,
        rank_rule: RankRule = "ratio",
        personal: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.ratio, self.rank_rule, self.personal = ratio, rank_rule, personal

    def configure_learner(self) -> None:
        super().configure_learner()
        head = self.head_names
        hadamard(self.learner, self.ratio, self.rank_rule, self.personal, keep=lambda path: f"{path}.weight" in head)
        if next(hadamard_layers(self.learner), None) is None:
            raise ConfigError(
                "model.learner: PFedPara needs a two-dimensional convolution or a linear layer in the body that it can "
                f"replace, and {type(self.learner).__name__} has none; use model=FedAvg, which it would be."
            )
        self.private = frozenset(
            f"{name}.{factor}"
            for name, layer in hadamard_layers(self.learner)
            for factor, _ in layer.w2.named_parameters(prefix="w2")
            if self.personal
        )

    def is_shared(self, name: str, role: Role) -> bool:
        return name not in self.private and super().is_shared(name, role)
