"""IFCA: clients choose among several models the one that suits their data."""

from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor, nn

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server, UniformServer
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.data.loaders import in_order
from lit_pfl.learners.scoring import mean_loss, needs_loss
from lit_pfl.learners.unchanged import unchanged
from lit_pfl_callbacks.tensors import load_tensors

CLUSTER = "cluster"


class IFCA(Client):
    """The server has k models; a client trains the one whose loss on its data is least, and is averaged into it.

    A client is sent all k models. It takes the mean loss of each on its training data, in evaluation mode and without
    augmentation, and continues with the best, of equal ones the first. A model that nobody has chosen stays as it is.
    What is not sent, such as a head where labels differ, is the client's own under every model. With ``clusters=1``
    this is FedAvg with equal weights, bit for bit. The authors' code chooses by the loss on what is then scored.

    The first model is that of the first client; the others have its layers' weights resampled, and normal noise on
    weights of modules that have no ``reset_parameters``. An optimizer forgets its momentum where the model is another.

    Args:
        clusters: the number of models, k.
        kwargs: see :class:`~lit_pfl.Client`.

    Source:
        Ghosh et al. 2020, Algorithm 1, model averaging.
    """

    may_unfreeze = False

    shares = EVERYTHING
    reserved = (CLUSTER,)

    cluster: Tensor

    def __init__(self, clusters: PositiveInt = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.clusters = clusters
        self._moved = False

    def configure_state(self) -> None:
        self.register_buffer(CLUSTER, torch.tensor(0))

    def configure_server(self) -> Server:
        models = []
        with unchanged(self.learner):
            for _ in range(self.clusters - 1):
                draw_anew(self.learner)
                models.append(Payload(self.shared_parameters()).clone())
        return IFCAServer(models)

    @torch.no_grad()
    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Become the model of a reply, named ``<cluster>/<tensor>``, with the least loss."""
        models = list(by_number(reply).values()) or [{}]
        best = 0
        if len(models) > 1:
            batches = in_order(self.training_data())
            losses = []
            for model in models:
                load_tensors(self.learner, model)
                losses.append(mean_loss(self.learner, batches)[1])
            best = int(torch.tensor(losses).nan_to_num(nan=torch.inf).argmin())
        self._moved = best != int(self.cluster)
        self.cluster.fill_(best)
        super().download(models[best])

    def begin_round(self) -> None:
        if self.clusters > 1:
            needs_loss(self.learner, self.training_data(), "IFCA")
        if self._moved:
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()

    def upload(self) -> Payload:
        """Return the weights, and which model they are of."""
        return super().upload().with_({CLUSTER: self.cluster})


class IFCAServer(UniformServer):
    """Averages each model over those who chose it.

    Args:
        further: what all models but the first are before round 1.

    Attributes:
        models: the k models, by number.
        chosen: the model that each client chose last, by client id.
    """

    one_model = False

    averages = True
    kept = ("chosen", "models")

    models: dict[int, Payload]
    chosen: dict[int, int]

    def __init__(self, further: list[Payload]) -> None:
        self.further = further

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        self.models = {0: self.model}
        for cluster, model in enumerate(self.further, 1):
            self.models[cluster] = Payload({name: model[name].to(own.device) for name, own in self.model.items()})
        self.chosen = {}

    def is_averaged(self, name: str) -> bool:
        return name != CLUSTER

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        self.chosen |= {client: int(upload[CLUSTER]) for client, upload in uploads.items()}
        for cluster, model in self.models.items():
            own = {client: upload for client, upload in uploads.items() if int(upload[CLUSTER]) == cluster}
            if own:
                self.models[cluster] = self.average(own, [1 / len(own)] * len(own), list(model), model)

    def center(self, client: int, upload: Payload) -> Payload:
        """Return the model that the client chose; nothing if there is none of that number."""
        return self.models.get(int(upload[CLUSTER]), Payload({}))

    def reply(self, client: int) -> Payload:
        """Return all models, each tensor named ``<cluster>/<tensor>``."""
        return numbered(self.models)

    def mixing(self) -> tuple[list[int], Tensor] | None:
        """Return equal weights of all clients that have chosen the same model."""
        if not self.chosen:
            return None
        ids = sorted(self.chosen)
        of = torch.tensor([self.chosen[client] for client in ids])
        same = (of[:, None] == of).float()
        return ids, same / same.sum(1, keepdim=True)


def numbered(models: Mapping[int, Payload]) -> Payload:
    """Return the tensors of several models, each named ``<number>/<tensor>``."""
    tensors = {f"{number}/{name}": tensor for number, model in models.items() for name, tensor in model.items()}
    return Payload(tensors, [f"{number}/{name}" for number, model in models.items() for name in model.sparse])


def by_number(reply: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return the models of a :func:`numbered` reply, in the order of their numbers."""
    models: dict[int, dict[str, Tensor]] = {}
    for name, tensor in reply.items():
        number, _, rest = name.partition("/")
        models.setdefault(int(number), {})[rest] = tensor
    return dict(sorted(models.items()))


@torch.no_grad()
def draw_anew(module: nn.Module) -> None:
    """Give a module's trained parameters other first values, from PyTorch's default generator."""
    for part in module.modules():
        own = [weight for weight in part.parameters(recurse=False) if weight.requires_grad]
        if not own:
            continue
        if callable(reset := getattr(part, "reset_parameters", None)):
            frozen = [(x, x.clone()) for x in part.parameters(recurse=False) if not x.requires_grad]
            reset()
            for weight, was in frozen:
                weight.copy_(was)
        else:
            for weight in own:
                spread = weight.std() if weight.numel() > 1 and weight.std() > 0 else 1.0
                weight.add_(torch.randn_like(weight) * spread)
