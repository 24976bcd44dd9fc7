"""FactorizedFL: personalized factors, matched by their similarity."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.mixing import MixingServer
from lit_pfl.core.payload import Payload
from lit_pfl.core.sharing import Role
from lit_pfl.errors import ConfigError
from lit_pfl.learners import OptimizerCallable
from lit_pfl.nn import factorized_layers
from lit_pfl.nn.factorization import Factorization
from lit_pfl.ops import (
    cosine_similarity_matrix,
    least_similar,
    most_similar,
    one_after_another,
    random_others,
    softmax_over,
)

#: what is mixed, beside everything of the body that is not factorized
MIXES: dict[str, frozenset[Role]] = {
    "u": frozenset({"u"}),
    "uv": frozenset({"u", "v"}),
    "um": frozenset({"u", "mu"}),
    "uvm": frozenset({"u", "v", "mu"}),
}


class FactorizedFL(Client):
    """Clients share their base filters u with those whose personal coefficients v are like their own.

    Every weight is ``pi(u v^T + mu)``. A client uploads u, and v of the layer before the classifier. The server
    compares clients by the cosine of that v, and replies to each with the softmax-weighted mixture of the u of its
    partners; v and the sparse mu are kept local. The beta mixes all of u, v and mu.

    Args:
        mixes: which factors are mixed: ``u`` (Factorized-FL), ``uv``, ``um``, ``uvm`` (Factorized-FL beta).
        tau: smallest cosine similarity of partners.
        epsilon: scale of the similarities in the softmax.
        min_matches: a client has at least this many partners, itself among them, even below ``tau``.
        below_tau: ``drop``: those below the threshold take no part; ``zero``: they do, with similarity 0.
        match: whom a client is matched with: the ``best``; as controls itself and three others, drawn at ``random``
            every round or the ``worst``; or ``none``.
        mixing: ``simultaneous``: all mixtures are of what was uploaded; ``sequential``: each client mixes what others
            before it, in random order, have mixed already, as the released code does.
        factorization: how weights are factorized. By default mu starts at zero, as the paper says, and weights at rank
            1; the much faster ``start="dense"`` is what this library's own configurations have.
        optimizer: see :class:`~lit_pfl.Client`; the paper's by default.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: without a factorization, or with a mixture of mu that is not there.

    Source:
        Factorized-FL, Eq. 2 to 6, Algorithms 1 and 2; its domains use tau = 0.95, epsilon = 20, min_matches = 4,
        permuted labels 0, 1, 10, standard labels 0, 1, 20 (released code).
    """

    shares: frozenset[Role] = MIXES["u"] | {"body", "norm", "head", "adapter"}

    def __init__(
        self,
        mixes: Literal["u", "uv", "um", "uvm"] = "u",
        tau: float = 0.0,
        epsilon: float = 1.0,
        min_matches: PositiveInt = 1,
        below_tau: Literal["drop", "zero"] = "drop",
        match: Literal["best", "random", "worst", "none"] = "best",
        mixing: Literal["simultaneous", "sequential"] = "simultaneous",
        factorization: Factorization | None = Factorization(form="FFxIO", l1=5e-4, threshold=5e-4, start="paper"),
        optimizer: OptimizerCallable = lambda parameters: torch.optim.SGD(
            parameters, lr=1e-3, momentum=0.9, weight_decay=1e-6
        ),
        **kwargs: Any,
    ) -> None:
        super().__init__(factorization=factorization, optimizer=optimizer, **kwargs)
        if factorization is None:
            raise ConfigError("model.factorization: FactorizedFL matches clients by their factors; give one.")
        if "m" in mixes and not factorization.mask:
            raise ConfigError(
                f"model.mixes={mixes} shares mu, which model.factorization.mask=false leaves out; use u or uv."
            )
        self.shares = MIXES[mixes] | {"body", "norm", "head", "adapter"}
        self.rule = MatchingRule(tau, epsilon, min_matches, below_tau, match, mixing)

    @property
    def criterion(self) -> str:
        """Name of the v that clients are compared by, that of the layer before the classifier."""
        head = self.head_names
        layers = factorized_layers(self.learner)
        names = [name for name, layer in layers if f"{name}.v" not in head and not layer.is_copy]
        if not names:
            raise ConfigError(
                f"model.learner: FactorizedFL needs a two-dimensional convolution or a linear layer in the body, and "
                f"{type(self.learner).__name__} has none that is trained."
            )
        return f"{names[-1]}.v"

    def is_shared(self, name: str, role: Role) -> bool:
        leaf = name.rpartition(".")[2]
        stays = role == "head" and leaf in ("v", "mu") and leaf not in self.shares
        return super().is_shared(name, role) and not stays

    def upload(self) -> Payload:
        """Return what is mixed, and the v that clients are compared by."""
        return super().upload().with_({self.criterion: self.learner.get_parameter(self.criterion).detach()})

    def configure_server(self) -> "FactorizedFLServer":
        mixed = "v" in self.shares
        return FactorizedFLServer(self.rule, self.criterion, mixed, seed=int(torch.randint(2**31, ())))


class MatchingRule:
    """Makes mixing weights from similarities; see :class:`FactorizedFL` for the options."""

    def __init__(
        self, tau: float, epsilon: float, min_matches: int, below_tau: str, match: str, mixing: str, others: int = 3
    ) -> None:
        self.tau, self.epsilon, self.min_matches, self.below_tau = tau, epsilon, min_matches, below_tau
        self.match, self.mixing, self.others = match, mixing, others

    def weights(self, similarity: Tensor, rng: np.random.Generator) -> Tensor:
        """Return the (K, K) mixing weights for (K, K) similarities."""
        everyone = torch.ones_like(similarity, dtype=torch.bool)
        if self.match == "best" and self.below_tau == "zero":
            similarity, partners = similarity.where(similarity >= self.tau, 0.0), everyone
        else:
            partners = {
                "best": lambda: most_similar(similarity, self.tau, self.min_matches),
                "worst": lambda: least_similar(similarity, self.others),
                "random": lambda: random_others(similarity, self.others, rng),
                "none": lambda: torch.zeros_like(everyone).fill_diagonal_(True),
            }[self.match]()
        weights = softmax_over(partners, similarity, self.epsilon)
        if self.mixing == "sequential":
            weights = one_after_another(weights, rng.permutation(len(weights)).tolist())
        return weights


class FactorizedFLServer(MixingServer):
    """Mixes what clients share by the similarity of one of their v.

    Args:
        rule: how similarities become weights.
        criterion: the name of that v.
        mixes_criterion: whether it is mixed and sent back itself.
        seed: of random matches and orders.
    """

    def __init__(self, rule: MatchingRule, criterion: str, mixes_criterion: bool, seed: NonNegativeInt = 0) -> None:
        self.rule, self.criterion, self.mixes_criterion, self.seed = rule, criterion, mixes_criterion, seed

    def mixing_matrix(self, round: int, latest: Mapping[int, Payload]) -> Tensor:
        vectors = torch.stack([upload[self.criterion].flatten() for upload in latest.values()])
        return self.rule.weights(cosine_similarity_matrix(vectors), np.random.default_rng([self.seed, round]))

    def is_averaged(self, name: str) -> bool:
        return self.mixes_criterion or name != self.criterion
