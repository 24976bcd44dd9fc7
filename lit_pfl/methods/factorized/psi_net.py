"""Psi-Net: groups of neurons for groups of classes, each averaged over the clients that have such classes."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from jsonargparse.typing import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from lit_pfl.core import Client
from lit_pfl.core.averaging import mean_of_rows, weighted_mean
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server, Weighting
from lit_pfl.data.loaders import labels_of, needed
from lit_pfl.errors import ConfigError
from lit_pfl.learners import BackboneCallable, OptimizerCallable
from lit_pfl.models import VGG9, Backbone, Boundary, GroupedNorms, Structure, psi
from lit_pfl.nn import class_groups, row_groups, trim

OWN = "groups"


class PsiNet(Client):
    """The deep layers are divided into groups that see nothing of each other, and the classes among the groups.

    So a group's neurons learn the same classes at every client, and averaging them coordinate by coordinate is right.
    Shared layers are averaged over all clients, a group over the clients that have training samples of its classes; a
    group that nobody has in a round keeps its value. A client without any of a group's classes has no such group: it
    neither trains, sends nor receives it, and those classes are not in its softmax. With one group and
    ``weighting="samples"`` this is FedAvg.

    Args:
        groups: number of groups G; by default every class has one.
        depth: see :func:`~lit_pfl.models.psi`, like ``boundary``, ``norm`` and ``structure``.
        mapping: which class is of which group: ``contiguous``: class c of group ``floor(c G / C)``; or the group of
            every class.
        boundary: what groups see of the last shared layer.
        norm: the norms of grouped layers.
        structure: ``grouped``, or ``dense``: plain averaging on a network of the same widths.
        trim: whether clients leave out the groups that they have no classes of. If not, every client trains and
            exchanges the whole network, and averages are over the same clients nevertheless.
        weighting: how clients count in averages: ``uniform``, all the same, as in the paper (Eq. 7 and 8), or by
            numbers of ``samples``, as in FedAvg.
        backbone: see :class:`~lit_pfl.Client`; the paper's VGG-9 by default, with batch norm in what stays shared.
        optimizer: see :class:`~lit_pfl.Client`; FedMA's by default, since the paper does not say.
        norm_stats: see :class:`~lit_pfl.Client`; the paper averages running statistics of shared layers.
        kwargs: see :class:`~lit_pfl.Client`; ``factorization`` is not for this method.

    Raises:
        ConfigError: for numbers that do not go together, a backbone that would mix groups, and a ``factorization``.

    Source:
        Yu et al. 2020 (Heterogeneous Federated Learning), Sections 3 and 4.
    """

    needs_automatic = "trains parts of a network that it builds itself"
    needs_dense = "divides dense layers into groups"
    may_unfreeze = False

    shares = frozenset({"body", "norm", "head"})
    reserved = (OWN,)

    def __init__(
        self,
        groups: PositiveInt | None = None,
        depth: NonNegativeInt | None = None,
        mapping: Literal["contiguous"] | list[int] = "contiguous",
        boundary: Boundary = "split",
        norm: GroupedNorms = "group",
        structure: Structure = "grouped",
        trim: bool = True,
        weighting: Weighting = "uniform",
        backbone: BackboneCallable = lambda channels, classes: VGG9(channels, classes, norm="batch"),
        optimizer: OptimizerCallable = lambda parameters: torch.optim.SGD(
            parameters, lr=0.01, momentum=0.9, weight_decay=1e-4
        ),
        norm_stats: Literal["local", "averaged"] = "averaged",
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone=backbone, optimizer=optimizer, norm_stats=norm_stats, **kwargs)
        self.groups, self.depth, self.mapping, self.trim = groups, depth, mapping, trim
        self.boundary, self.norm, self.structure, self.weighting = boundary, norm, structure, weighting

    def configure_learner(self) -> None:
        network = getattr(self.learner, "backbone", None)
        if not isinstance(network, Backbone) or not isinstance(network.head, nn.Linear):
            raise ConfigError(
                f"model.learner: PsiNet divides a `backbone` whose head is a linear layer, which "
                f"{type(self.learner).__name__} does not have; leave model.learner out for an image classifier."
            )
        classes = network.head.out_features
        groups = classes if self.groups is None else self.groups
        self.class_groups = class_groups(classes, groups, self.mapping)
        self.learner.backbone = psi(
            network, groups, self.depth, self.class_groups, self.boundary, self.norm, self.structure
        )
        self.row_groups = row_groups(self.learner)

    def own_groups(self) -> list[int]:
        """Return the groups that this client has training samples of; all of them if it has no data yet."""
        if self.data is None:
            return sorted(set(self.class_groups))
        with needed(f"Client {self.spec.client_id}", "PsiNet shares the groups of the classes that it has samples of"):
            labels = labels_of(self.training_data())
        return sorted({self.class_groups[c] for c in labels.tolist()})

    def initial(self) -> Payload:
        """Return what is averaged of a client that is trimmed now, and which groups it has samples of."""
        self.configure_model()
        if not self.row_groups:
            return super().initial()
        own = self.own_groups()
        if self.trim:
            trim(self.learner, own)
        return Payload({**super().initial(), OWN: torch.tensor(own)})

    def load_global(self, model: Mapping[str, Tensor]) -> None:
        if OWN in model:
            trim(self.learner, model[OWN].tolist())
        super().load_global(model)

    def configure_server(self) -> "PsiNetServer | Server":
        if not self.row_groups:
            return Server()
        return PsiNetServer(self.row_groups, self.trim, self.weighting)


class PsiNetServer(Server):
    """Averages groups over the clients that own them, and all else over everybody.

    Args:
        row_groups: of every tensor that is divided among groups, the group of every row.
        trim: whether clients have no rows but their own.
        weighting: how clients count in averages.

    Attributes:
        own: the groups of every client.
        counts: how much every client counts in an average, relative to the others in it.
    """

    own: dict[int, list[int]]
    counts: dict[int, int]

    def __init__(self, row_groups: Mapping[str, Tensor], trim: bool, weighting: Weighting = "uniform") -> None:
        self.row_groups, self.trim, self.weighting = row_groups, trim, weighting

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        """Put the whole model together: no client need have all of it."""
        super().start(clients)
        self.counts = self.num_samples if self.weighting == "samples" else dict.fromkeys(self.num_samples, 1)
        self.own = {client: info.initial[OWN].tolist() for client, info in sorted(clients.items())}
        for client, info in sorted(clients.items()):
            for name in self.row_groups.keys() & info.initial.keys():
                if len(self.model[name]) < len(self.row_groups[name]):
                    whole = self.model[name].new_zeros(len(self.row_groups[name]), *self.model[name].shape[1:])
                    self.model = self.model.with_({name: whole})
                if self.trim:
                    self.model[name][self.rows(client, name)] = info.initial[name]

    def add(self, client: int, info: ClientInfo) -> None:
        self.own = {**self.own, client: info.initial[OWN].tolist()}

    def rows(self, client: int, name: str) -> Tensor:
        """Return which rows of a tensor are a client's own."""
        return _rows(self.row_groups[name], self.own[client])

    def is_averaged(self, name: str) -> bool:
        return name != OWN

    def layout(self, client: int) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in self.model.items()}
        for name in self.row_groups.keys() & layout.keys() if self.trim else ():
            shape, dtype = layout[name]
            layout[name] = torch.Size([len(self.rows(client, name)), *shape[1:]]), dtype
        return layout

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        common = [name for name in self.model if name not in self.row_groups]
        total = sum(self.counts[client] for client in uploads)
        shares = [self.counts[client] / total for client in uploads]
        means = dict(weighted_mean(list(uploads.values()), shares, common))
        for name in self.model.keys() - means.keys():
            parts = []
            for client, upload in uploads.items():
                rows = self.rows(client, name)
                own = upload[name] if self.trim else upload[name][rows]
                parts.append((own, rows, self.counts[client]))
            means[name] = mean_of_rows(parts, self.model[name])
        self.model = Payload({name: means[name] for name in self.model})

    def reply(self, client: int) -> Payload:
        """Return the shared tensors, and the rows that this client has of the others."""
        return self._cut(self.own[client]) if self.trim else self.model

    def global_model(self) -> Payload:
        """Return all groups that there are, and which these are."""
        there = sorted({group for own in self.own.values() for group in own})
        if not self.trim:
            return self.model
        return Payload({**self._cut(there), OWN: torch.tensor(there)})

    def _cut(self, groups: list[int]) -> Payload:
        return Payload({
            name: tensor[_rows(self.row_groups[name], groups)] if name in self.row_groups else tensor
            for name, tensor in self.model.items()
        })  # fmt: skip


def _rows(row_groups: Tensor, groups: list[int]) -> Tensor:
    return torch.isin(row_groups, torch.tensor(groups)).nonzero().flatten()
