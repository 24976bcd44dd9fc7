"""FlexLoRA: LoRAs of different ranks are averaged by their products."""

from collections.abc import Mapping
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor, nn

from lit_pfl.core.averaging import weighted_mean
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.errors import ConfigError
from lit_pfl.methods.adapters.fedit import FedIT, needs_lora


class FlexLoRA(FedIT):
    """Clients may have LoRAs of different ranks; the server averages the products and sends back what fits each one.

    Client k, of rank r_k, trains ``W x + s_k B_k A_k x``. The server takes the mean of what the layers gain,
    ``D = sum_k p_k s_k B_k A_k``, weighted by numbers of samples, and its singular value decomposition
    ``D = U S V^T``. Client k is sent the first r_k singular values: ``A_k = V^T[:r_k]`` and ``B_k = (U S)[:, :r_k] /
    s_k``. Before the first round all have A and B of the first client with the largest rank, cut to their rank. Other
    tensors of adapters are averaged as by :class:`~lit_pfl.methods.FedIT`. An optimizer keeps the momentum that it had
    under the client's own factors, unless ``reset_optimizer`` is set.

    Args:
        ranks: the rank of every client in turn, starting again at the first after the last; its LoRAs are cut to it,
            and s stays that of the learner. In the authors' code it is ``alpha / r_k``, larger for smaller ranks. By
            default all clients have the learner's rank.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no LoRA, one of a grouped convolution, or one of a smaller rank than asked
            for.

    Source:
        Bai et al. 2024, Algorithm 1.
    """

    may_unfreeze = False

    def __init__(self, ranks: list[PositiveInt] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if ranks is not None and not ranks:
            raise ConfigError("model.ranks=[]: give at least one rank, or leave it out.")
        self.ranks = ranks

    def configure_learner(self) -> None:
        super().configure_learner()
        self.factors = needs_lora(self.learner, type(self).__name__)
        for a, b in self.factors.items():
            rank, columns = self.learner.get_parameter(a).shape[0], self.learner.get_parameter(b).shape[1]
            if rank != columns:
                raise ConfigError(
                    f"model.learner: FlexLoRA multiplies B by A, and {b!r} has {columns} columns for {rank} rows of "
                    f"{a!r}, as of a grouped convolution; leave that layer out of the LoRA."
                )
            if self.ranks is not None:
                self._cut(a, b, self.ranks[self.spec.client_id % len(self.ranks)])

    def _cut(self, a: str, b: str, rank: int) -> None:
        whole = self.learner.get_parameter(a).shape[0]
        if rank > whole:
            raise ConfigError(
                f"model.ranks: {rank} is more than {whole}, the rank of {a!r}; make the learner's larger."
            )
        for name, dim in ((a, 0), (b, 1)):
            path, _, leaf = name.rpartition(".")
            owner, weight = self.learner.get_submodule(path), self.learner.get_parameter(name)
            cut = weight.detach().narrow(dim, 0, rank).clone()
            setattr(owner, leaf, nn.Parameter(cut, requires_grad=weight.requires_grad))

    def configure_state(self) -> None:
        shared = self.shared_parameters()
        for pair in self.factors.items():
            if len(own := [name for name in pair if name not in shared]) == 1:
                raise ConfigError(
                    f"model.local: FlexLoRA averages products of A and B, and {own[0]!r} is not shared while its "
                    "other factor is; leave both out of what is shared, or neither."
                )
        self.factors = {a: b for a, b in self.factors.items() if a in shared}

    def configure_server(self) -> "FlexLoRAServer":
        return FlexLoRAServer(self.factors)

    def upload(self) -> Payload:
        """Return A, and B multiplied by s."""
        payload = super().upload()
        return payload.with_({b: payload[b] * s for b, s in self._scalings().items() if s != 1})

    def download(self, reply: Mapping[str, Tensor]) -> None:
        super().download(self._fitting(reply))

    def load_global(self, model: Mapping[str, Tensor]) -> None:
        super().load_global(self._fitting(model))

    def _fitting(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return as much of A and B as the own rank has room for, with B divided by s."""
        own, scalings = dict(tensors), self._scalings()
        for a, b in self.factors.items():
            rank = self.learner.get_parameter(a).shape[0]
            own[a], own[b] = own[a][:rank], own[b][:, :rank] / scalings[b]
        return own

    def _scalings(self) -> dict[str, float]:
        """Return s by the name of B: what the layer multiplies the product by, 1 where it does not say."""
        found = {}
        for b in self.factors.values():
            path, _, adapter = b.removesuffix(".weight").rpartition(".")  # layer.lora_B, default
            layer = self.learner.get_submodule(path.rpartition(".")[0])
            found[b] = float(getattr(layer, "scaling", {}).get(adapter, 1.0))
        return found


class FlexLoRAServer(Server):
    """Averages products, and keeps of them what the largest rank of a client has room for.

    Args:
        factors: names of B by those of A.
    """

    def __init__(self, factors: Mapping[str, str]) -> None:
        self.factors = dict(factors)

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        self.ranks: dict[int, dict[str, int]] = {}
        for client, info in sorted(clients.items()):
            self.add(client, info)
        largest: dict[str, Tensor] = {}
        for a, b in self.factors.items():
            first = clients[max(self.ranks, key=lambda k: self.ranks[k][a])].initial
            largest |= {a: first[a].clone(), b: first[b].clone()}
        self.model = self.model.with_(largest)

    def add(self, client: int, info: ClientInfo) -> None:
        self.ranks = {**self.ranks, client: {a: len(info.initial[a]) for a in self.factors}}

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        sent, weights = list(uploads.values()), self.averaging_weights(round, uploads)
        factored = {*self.factors, *self.factors.values()}
        mean = weighted_mean(sent, weights, [name for name in self.model if name not in factored])
        found = {}
        for a, b in self.factors.items():
            # the model's own without weight: where the mean is of a lower rank, A gets further rows all the same
            pairs = [(tensors[a], tensors[b]) for tensors in (*sent, self.model)]
            found[a], found[b] = mean_product(pairs, [*weights, 0.0], len(self.model[a]))
        self.model = Payload({name: {**mean, **found}[name] for name in self.model})

    def reply(self, client: int) -> Payload:
        own = {a: self.model[a][: self.ranks[client][a]] for a in self.factors}
        own |= {b: self.model[b][:, : self.ranks[client][a]] for a, b in self.factors.items()}
        return Payload({name: own.get(name, tensor) for name, tensor in self.model.items()})


def mean_product(pairs: list[tuple[Tensor, Tensor]], weights: list[float], rank: int) -> tuple[Tensor, Tensor]:
    """Return factors A and B of the weighted mean of products ``B_k A_k``, or of its best approximation of a rank.

    The product itself is never made: the mean is ``[p_1 B_1, ...] [A_1; ...]``, of whose factors the singular value
    decomposition is taken by way of their QR decompositions. The entry of each row of A that is largest in size is
    positive, so that the same mean has the same factors anywhere.

    Args:
        pairs: A, (r_k, inputs, ...), and B, (outputs, r_k, ...), of each client.
        weights: as many numbers.
        rank: of the result, R.

    Returns:
        A, (R, inputs, ...), with orthonormal rows, and B, (outputs, R, ...), with the singular values. Rows and columns
        beyond what all A span together, or the outputs, are 0.
    """
    (a, b), *_ = pairs
    right = torch.cat([a.flatten(1) for a, _ in pairs]).double()
    left = torch.cat([p * b.flatten(1).double() for (_, b), p in zip(pairs, weights, strict=True)], 1)
    (q_left, r_left), (q_right, r_right) = torch.linalg.qr(left), torch.linalg.qr(right.T)
    u, s, vt = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    rows, columns = vt[:rank] @ q_right.T, (q_left @ u * s)[:, :rank]
    sign = torch.where(rows.gather(1, rows.abs().argmax(1, keepdim=True)) < 0, -1.0, 1.0)
    new_a, new_b = right.new_zeros(rank, right.shape[1]), left.new_zeros(len(left), rank)
    new_a[: len(rows)], new_b[:, : len(rows)] = rows * sign, columns * sign.T
    return new_a.to(a.dtype).reshape(rank, *a.shape[1:]), new_b.to(b.dtype).reshape(len(b), rank, *b.shape[2:])
