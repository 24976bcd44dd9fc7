"""pFedMe: personal models by Moreau envelopes of the clients' losses."""

from typing import Any

import torch
from jsonargparse.typing import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from lit_pfl.core import Client, ServerMomentum
from lit_pfl.core.server import Weighting
from lit_pfl.errors import ConfigError
from lit_pfl.learners import OptimizerCallable, refuse_scaled_gradients, single_optimizer
from lit_pfl.methods.two_models.base import TwoModels
from lit_pfl_callbacks.tensors import load_tensors, tensors_of


class PFedMe(TwoModels):
    """Every client has a model theta of its own that is held near the common one, w, and w follows it.

    On each batch D, ``inner_steps`` times ``theta <- theta - inner_lr (grad f(theta; D) + lam (theta - w))``, then
    ``w <- w - lr lam (w - theta)`` with the optimizer's lr. theta begins at w in every round, and is kept from batch to
    batch. The server goes from w to the mean of the clients' w, times ``beta``. What is evaluated is theta, as trained
    and as aggregated: the authors' code evaluates w_i under that name. In it all clients train in every round, and only
    the chosen ones are averaged. Its weight decay of 0.001 in the inner steps, which the paper does not have, is left
    out.

    The loss that is reported is f(theta; D) at the last inner step. Running statistics of normalization layers are
    theta's.

    Args:
        lam: how strongly theta is held, the paper's lambda.
        inner_steps: the paper's K.
        inner_lr: learning rate of theta.
        beta: how far the server goes to the mean, above 0.
        weighting: the mean of the models: ``uniform``, as in the paper, or by numbers of ``samples``, as in the
            authors' code.
        optimizer: makes the optimizer of w, which must be plain SGD; its rate is the paper's eta.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: for another optimizer than plain SGD, with ``trainer.precision=16-mixed``, or for a ``beta`` and a
            server optimizer.

    Source:
        Dinh et al. 2020, Algorithm 1.
    """

    needs_automatic = "takes inner steps on one loss"
    needs_one_process = "takes inner steps of its own on every batch"

    def __init__(
        self,
        lam: NonNegativeFloat = 15.0,
        inner_steps: PositiveInt = 5,
        inner_lr: PositiveFloat = 0.09,
        beta: PositiveFloat = 1.0,
        weighting: Weighting = "uniform",
        optimizer: OptimizerCallable = lambda parameters: torch.optim.SGD(parameters, lr=0.005),
        **kwargs: Any,
    ) -> None:
        if beta != 1:
            if kwargs.get("server_optimizer") is not None:
                raise ConfigError(f"model.beta={beta}: it is a server optimizer itself; leave out one of the two.")
            kwargs["server_optimizer"] = ServerMomentum(beta, 0.0)
        super().__init__(optimizer=optimizer, **kwargs)
        self.lam, self.inner_steps, self.inner_lr, self.beta = lam, inner_steps, inner_lr, beta
        self.weighting = weighting

    def configure_optimizers(self) -> Any:
        refuse_scaled_gradients(self.trainer, "PFedMe")
        configured = Client.configure_optimizers(self)  # theta's steps are not the optimizer's
        optimizer = single_optimizer(configured)
        if type(optimizer) is not torch.optim.SGD or any(
            group["momentum"] or group["maximize"] for group in optimizer.param_groups
        ):
            raise ConfigError(
                "model.optimizer: in PFedMe w goes a part of the way to theta on each batch, which plain SGD makes it "
                "do; use torch.optim.SGD without momentum."
            )
        return configured

    def begin_round(self) -> None:
        load_tensors(self.personal, tensors_of(self.learner))

    def objective(self, batch: Any, batch_idx: int) -> Tensor:
        """Take the inner steps; return a loss whose gradient by w is ``lam (w - theta)``."""
        w = {name: weight for name, weight in self.learner.named_parameters() if weight.requires_grad}
        theta = [self.personal.get_parameter(name) for name in w]
        for _ in range(self.inner_steps):
            loss = self.personal_loss(batch, batch_idx)
            gradients = torch.autograd.grad(loss, theta, materialize_grads=True)
            with torch.no_grad():
                for own, common, gradient in zip(theta, w.values(), gradients, strict=True):
                    own.sub_(self.inner_lr * (self.lam * (own - common) + gradient))
        apart = [
            ((common - common.detach()) * (self.lam * (common - own)).detach()).sum()
            for own, common in zip(theta, w.values(), strict=True)
        ]
        return loss.detach() + torch.stack(apart).sum()

    def end_round(self) -> None:
        """Take over theta's running statistics, which w has none of."""
        load_tensors(self.learner, dict(self.personal.named_buffers()))
