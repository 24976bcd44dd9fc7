"""FedSLR: a low-rank model for all, and a sparse component for each client."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, UniformServer
from lit_pfl.learners import Step, call_with, holding, silenced, single_optimizer
from lit_pfl.methods.factorized.structures import STRUCTURES, Structure, StructureName
from lit_pfl.methods.partial.phases import check_epochs
from lit_pfl.methods.two_models.base import TwoModels
from lit_pfl.nn import Memory
from lit_pfl.ops.low_rank import LowRank, as_matrix
from lit_pfl_callbacks.protocols import WeightParts

MIXED, GKR = "mixed", "GKR"


@dataclass(frozen=True)
class Solver:
    """How the global model is found.

    Args:
        corrected: whether clients are held near it and corrected by their dual variables.
        local: whether it is the clients that shrink it, after each of their steps, instead of the server.
    """

    corrected: bool
    local: bool


SOLVERS = {"FedSLR": Solver(True, False), "LPGD": Solver(False, True), "GPGD": Solver(False, False)}


class FedSLR(TwoModels):
    """One model w of low rank for all, the GKR, and for every client a sparse p_i next to it: its model is w + p_i.

    A round's first local epochs train w from w_t, on the loss less ``<gamma_i, w>`` plus ``|w - w_t|^2 / (2 eta_g)``;
    then ``gamma_i += (w_t - w_i) / eta_g``, on both sides. Its last ``personal_epochs`` train p_i, on the loss of
    ``w_t + p_i``; after each step its entries are shrunk by ``mu`` times the learning rate. The server takes the plain
    mean of the participants' models less ``eta_g`` times the mean of all gamma, and shrinks the singular values of
    every weight of two or more dimensions, a convolution's as a matrix of (outputs x height, inputs x width), by
    ``lam * eta_g``. What it sends is in factors, layer by layer, where these are smaller.

    Evaluated are the mixed models w + p_i and, under the name GKR, w itself at every client: with
    ``federation.evaluate=after``, as in the paper, w_{t+1}; with ``before`` w_t, with which p_i has been trained.
    Where labels differ, the classifier is kept local, and with it its part of w.

    With ``solver=GPGD`` and ``lam=0`` w is FedAvg's, for clients of equal size, and with ``personal_epochs=0`` bit for
    bit. With ``mu=0`` p_i follows the plain gradient; with a very large ``mu`` it is zero, and with a very large
    ``lam`` all matrices of w are.

    Args:
        lam: weight of the nuclear norms of w, the paper's lambda.
        mu: weight of the L1 norm of p_i.
        eta_g: the server's step size.
        solver: ``FedSLR``; or ``LPGD``: clients train w by plain steps, after each of which they shrink it by ``lam``
            times the learning rate, and the server takes the mean (uploads are in factors, replies are not); or
            ``GPGD``: clients train w by plain steps, and the server shrinks the mean.
        p_init: p_i at first: ``zero``; or ``copy``, as in the released code: the initial weights, but zero for
            normalization layers. The first mixed model is then 2w.
        personal_epochs: how many of a round's local epochs train p_i.
        common: what w is made: ``low_rank`` or ``sparse`` (Appendix A.3).
        personal: what p_i is made: ``sparse`` or ``low_rank``, in every step.
        server_memory: ``mean``: the server keeps the mean of all gamma (Algorithm 3); ``each``: every client's
            (Algorithms 1 and 2). Both come to the same.
        kwargs: see :class:`~lit_pfl.Client`; ``factorization`` is not for this method.

    Raises:
        ConfigError: when a round has no epoch left for w, and when a ``factorization`` is given.

    Source:
        Huang et al. 2023, Algorithms 1 to 3, Appendices A.1 to A.3.
    """

    needs_automatic = "takes proximal steps on two models and one loss"
    needs_dense = "makes dense weights low-rank on its own"
    may_unfreeze = False
    remembers = True

    evaluated = (MIXED, GKR)

    dual: Memory
    common_parameters: Tensor

    def __init__(
        self,
        lam: NonNegativeFloat = 1e-4,
        mu: NonNegativeFloat = 1e-3,
        eta_g: PositiveFloat = 10.0,
        solver: Literal["FedSLR", "LPGD", "GPGD"] = "FedSLR",
        p_init: Literal["zero", "copy"] = "zero",
        personal_epochs: NonNegativeInt = 1,
        common: StructureName = "low_rank",
        personal: StructureName = "sparse",
        server_memory: Literal["mean", "each"] = "mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.lam, self.mu, self.eta_g, self.solver = lam, mu, eta_g, SOLVERS[solver]
        self.needs_full_steps = "adds its whole step to gamma_i" if self.solver.corrected else ""
        self.p_init, self.personal_epochs, self.server_memory = p_init, personal_epochs, server_memory
        self.min_local_epochs = personal_epochs + 1
        self.common, self.personal_structure = STRUCTURES[common], STRUCTURES[personal]
        self._trains_personal = False
        self._trained: dict[str, Tensor] = {}  # w_i, until it is sent
        self._shrunk = Payload({})  # w as the latest local step has shrunk it
        self._own_parameters = 0  # of p, while the mixed model is in its place

    def configure_state(self) -> None:
        super().configure_state()
        check_epochs(self.spec.local_epochs, self.personal_epochs, "model.personal_epochs", "global model")
        roles = self.roles()
        with torch.no_grad():
            for name, p in self.personal.named_parameters():
                if self.p_init == "zero" or roles[name] == "norm":
                    p.zero_()
        self.dual = Memory(self.shared_weights() if self.solver.corrected else {}).zero_()
        self.register_buffer("common_parameters", torch.tensor(sum(p.numel() for p in self.learner.parameters())))

    def configure_server(self) -> "FedSLRServer":
        threshold = 0.0 if self.solver.local else self.lam * self.eta_g
        eta_g = self.eta_g if self.solver.corrected else 0.0
        return FedSLRServer(
            frozenset(self.shared_weights()), threshold, eta_g, self.common, self.server_memory == "each"
        )

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        single_optimizer(configured).register_step_post_hook(lambda optimizer, *_: self._shrink(optimizer))
        return configured

    @torch.no_grad()
    def _shrink(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the proximal step after a gradient step, in every group of parameters with its own learning rate."""
        if all(weight.grad is None for group in optimizer.param_groups for weight in group["params"]):
            return  # the learner has skipped the batch
        rates = {id(weight): group["lr"] for group in optimizer.param_groups for weight in group["params"]}
        if self._trains_personal and self.mu:
            self._shrink_in_place(dict(self.personal.named_parameters()), rates, self.personal_structure, self.mu)
        elif self.solver.local and self.lam and not self._trains_personal:
            matrices = {name: weight for name, weight in self.shared_weights().items() if weight.dim() > 1}
            self._shrunk = self._shrink_in_place(matrices, rates, self.common, self.lam, self._shrunk.low_rank)

    @staticmethod
    def _shrink_in_place(
        weights: Mapping[str, Tensor],
        rates: Mapping[int, float],
        structure: Structure,
        penalty: float,
        near: Mapping[str, LowRank] = MappingProxyType({}),
    ) -> Payload:
        """Shrink weights; return them, encoded."""
        by_rate: dict[float, dict[str, Tensor]] = {}
        for name, weight in weights.items():
            if id(weight) in rates:  # nobody trains the others
                by_rate.setdefault(rates[id(weight)], {})[name] = weight
        parts = [structure.shrink(alike, rate * penalty, near) for rate, alike in by_rate.items()]
        for part in parts:
            for name, tensor in part.items():
                weights[name].copy_(tensor)
        low_rank = {name: factors for part in parts for name, factors in part.low_rank.items()}
        plain = {name: tensor for part in parts for name, tensor in part.items() if name not in low_rank}
        return Payload(plain, [name for part in parts for name in part.sparse], low_rank)

    # -------------------------------------------------------------------------------------------------------- training

    def begin_round(self) -> None:
        self._trains_personal = False

    def begin_epoch(self, epoch: int, local_epochs: int) -> None:
        check_epochs(local_epochs, self.personal_epochs, "model.personal_epochs", "global model")
        if epoch == local_epochs - self.personal_epochs:
            self._finish_common()
            self._trains_personal = True

    def end_round(self) -> None:
        if not self.personal_epochs:
            self._finish_common()

    @torch.no_grad()
    def _finish_common(self) -> None:
        """Note what was learned, and put w_t back in the place of w_i, which waits to be sent."""
        for name, weight in self.shared_weights().items():
            self._trained[name] = weight.clone()
            if self.solver.corrected:
                self.dual[name].add_(self.received[name] - weight, alpha=1 / self.eta_g)
            weight.copy_(self.received[name])

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Return what is minimized in this epoch, its value being the loss alone."""
        if self._trains_personal:
            with silenced(self.personal):
                return call_with(self._mixture("learner."), Step(self.personal, self.loss), batch, batch_idx)
        loss = super().objective(batch, batch_idx)
        if not self.solver.corrected:
            return loss
        away = [
            (weight - self.received[name]).square().sum() / (2 * self.eta_g) - (self.dual[name] * weight).sum()
            for name, weight in self.shared_weights().items()
        ]
        correction = torch.stack(away).sum()
        return loss + (correction - correction.detach())

    def _mixture(self, prefix: str = "") -> dict[str, Tensor]:
        """Return w + p by name; only p gets gradients."""
        w = dict(self.learner.named_parameters())
        return {prefix + name: w[name].detach() + p for name, p in self.personal.named_parameters()}

    # ------------------------------------------------------------------------------------------------------ exchanging

    def upload(self) -> Payload:
        """Return w_i; on joining the initial weights."""
        if not self._trained:
            return super().upload()
        sent = {**self.shared_parameters(), **self._trained}
        low_rank = {name: factors for name, factors in self._shrunk.low_rank.items() if factors.saves}
        self._trained, shrunk, self._shrunk = {}, self._shrunk, Payload({})
        return Payload({name: t for name, t in sent.items() if name not in low_rank}, shrunk.sparse, low_rank)

    def download(self, reply: Mapping[str, Tensor]) -> None:
        counts = reply.counts if isinstance(reply, Payload) else {}
        own = {name: weight.numel() for name, weight in self.learner.named_parameters()}
        self.common_parameters.fill_(sum(counts.get(name, size) for name, size in own.items()))
        super().download(reply)

    # ------------------------------------------------------------------------------------------------------ evaluating

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Put the mixed model in the place of p."""
        with torch.no_grad():
            self._own_parameters = sum(map(self.personal_structure.size, self.personal.parameters()))
            mixed = self._mixture()
        with holding(self.personal, mixed):
            yield self.personal

    def as_evaluated(self, model: str) -> AbstractContextManager[L.LightningModule]:
        return self.personalized() if model == MIXED else nullcontext(self.learner)

    def weight_parts(self) -> dict[str, WeightParts]:
        """Return p and the matrix of w of every weight of two or more dimensions."""
        p = dict(self.personal.named_parameters())
        return {
            name.removesuffix(".weight"): WeightParts(p[name].detach(), (as_matrix(w.detach()),))
            for name, w in self.learner.named_parameters()
            if w.dim() > 1
        }

    def sizes(self, model: str) -> dict[str, float]:
        """Return the number of ``parameters`` of a model as the paper counts them.

        Of a weight of w they are its factors', if these are smaller; of p those that are not zero.
        """
        return {"parameters": int(self.common_parameters) + (self._own_parameters if model == MIXED else 0)}


class FedSLRServer(UniformServer):
    """Takes the proximal step.

    Args:
        weights: names of the trained parameters among what is uploaded; all else is averaged only.
        threshold: what the step shrinks by, ``lam * eta_g``.
        eta_g: the step size; 0: there are no dual variables, and the step is taken from the mean.
        structure: what weights of two or more dimensions are made.
        each: whether every client's gamma is kept, and not their mean alone.

    Attributes:
        dual: the mean of all clients' gamma, by name.
        duals: every client's, if these are kept.
    """

    kept = ("dual", "duals")

    dual: dict[str, Tensor]
    duals: dict[int, dict[str, Tensor]]

    def __init__(
        self, weights: frozenset[str], threshold: float, eta_g: float, structure: Structure, each: bool
    ) -> None:
        self.weights, self.threshold, self.eta_g, self.structure, self.each = weights, threshold, eta_g, structure, each
        self.averages = self.means_only = not each  # else gammas are made of single uploads

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        names = [name for name in self.model if name in self.weights and self.eta_g]
        self.dual = {name: torch.zeros_like(self.model[name]) for name in names}
        self.duals = {}

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        before = self.model
        super().aggregate(round, uploads)
        tensors = dict(self.model)
        if self.each:
            self._update_each(before, uploads)
        for name, dual in self.dual.items():
            if not self.each:
                share = self.how_many(uploads) / len(self.num_samples)
                dual += share / self.eta_g * (before[name] - tensors[name])
            tensors[name] = tensors[name] - self.eta_g * dual
        shrunk = Payload({})
        if self.threshold:
            matrices = {n: tensors.pop(n) for n in list(tensors) if n in self.weights and tensors[n].dim() > 1}
            shrunk = self.structure.shrink(matrices, self.threshold, before.low_rank)
            tensors |= {name: tensor for name, tensor in shrunk.items() if name not in shrunk.low_rank}
        self.model = Payload(tensors, shrunk.sparse, shrunk.low_rank)

    def _update_each(self, before: Payload, uploads: Mapping[int, Payload]) -> None:
        for client, upload in uploads.items():
            own = self.duals.setdefault(client, {name: torch.zeros_like(dual) for name, dual in self.dual.items()})
            for name, dual in own.items():
                dual += (before[name] - upload[name]) / self.eta_g
        for name, mean in self.dual.items():
            everybody = [self.duals[client][name] for client in sorted(self.duals)]  # those of all others are zero
            mean.copy_(torch.stack(everybody).sum(0) / len(self.num_samples))
