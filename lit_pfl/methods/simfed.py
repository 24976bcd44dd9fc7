"""SimFed: similarity matching and kernel factorization."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lit_pfl.client import Client, Factorization, evaluating
from lit_pfl.ops import cosine_similarity_matrix, least_similar, most_similar, random_others, softmax_over
from lit_pfl.payload import Payload
from lit_pfl.server import ClientInfo, MixingServer

Match = Literal["best", "random", "worst"]
CRITERIA, EMBEDDING = "criteria_input", "embedding"


class SimFed(Client):
    """Clients exchange factors with those clients whose encoders see the same input in a similar way.

    The server draws one image of Gaussian noise, the criteria input, and sends it once. A client uploads its factors
    together with what its encoder makes of that image. The server compares these embeddings by their cosine, and
    replies to every client with the softmax-weighted mixture of the factors of all clients that are similar enough.

    Args:
        tau: smallest cosine similarity of two clients that exchange anything.
        alpha: scale of the similarities in the softmax.
        match: with whom a client exchanges: ``best``, those that are similar enough; or, as controls and weighted
            alike, itself and two others, drawn at ``random`` every round or the ``worst`` matches (Table 3).
        factorization: how weights are factorized; None matches dense models (the ablation "Similarity Matching"). The
            paper does not say how u, v and mu start. By default they make the dense network's own first weights: from
            weights of rank 1, clients learn more slowly than without a factorization.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        SimFed, Eq. 1 to 8 and Algorithm 1.
    """

    shares = frozenset({"body", "u", "v", "mu", "norm", "head"})

    criteria_input: Tensor

    def __init__(
        self,
        tau: float = 0.9,
        alpha: float = 30.0,
        match: Match = "best",
        factorization: Factorization | None = Factorization(form="IFxOF", l1=1e-4),
        **kwargs: Any,
    ) -> None:
        super().__init__(factorization=factorization, **kwargs)
        self.tau, self.alpha, self.match = tau, alpha, match

    def configure_backbone(self) -> None:  # noqa: D102
        super().configure_backbone()
        self.register_buffer(CRITERIA, self._blank_image())

    def configure_server(self) -> "SimFedServer":  # noqa: D102
        noise = torch.randn_like(self._blank_image())
        return SimFedServer(self.tau, self.alpha, noise, self.match, seed=int(torch.randint(2**31, ())))

    @torch.no_grad()
    def upload(self) -> Payload:
        """Return the factors and the (d,) embedding of the criteria input, Eq. 2."""
        with evaluating(self):
            embedding = self.backbone.body(self.criteria_input).flatten()
        factors = super().upload()
        return Payload({**factors, EMBEDDING: embedding}, factors.sparse)


class SimFedServer(MixingServer):
    """Mixes what clients share by the similarity of their embeddings.

    Args:
        tau: see :class:`SimFed`.
        alpha: see :class:`SimFed`.
        criteria_input: (1, C, H, W) image sent to every client once.
        match: see :class:`SimFed`.
        seed: of random matches.
    """

    def __init__(self, tau: float, alpha: float, criteria_input: Tensor, match: Match = "best", seed: int = 0) -> None:
        self.tau, self.alpha, self.criteria_input = tau, alpha, criteria_input
        self.match, self.seed = match, seed

    def mixing_matrix(self, round: int, latest: Mapping[int, Payload]) -> Tensor:  # noqa: D102
        similarity = cosine_similarity_matrix(torch.stack([upload[EMBEDDING] for upload in latest.values()]))
        if self.match == "best":
            return softmax_over(most_similar(similarity, self.tau), similarity, self.alpha)
        if self.match == "worst":
            return softmax_over(least_similar(similarity, others=2), similarity, scale=0.0)
        rng = np.random.default_rng([self.seed, round])
        return softmax_over(random_others(similarity, 2, rng), similarity, scale=0.0)

    def mixable(self, name: str) -> bool:  # noqa: D102
        return name != EMBEDDING

    def start(self, clients: Mapping[int, ClientInfo]) -> None:  # noqa: D102
        super().start(clients)
        self.model = Payload({**self.model, CRITERIA: self.criteria_input}, self.model.sparse)
