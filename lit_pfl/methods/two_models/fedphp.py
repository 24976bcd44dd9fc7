"""FedPHP: every client keeps a moving average of the models it trained, which teaches the next one."""

from typing import Any, Literal

import torch
from jsonargparse.typing import ClosedUnitInterval, PositiveFloat, PositiveInt
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.classifying import Classifying
from lit_pfl.methods.two_models.base import TwoModels
from lit_pfl_callbacks.tensors import tensors_of


class FedPHP(TwoModels, Classifying):
    """Next to the averaged model w, every client has an inherited private model p, which teaches w and is evaluated.

    A client trains w, from what it receives, on ``(1 - lam) f(w) + lam R(w, p)``. R is the cross entropy of w's class
    probabilities to ``softmax(z_p / temperature)``, z_p the logits of p, or the maximum mean discrepancy of the
    features of both. p is frozen and in evaluation mode. After training, ``p <- m p + (1 - m) w`` with ``m = mu min(1,
    t / rounds)``, t the number of rounds in which the client took part before; and so are buffers. w is
    averaged by samples. With ``lam=0`` w is that of FedAvg, bit for bit, and with ``mu=0`` p is w as trained.

    As in the authors' code, p teaches in a client's first round too, when it is the first model.

    Args:
        lam: how much p counts in what w learns; 0.05 to 0.1 in the authors' runs.
        transfer: what w takes from p: class probabilities (``kd``), or the features' distribution (``mmd``).
        temperature: divides p's logits, not w's.
        mu: how much of p stays at last.
        rounds: how many rounds a client is expected to take part in; give the number that is run, times the share of
            clients.
        kwargs: see :class:`~lit_pfl.Client`. The authors clip gradients:
            ``--federation.client_trainer.gradient_clip_val``.

    Raises:
        ConfigError: when the learner has no head module, or the data no class labels.

    Source:
        Li et al. 2021 (FedPHP), as in the authors' code.
    """

    needs_automatic = "adds a term to the loss"
    needs_labels = "compares class probabilities"
    labels_in_steps_only = True

    rounds_trained: Tensor

    def __init__(
        self,
        lam: ClosedUnitInterval = 0.05,
        transfer: Literal["kd", "mmd"] = "kd",
        temperature: PositiveFloat = 4.0,
        mu: ClosedUnitInterval = 0.9,
        rounds: PositiveInt = 100,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.lam, self.transfer, self.temperature = lam, transfer, temperature
        self.mu, self.rounds = mu, rounds

    def configure_state(self) -> None:
        super().configure_state()
        self.register_buffer("rounds_trained", torch.tensor(0))

    def configure_optimizers(self) -> Any:
        return Client.configure_optimizers(self)  # p takes no steps

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.lam:
            return super().objective(batch, batch_idx)
        teacher = self.call_frozen(tensors_of(self.personal), batch, batch_idx)
        with self.at_head() as seen:
            loss = super().objective(batch, batch_idx)
        if self.transfer == "kd":
            target = (teacher.logits / self.temperature).softmax(1)
            term = torch.nn.functional.cross_entropy(seen.logits, target)
        else:
            term = discrepancy(seen.features, teacher.features)
        return (1 - self.lam) * loss + self.lam * term

    @torch.no_grad()
    def end_round(self) -> None:
        """Move p towards what has been trained."""
        stays = self.mu * min(1.0, int(self.rounds_trained) / self.rounds)
        private = tensors_of(self.personal)
        for name, trained in tensors_of(self.learner).items():
            if trained.is_floating_point():
                private[name].lerp_(trained, 1 - stays)
            else:
                private[name].copy_(trained)
        self.rounds_trained.add_(1)


def discrepancy(features: Tensor, others: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of two samples, under a sum of five Gaussian kernels.

    With D the squared distance of two of all 2B rows, the kernels are ``exp(-D / b)`` for b from a quarter of the mean
    of D over pairs of different rows to four times it; b is taken as a constant.

    Args:
        features: (B, d).
        others: (B, d).
    """
    rows = torch.cat([features, others])
    distances = (rows[:, None] - rows[None]).square().sum(2)
    mean = distances.detach().sum() / (len(rows) * (len(rows) - 1)) + 1e-8
    kernels = torch.stack([torch.exp(-distances / (mean * factor)) for factor in (0.25, 0.5, 1, 2, 4)]).sum(0)
    b = len(features)
    return (kernels[:b, :b] + kernels[b:, b:] - kernels[:b, b:] - kernels[b:, :b]).mean()
