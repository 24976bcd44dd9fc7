"""FedSpa: every client trains and exchanges only the weights that its own mask keeps."""

import math
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch
from jsonargparse.typing import PositiveInt
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.payload import BITS, Payload
from lit_pfl.core.server import ClientInfo, UniformServer
from lit_pfl.errors import ConfigError
from lit_pfl.learners import SkipBatch, recorded, unchanged
from lit_pfl.learners.scoring import transferred
from lit_pfl.nn import Memory
from lit_pfl.ops import erk_densities, pack_bits, prune_and_regrow, random_mask, unpack_bits

MASKS, ROUND = f"masks{BITS}", "round_number"


class FedSpa(Client):
    """Clients train sparse models, each with a mask of its own, from one dense model of the server.

    The server sends a client its mask times the dense model. The client trains what is left, without gradients at
    masked weights, and uploads the difference; the server subtracts the mean of these, everybody counting the same.
    After training the client exchanges a share of its active weights: the smallest for those where the gradient of the
    dense network is largest, and sends its new mask along, a bit for a weight: bytes, but none of the elements that
    papers count. Masked are the weights of convolutions and linear layers among what is sent; biases and
    normalization layers are dense, and count; what is frozen is not sent. With density 1 this is FedAvg with equal
    weights.

    Args:
        density: share of what is sent that is active, in all layers together (Erdos-Renyi-kernel densities).
        prune_rate: share of the active weights that are exchanged after the first round; falls to 0 along a cosine.
        rounds: number of rounds T after which masks stay as they are; give the number that is run.
        regrow: which weights become active: those with the largest ``gradient`` of a batch, any at ``random``, or
            ``none``: masks stay as they were drawn (the ablation RSM).
        common_masks: whether all clients begin with the same mask.
        kwargs: see :class:`~lit_pfl.Client`; ``factorization`` is not for this method.

    Raises:
        ConfigError: for shares that are none, and when a ``factorization`` is given.

    Source:
        Huang et al. 2022 (FedSpa), with masks as in Dai et al. 2022 (DisPFL) of the same group.
    """

    needs_automatic = "regrows weights by gradients of the loss"
    needs_dense = "masks dense weights"
    may_unfreeze = False

    shares = frozenset({"body", "norm", "head", "adapter"})
    reserved = (MASKS, ROUND)

    masks: Memory
    anchor: Memory
    round_number: Tensor

    def __init__(
        self,
        density: float = 0.5,
        prune_rate: float = 0.5,
        rounds: PositiveInt = 100,
        regrow: Literal["gradient", "random", "none"] = "gradient",
        common_masks: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 < density <= 1:
            raise ConfigError(f"model.density={density}: give a share above 0 and up to 1.")
        if not 0 <= prune_rate <= 1:
            raise ConfigError(f"model.prune_rate={prune_rate}: give a share from 0 to 1.")
        self.density, self.prune_rate, self.rounds = density, prune_rate, rounds
        self.regrow, self.common_masks = regrow, common_masks

    def configure_state(self) -> None:
        everything = self.shared_weights()
        weights = {name: weight for name, weight in everything.items() if weight.dim() > 1 and weight.requires_grad}
        densities = self._densities({name: weight.shape for name, weight in everything.items()}, weights.keys())
        seed = int(torch.randint(2**31, ())) + (0 if self.common_masks else 1 + self.spec.client_id)
        generator = torch.Generator().manual_seed(seed)
        active = {name: max(1, round(densities[name] * weight.numel())) for name, weight in weights.items()}
        self.masks = Memory({name: random_mask(w.shape, active[name], generator) for name, w in weights.items()})
        self.anchor = Memory(self.shared_parameters())
        self.register_buffer(ROUND, torch.tensor(0))  # loaded from every reply
        for name, weight in weights.items():
            weight.register_post_accumulate_grad_hook(partial(self._mask_gradient, name))

    def _densities(self, shapes: Mapping[str, torch.Size], masked: Set[str]) -> dict[str, float]:
        try:
            return erk_densities(shapes, self.density, shapes.keys() - masked)
        except ValueError:
            small, total = (sum(shapes[name].numel() for name in names) for names in (shapes.keys() - masked, shapes))
            raise ConfigError(
                f"model.density={self.density}: biases and normalization layers, which have no masks, are "
                f"{small / total:.2g} of the shared values already; set more."
            ) from None

    def _mask_gradient(self, name: str, weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.mul_(self.masks[name])

    @torch.no_grad()
    def begin_round(self) -> None:
        for name, mask in self.masks.items():
            weight = self.learner.get_parameter(name)
            weight.masked_fill_(~mask, 0)
            for optimizer in self.trainer.optimizers:
                # the momentum of a weight that was active before would move it
                for value in optimizer.state.get(weight, {}).values():
                    if isinstance(value, Tensor) and value.shape == weight.shape:
                        value.masked_fill_(~mask, 0)
        self.anchor.copy_(self.shared_parameters())

    def initial(self) -> Payload:
        """Return the initial weights and masks."""
        self.configure_model()
        return Payload({**self.shared_parameters(), MASKS: pack_bits(self.masks.buffers())})

    @torch.no_grad()
    def end_round(self) -> None:
        """Exchange some of the active weights."""
        if self.regrow != "none":
            self._exchange_weights()

    def download(self, reply: Mapping[str, Tensor]) -> None:
        self.round_number.copy_(reply[ROUND])
        super().download({name: tensor for name, tensor in reply.items() if name != ROUND})

    @torch.no_grad()
    def upload(self) -> Payload:
        """Return what was sent less what training made of it, and the new masks; what has no sign as it is now."""
        update = {
            name: self.anchor[name] - tensor if tensor.is_signed() else tensor
            for name, tensor in self.shared_parameters().items()
        }
        if self.regrow != "none":
            update[MASKS] = pack_bits(self.masks.buffers())
        return Payload(update, sparse=self.masks)

    def _exchange_weights(self) -> None:
        completed = min(int(self.round_number) - 1, self.rounds)
        share = self.prune_rate / 2 * (1 + math.cos(math.pi * completed / self.rounds))
        weights = {name: self.learner.get_parameter(name) for name in self.masks}
        scores = self._gradients(list(weights.values())) if self.regrow == "gradient" else None
        for i, (name, weight) in enumerate(weights.items()):
            mask = self.masks[name]
            # what is drawn on the CPU is the same for any device
            score = scores[i].abs() if scores else torch.rand_like(weight, device="cpu").to(weight.device)
            mask.copy_(prune_and_regrow(weight, mask, score, round(share * int(mask.sum()))))

    def _gradients(self, weights: list[Tensor]) -> Sequence[Tensor]:
        """Return gradients of a training batch, at masked weights too; running statistics stay as they are."""
        gradients: Sequence[Tensor] = [torch.zeros_like(weight) for weight in weights]
        for index, batch in enumerate(self.training_data()):
            with torch.enable_grad(), unchanged(self.learner), recorded(self.learner), suppress(SkipBatch):
                loss = self.objective(transferred(self.learner, batch), index)
                gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
                break
        return [gradient.to_dense() for gradient in gradients]  # as those of an embedding may not be

    def configure_server(self) -> "FedSpaServer":
        return FedSpaServer(tuple(self.masks), self.regrow != "none")


class FedSpaServer(UniformServer):
    """Keeps a dense model and everybody's masks.

    Args:
        masked: names of the tensors that have masks.
        masks_change: whether uploads hold new masks.

    Attributes:
        masks: every client's masks, packed to bits in the order of ``masked``.
    """

    kept = ("masks", "round")
    averages = True

    masks: dict[int, Tensor]

    def __init__(self, masked: Sequence[str], masks_change: bool) -> None:
        self.masked, self.masks_change = masked, masks_change

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        self.masks = {client: info.initial[MASKS].clone() for client, info in sorted(clients.items())}
        self.round = 0

    def add(self, client: int, info: ClientInfo) -> None:
        self.masks = {**self.masks, client: info.initial[MASKS]}

    def is_averaged(self, name: str) -> bool:
        return name != MASKS

    def layout(self, client: int) -> Mapping[str, tuple[torch.Size, torch.dtype]] | None:
        return None if self.masks_change else {name: (w.shape, w.dtype) for name, w in self.model.items()}

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        dense = self.model
        super().aggregate(round, uploads)  # the mean of the updates
        self.model = Payload(
            {name: dense[name] - update if update.is_signed() else update for name, update in self.model.items()}
        )
        self.masks |= {client: upload[MASKS].clone() for client, upload in uploads.items() if self.masks_change}
        self.round = round

    def center(self, client: int, upload: Payload) -> Mapping[str, Tensor]:
        """Return nothing: uploads are updates."""
        return {}

    def reply(self, client: int) -> Payload:
        """Return this client's mask times the model, and the number of the round that it is for."""
        masks = unpack_bits(self.masks[client], {name: self.model[name].shape for name in self.masked})
        sparse = {name: self.model[name].masked_fill(~mask, 0) for name, mask in masks.items()}
        return Payload({**self.model, **sparse, ROUND: torch.tensor(self.round + 1)}, sparse=masks)
