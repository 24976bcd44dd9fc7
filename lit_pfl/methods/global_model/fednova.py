"""FedNova: averaging that does not favor the clients that took more steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lit_pfl.core import Client
from lit_pfl.core.averaging import weighted_mean
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import Server
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.errors import ConfigError
from lit_pfl.learners import single_optimizer

STEPS = "steps"


class FedNova(Client):
    """Averages what clients did per step: ``w <- w - tau sum p_i (w - w_i) / a_i`` with ``tau = sum p_i a_i``.

    a_i is how far client i went in units of a gradient: the number of its steps for plain SGD; with momentum rho, each
    step does ``c <- rho c + 1`` and adds c. p_i are the participants' shares of samples. Clients that took equally many
    steps are averaged as in FedAvg, bit for bit. Within a round the learning rate is taken to be constant. The proximal
    variant of the authors' code is not here; their momentum of the server is
    ``server_optimizer=ServerMomentum(momentum=0.9)``.

    Args:
        reset_optimizer: whether momentum begins at zero in every round, without which a_i is not known.
        kwargs: see :class:`~lit_pfl.Client`. The optimizer must be SGD.

    Raises:
        ConfigError: for an optimizer that is not SGD, or with Nesterov's momentum, or with momentum that is kept.

    Source:
        Wang et al. 2020, Eq. 5 and Section 4 (momentum).
    """

    needs_automatic = "counts the steps of one optimizer"
    may_unfreeze = False

    shares = EVERYTHING
    reserved = (STEPS,)

    def __init__(self, reset_optimizer: bool = True, **kwargs: Any) -> None:
        super().__init__(reset_optimizer=reset_optimizer, **kwargs)
        self._went = self._pace = 0.0  # a_i and c, in this round

    def configure_server(self) -> "FedNovaServer":
        return FedNovaServer(frozenset(self.shared_weights()))

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        optimizer = single_optimizer(configured)
        groups = optimizer.param_groups
        plain = type(optimizer) is torch.optim.SGD and not any(
            group["maximize"] or group["nesterov"] or group["dampening"] for group in groups
        )
        if not plain or len({group["momentum"] for group in groups}) > 1:
            raise ConfigError(
                "model.optimizer: FedNova divides a client's change by its number of steps, which is valid for SGD "
                "only; use torch.optim.SGD, with one momentum for all parameters, and neither nesterov nor dampening."
            )
        if groups[0]["momentum"] and not self.reset_optimizer:
            raise ConfigError(
                "model.reset_optimizer=false: FedNova counts a round's steps from a momentum of zero; set it to true."
            )
        optimizer.register_step_post_hook(self._note_step)
        return configured

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        if any(weight.grad is not None for group in groups for weight in group["params"]):  # else a batch was skipped
            self._pace = groups[0]["momentum"] * self._pace + 1
            self._went += self._pace

    def begin_round(self) -> None:
        self._went = self._pace = 0.0

    def upload(self) -> Payload:
        """Return the weights and a_i."""
        return super().upload().with_({STEPS: torch.tensor(self._went, dtype=torch.float64)})


class FedNovaServer(Server):
    """Averages by what clients did per step.

    Args:
        weights: names of the trained parameters among what is uploaded; all else is averaged only.
    """

    count_tensors = (STEPS,)

    def __init__(self, weights: frozenset[str]) -> None:
        self.weights = weights

    def is_averaged(self, name: str) -> bool:
        return name != STEPS

    def center(self, client: int, upload: Payload) -> Payload:
        """Return the model, and the upload's own count of steps, which is no change of anything."""
        return self.model.with_({STEPS: upload[STEPS]})

    def averaged(self, uploads: Mapping[int, Payload], weights: list[float]) -> Payload:
        mean = super().averaged(uploads, weights)
        factors = per_step(weights, [float(upload[STEPS]) for upload in uploads.values()])
        if factors == weights:
            return mean
        before, names = self.model, [name for name in mean if name in self.weights]
        moved = weighted_mean([before, *uploads.values()], [1 - sum(factors), *factors], names)
        return mean.with_(moved)


def per_step(shares: Sequence[float], steps: Sequence[float]) -> list[float]:
    """Return what every client's way counts, ``p_i tau / a_i``; its share where all took equally many steps.

    Args:
        shares: p_i, which sum to 1.
        steps: a_i; 0 of a client that took no step, whose way is of length 0 too.

    Source:
        Wang et al. 2020, Eq. 5.
    """
    if len(set(steps)) == 1:
        return list(shares)
    tau = sum(share * each for share, each in zip(shares, steps, strict=True))
    return [share * tau / each if each else 0.0 for share, each in zip(shares, steps, strict=True)]
