"""FedGH: a head that the server trains on the clients' class means."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse.typing import PositiveFloat, PositiveInt
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.core.trained_server import TrainedServer
from lit_pfl.methods.knowledge.fedproto import COUNTS, PROTOTYPES
from lit_pfl.nn import Memory
from lit_pfl_callbacks.tensors import load_tensors

HEAD = "common_head."


class FedGH(Classifying):
    """Every client has a body of its own, and the head that the server trains on all clients' class means.

    A client trains body and head on its loss, and sends the mean features of every class that it has, in evaluation
    mode. The server trains its head on these, class means as samples with their class as label: one pass in batches, by
    cross entropy and SGD. Its head replaces those of all clients. Bodies may differ, features must be of one size.
    The authors' script takes one class mean a step, by an optimizer of other weights than those of the server's head,
    which stays as it began. PFLlib's server has no head of its own, and trains on the first client's as that client
    trained it.

    Args:
        server_lr: learning rate of the server's head.
        server_batch_size: its batch size.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when labels differ from client to client, the learner has no head module with a linear layer, or
            the data no class labels.

    Source:
        Yi et al. 2023; the server's pass as in PFLlib.
    """

    needs_automatic = "takes one head out of the learner"
    needs_labels = "takes the mean features of every class"
    needs_common_labels = "trains one head for all"
    trains_head_on = "class means"

    shares = frozenset()
    reserved = (PROTOTYPES, COUNTS, HEAD)

    own: Memory

    def __init__(self, server_lr: PositiveFloat = 0.01, server_batch_size: PositiveInt = 10, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.server_lr, self.server_batch_size = server_lr, server_batch_size

    def configure_state(self) -> None:
        none = torch.zeros(self.num_logits, self.num_features)
        self.own = Memory({PROTOTYPES: none, COUNTS: torch.zeros(self.num_logits, dtype=torch.int64)})

    def configure_server(self) -> "FedGHServer":
        seed = int(torch.randint(2**31, ()))
        return FedGHServer(self.head_module, self.server_lr, self.server_batch_size, seed)

    def upload(self) -> Payload:
        """Return the class means, and how many samples they are of."""
        return Payload(dict(self.own.items()))

    def download(self, reply: Mapping[str, Tensor]) -> None:
        load_tensors(self.head_module, {name.removeprefix(HEAD): tensor for name, tensor in reply.items()})

    def end_round(self) -> None:
        prototypes, counts = self.class_means()
        self.own.copy_({PROTOTYPES: prototypes, COUNTS: counts})


class FedGHServer(TrainedServer):
    """Trains a head on class means.

    Args:
        head: with the first weights.
        lr: learning rate.
        batch_size: class means a step.
        seed: of their order.
    """

    one_model = False

    count_tensors = (COUNTS,)

    def __init__(self, head: nn.Module, lr: float, batch_size: int, seed: int = 0) -> None:
        super().__init__(seed)
        self.head, self.lr, self.batch_size = head, lr, batch_size

    def make(self, clients: Mapping[int, ClientInfo]) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = copy.deepcopy(self.head).cpu()
        return module, torch.optim.SGD(module.parameters(), lr=self.lr)

    def is_averaged(self, name: str) -> bool:
        return False

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        means = torch.stack([upload[PROTOTYPES] for upload in uploads.values()]).cpu()
        kept = torch.stack([upload[COUNTS] for upload in uploads.values()]).cpu() > 0
        samples, labels = means[kept].to(next(self.module.parameters())), kept.nonzero()[:, 1]
        with self.training(round):
            for part in torch.randperm(len(labels)).split(self.batch_size):
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.module(samples[part]), labels[part]).backward()
                self.optimizer.step()

    def reply(self, client: int) -> Payload:
        return Payload({HEAD + name: tensor for name, tensor in self.module.state_dict().items()})
