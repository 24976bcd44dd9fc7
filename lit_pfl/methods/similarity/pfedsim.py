"""pFedSim: clients with similar classifiers share bodies."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jsonargparse.typing import NonNegativeInt
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.mixing import MixingServer
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.core.sharing import EVERYTHING, needs_head
from lit_pfl.errors import ConfigError

#: the highest similarity, which every client has to itself: one of 1 would have an infinite weight
ITSELF = 0.9999


class PFedSim(Client):
    """FedAvg at first; then every client has its own head, and a mixture of bodies from clients with a similar head.

    In the first ``warmup_rounds`` all weights are averaged by samples. From then on, after each round, the similarity
    of every two of its participants is ``s_ij = max(0, mean over classes c of cos(h_ic, h_jc))``, where h_ic is row c
    of the last linear layer's weight in client i's head; it stays until both take part in one round again. Client i
    receives the body ``sum_j a_ij body_j`` of the latest bodies, with a_ij in proportion to ``-log(1 - s_ij)`` and
    ``s_ii = 0.9999``. Clients that have not met yet have no weight in each other's. While the warm-up lasts this is
    FedAvg, bit for bit.

    The authors' code lets s_ij become 1, with an infinite weight, where two heads are equal; here it is at most s_ii.

    Args:
        warmup_rounds: rounds of FedAvg; half of all rounds in the authors' code, which runs 100.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when labels differ from client to client, the head is not known, is kept local or has no linear
            layer.

    Source:
        Tan et al. 2023, as in the code of FL-bench, which is of the same first author.
    """

    needs_common_labels = "compares heads class by class"
    may_unfreeze = False

    shares = EVERYTHING

    def __init__(self, warmup_rounds: NonNegativeInt = 50, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.warmup_rounds = warmup_rounds

    def configure_state(self) -> None:
        needs_head(self.learner, self.head_names, "PFedSim")
        sent = self.shared_parameters()
        rows = [name for name in sent if name in self.head_names and name.endswith("weight") and sent[name].dim() > 1]
        if not rows:
            raise ConfigError(
                "model.head: PFedSim compares the rows of a linear layer in the heads that clients send, and none is "
                "sent; share the head, with a linear layer that is not factorized."
            )
        self.compared = rows[-1]

    def configure_server(self) -> "PFedSimServer":
        return PFedSimServer(self.warmup_rounds, self.compared, self.head_names)


class PFedSimServer(MixingServer):
    """Averages at first, then mixes bodies by how similar heads are.

    Args:
        warmup_rounds: see :class:`PFedSim`.
        compared: name of the weight whose rows are compared.
        head: names of the head's tensors, which come back in the warm-up only.

    Attributes:
        similarity: (K, K) of every two clients when they last took part together; 0 before.
    """

    kept = ("similarity",)

    similarity: Tensor

    def __init__(self, warmup_rounds: int, compared: str, head: frozenset[str]) -> None:
        self.warmup_rounds, self.compared, self.head = warmup_rounds, compared, head

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        self.row = {client: i for i, client in enumerate(self.num_samples)}
        self.similarity = torch.zeros(len(self.row), len(self.row), dtype=torch.float64)

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        if round <= self.warmup_rounds:
            Server.aggregate(self, round, uploads)
            return
        met = torch.tensor([self.row[client] for client in uploads])
        found = similarity_of_rows([upload[self.compared] for upload in uploads.values()])
        self.similarity = self.similarity.cpu()  # a checkpoint may have been loaded elsewhere
        self.similarity[met[:, None], met] = found.cpu()
        super().aggregate(round, uploads)

    def mixing_matrix(self, round: int, latest: Mapping[int, Payload]) -> Tensor:
        rows = torch.tensor([self.row[client] for client in latest])
        return weights_by_similarity(self.similarity[rows[:, None], rows])

    def reply(self, client: int) -> Payload:
        mixed = super().reply(client)
        if client not in self.latest:
            return mixed
        return Payload({name: mixed[name] for name in mixed if name not in self.head}, mixed.sparse)


def similarity_of_rows(weights: Sequence[Tensor]) -> Tensor:
    """Return (J, J) means over rows of the cosines of two clients' rows, from 0 to 1, negative means being 0.

    Args:
        weights: of J clients a (C, ...) weight; a row of zeros is like no other.
    """
    rows = torch.nn.functional.normalize(torch.stack(list(weights)).double().flatten(2), dim=2)
    return torch.einsum("icd,jcd->ij", rows, rows).div(rows.shape[1]).clamp(0, 1)


def weights_by_similarity(similarity: Tensor) -> Tensor:
    """Return (J, J) weights in proportion to ``-log(1 - s)``, every row of which sums to 1.

    Args:
        similarity: (J, J), at least 0. What is above 0.9999 counts as that, as does the diagonal.
    """
    weights = -torch.log1p(-similarity.clamp(max=ITSELF).fill_diagonal_(ITSELF))
    return weights / weights.sum(1, keepdim=True)
