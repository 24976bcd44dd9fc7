"""Elastic aggregation: the server moves weights less on which clients' outputs depend strongly."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat
from torch import Tensor

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import Server
from lit_pfl.core.sharing import EVERYTHING
from lit_pfl.data.loaders import in_order, needed, num_samples, part_of
from lit_pfl.learners import SkipBatch, training_loss, without_trace
from lit_pfl.learners.scoring import transferred
from lit_pfl.nn import Memory
from lit_pfl.randomness import fixed_order

SENSITIVITY = "sensitivity."


class ElasticAggregation(Classifying):
    """Federated averaging in which every weight's step is scaled by how little the clients' outputs depend on it.

    Before a client trains, it takes the sensitivity O of every weight of the received model: on each batch of a part of
    its training data ``O <- mu O + (1 - mu) |g|``, from 0, where g is the gradient of the batch's mean of ``|z|^2``,
    and z are the logits. No label is used. The server averages models and O by samples and takes ``w <- w + (1 + tau -
    O / max O) (mean - w)``, the maximum being over all weights of the network. With ``tau=1`` and equal O for all
    weights this is FedAvg, bit for bit.

    O is taken in evaluation mode and without augmentation, on the same samples in every round. Uploads are twice as
    large as FedAvg's. No code by the authors is known; FL-bench takes gradients of the loss, one number a tensor, the
    maximum over clients, and does not train on the samples that O is of.

    Args:
        tau: the step of weights on which no output depends: 1 + tau times to the mean. The most sensitive go tau times.
        mu: how much of O stays with every batch; 0 leaves the last batch's.
        share: share of the training data that O is of.
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no head module.

    Source:
        Chen et al. 2023, Elastic Aggregation for Federated Optimization; numbers as in FL-bench.
    """

    needs_automatic = "takes gradients of the logits"
    needs_labels = ""
    may_unfreeze = False

    shares = EVERYTHING
    reserved = (SENSITIVITY,)

    sensitivity: Memory

    def __init__(
        self,
        tau: NonNegativeFloat = 0.5,
        mu: ClosedUnitInterval = 0.95,
        share: ClosedUnitInterval = 0.3,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tau, self.mu, self.share = tau, mu, share

    def configure_state(self) -> None:
        self.sensitivity = Memory(self.shared_weights()).zero_()

    def configure_server(self) -> "ElasticServer":
        return ElasticServer(frozenset(self.shared_weights()), self.tau)

    def initial(self) -> Payload:
        """Return what is sent on joining, if a part of the training data can be chosen."""
        if self.data is not None:
            with needed(f"Client {self.spec.client_id}", "ElasticAggregation takes some of its training samples"):
                self.unlabeled()
        return super().initial()

    def unlabeled(self) -> Any:
        """Return the batches that O is of: the same at any time, and in a resumed run."""
        data = self.training_data()
        n = num_samples(data)
        size = max(1, int(self.share * n))
        if size == n:
            return in_order(data)
        order = fixed_order(n, self.spec.client_id)
        return in_order(part_of(data, order[:size].sort().values))

    def begin_round(self) -> None:
        """Take the sensitivity of the received weights."""
        self.sensitivity.zero_()
        # A module may have frozen some since: no output depends on what does not train.
        weights = {name: weight for name, weight in self.shared_weights().items() if weight.requires_grad}
        with torch.enable_grad(), without_trace(self.learner):
            for index, batch in enumerate(self.unlabeled()):
                with suppress(SkipBatch), self.at_head() as seen:
                    training_loss(self.learner, transferred(self.learner, batch), index)
                    energy = seen.logits.square().sum(1).mean()
                    if not energy.requires_grad:
                        continue
                    gradients = torch.autograd.grad(energy, list(weights.values()), materialize_grads=True)
                    for name, gradient in zip(weights, gradients, strict=True):
                        self.sensitivity[name].lerp_(gradient.to_dense().abs(), 1 - self.mu)

    def upload(self) -> Payload:
        """Return the weights and their sensitivities."""
        return super().upload().with_({SENSITIVITY + name: own for name, own in self.sensitivity.items()})


class ElasticServer(Server):
    """Goes from the model to the mean, every weight as far as its sensitivity lets it.

    Args:
        weights: names of the trained parameters among what is uploaded; all else is averaged only.
        tau: see :class:`ElasticAggregation`.
    """

    averages = means_only = True

    def __init__(self, weights: frozenset[str], tau: float) -> None:
        self.weights, self.tau = weights, tau

    def is_averaged(self, name: str) -> bool:
        return not name.startswith(SENSITIVITY)

    def averaged(self, uploads: Mapping[int, Payload], weights: list[float]) -> Payload:
        names = self._averaged(uploads)
        moved = [name for name in names if name in self.weights]
        mean = self.average(uploads, weights, [*names, *(SENSITIVITY + name for name in moved)])
        factors = elastic_factors({name: mean[SENSITIVITY + name] for name in moved}, self.tau)
        own = {name: torch.lerp(self.model[name], mean[name], factors[name]) for name in moved}
        return Payload({name: own.get(name, mean[name]) for name in names}, mean.sparse)


def elastic_factors(sensitivity: Mapping[str, Tensor], tau: float) -> dict[str, Tensor]:
    """Return ``1 + tau - O / max O`` for every weight, of any shape; 1 where no weight is sensitive.

    Source:
        Chen et al. 2023.
    """
    largest = max((float(own.max()) for own in sensitivity.values()), default=0.0)
    if not largest > 0:
        return {name: torch.ones_like(own) for name, own in sensitivity.items()}
    return {name: 1 + tau - own / largest for name, own in sensitivity.items()}
