"""What a client tells of its model to those who look at it from outside."""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
from torch import nn

from lit_pfl.learners import network_of
from lit_pfl.nn import factorized_layers
from lit_pfl_callbacks.protocols import WeightParts
from lit_pfl_callbacks.sparsity import dense_parts


class Telling:
    """The part of a client that is looked at."""

    learner: L.LightningModule

    @property
    def scored(self) -> L.LightningModule:
        """The learner that is the personalized model, inside of :meth:`personalized`."""
        return self.learner

    @contextmanager
    def personalized(self) -> Iterator[L.LightningModule]:
        """Make ``scored`` the personalized model; put it back afterwards. By default it is at any time."""
        yield self.scored

    def standalone(self) -> nn.Module:
        """Return a copy of the personalized model as a network by itself, see :func:`~lit_pfl.learners.network_of`."""
        with self.personalized() as learner:
            return network_of(learner)

    def weight_parts(self) -> dict[str, WeightParts]:
        """Return what the learner's weights are made of, by the layer's name.

        Of factorized layers that is mu, as it is used and sent, and the factors u and v.
        """
        layers = dict(factorized_layers(self.learner))
        if not layers:
            return dense_parts(self.learner)
        return {
            name: WeightParts(None if layer.sparse_mu is None else layer.sparse_mu.detach(), (layer.u, layer.v))
            for name, layer in layers.items()
        }
