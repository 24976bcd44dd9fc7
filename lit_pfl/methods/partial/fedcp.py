"""FedCP: a conditional policy divides every sample's features between a global and a personal head."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from jsonargparse.typing import NonNegativeFloat
from torch import Tensor, nn

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import Server
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.learners import linear_layers
from lit_pfl.nn import Memory


class FedCP(Classifying):
    """A policy network gives gates r + g = 1, and what predicts is ``H_p(h * r) + H_g(h * g)``, for features h.

    The learner's head is the personal one, H_p; next to it is the received one, H_g, frozen. The policy is a linear
    layer to 2 d numbers, layer norm and ReLU, and a Gumbel softmax over the pairs. It is given ``v * h``, where v is
    the sum over classes of the personal head's weight (of several linear layers, of their product), of length 1. A
    client trains body, personal head and policy on its loss plus ``lam * MMD(h, B_g(x))``, between its features and
    those of the received body, frozen, with Gaussian kernels ``exp(-d2 / (2 a))``, a of 10, 15, 20 and 50. It sends
    body, policy and ``(H_p + H_g) / 2``, which the server averages by samples.

    B_g is in the mode of the network that trains, as in PFLlib's code: batch norm normalizes both by the batch's own
    statistics. In evaluation the gates are softmax without noise, unless ``noisy``. v comes from the personal head as
    it is on receipt, in the first round too, where the authors' code draws it at random. A client that has rested has
    the newest received head and policy; in the authors' code it has those of the last round that it took part in.

    Args:
        lam: strength of the MMD, which keeps features close to the received ones. The default is the authors' for
            MNIST. With a CNN without norm layers accuracy may not rise in the first twenty rounds; with 0 it does.
        noisy: whether gates are drawn in evaluation too, as in the authors' code.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when labels differ from client to client, or the learner has no head module with a linear layer.

    Source:
        Zhang et al. 2023 (FedCP), Algorithm 1.
    """

    needs_automatic = "adds a term to the loss"
    needs_labels = ""
    needs_common_labels = "averages heads"

    shares = EVERYTHING
    calls_heads = True
    shared_extras = frozenset({"policy"})

    own: Memory

    def __init__(self, lam: NonNegativeFloat = 5.0, noisy: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lam, self.noisy = lam, noisy

    def configure_server(self) -> "FedCPServer":
        return FedCPServer()

    def configure_state(self) -> None:
        d = self.num_features
        policy = nn.Sequential(nn.Linear(d, 2 * d), nn.LayerNorm(2 * d), nn.ReLU())
        self.extra = nn.ModuleDict({"policy": policy}).to(self.head_dtype)
        self.common_head = copy.deepcopy(self.head_module).requires_grad_(False)
        self.own = Memory({"context": self._context()})
        self._leaves = self.head_leaves

    @torch.no_grad()
    def _context(self) -> Tensor:
        """Return v, (d,)."""
        product: Tensor | None = None
        for layer in reversed(linear_layers(self.head_module)):
            weight: Any = layer.weight
            product = weight if product is None else product @ weight
        assert product is not None
        return nn.functional.normalize(product.sum(0), dim=0)

    def _gates(self) -> "Gates":
        return Gates(self.extra["policy"], self.common_head, self.own["context"])

    def upload(self) -> Payload:
        """Return body, policy and the head that is averaged: the mean of the personal and the received one."""
        payload, received = super().upload(), self.common_head.state_dict()
        heads = {name: _middle(x, received[self._leaves[name]]) for name, x in payload.items() if name in self._leaves}
        return payload.with_(heads)

    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Load body, policy and the received head; take v of the personal head as it is now."""
        heads = {self._leaves[name]: tensor for name, tensor in reply.items() if name in self._leaves}
        self.common_head.load_state_dict(heads, strict=False)
        super().download({name: tensor for name, tensor in reply.items() if name not in self._leaves})
        self.own.copy_({"context": self._context()})

    def begin_round(self) -> None:
        if self.lam:
            self.received = {name: tensor.clone() for name, tensor in self.network_tensors().items()}

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        before = None
        if self.lam:
            before = self.call_frozen(self.received, batch, batch_idx, in_evaluation=False).features
        gates = self._gates()
        with self.at_head(features=gates.personal, logits=gates.add_common) as seen:
            loss = super().objective(batch, batch_idx)
        return loss if before is None else loss + self.lam * mmd(seen.features, before)

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Let both heads predict."""
        gates = self._gates()
        gates.draws = self.noisy
        with self.at_head(features=gates.personal, logits=gates.add_common):
            yield self.learner


class FedCPServer(Server):
    """Averages bodies, policies and heads by numbers of samples."""

    one_model = False


class Gates(nn.Module):
    """Divides features between two heads.

    Args:
        policy: maps (B, d) to (B, 2 d).
        common_head: gets the second part.
        context: (d,), what features are multiplied by before the policy sees them.

    Attributes:
        draws: whether gates are drawn, by Gumbel noise.
    """

    context: Tensor

    def __init__(self, policy: nn.Module, common_head: nn.Module, context: Tensor) -> None:
        super().__init__()
        self.policy, self.common_head, self.draws = policy, common_head, True
        self.register_buffer("context", context)

    def personal(self, features: Tensor) -> Tensor:
        """Return the personal head's part, (B, d), and keep the other for :meth:`add_common`."""
        pairs = self.policy(features * self.context).unflatten(1, (2, -1))
        if self.draws:  # Gumbel noise, drawn on the CPU: the same on any device
            pairs = pairs - torch.empty(pairs.shape).exponential_().log().to(pairs)
        gates = pairs.softmax(1)
        self._others = features * gates[:, 1]
        return features * gates[:, 0]

    def add_common(self, features: Tensor, logits: Tensor) -> Tensor:
        """Return the sum of both heads' logits."""
        return logits + self.common_head(self._others)


def _middle(personal: Tensor, received: Tensor) -> Tensor:
    """Return the mean of two tensors of heads; of two counters the received one."""
    return (personal.detach() + received) / 2 if received.is_floating_point() else received


def mmd(x: Tensor, y: Tensor) -> Tensor:
    """Return the maximum mean discrepancy of two sets of (B, d) features, summed over four Gaussian kernels."""

    def kernels(a: Tensor, b: Tensor) -> Tensor:
        squared = a.square().sum(1)[:, None] + b.square().sum(1)[None] - 2 * a @ b.T
        return torch.stack([(-squared / (2 * width)).exp() for width in (10, 15, 20, 50)]).sum(0)

    return (kernels(x, x) + kernels(y, y) - 2 * kernels(x, y)).mean()
