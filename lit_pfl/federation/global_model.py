"""The global model, of methods that have one."""

from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.core.shared_tensors import extra_tensors
from lit_pfl.errors import ConfigError
from lit_pfl.learners.scoring import Score, Split, score
from lit_pfl.lightning_internals import lent_trainer


class GlobalModel:
    """The global model, for methods that have one: a network next to the clients' that is given what the server has.

    Args:
        client: a client of the method with nothing but fresh weights.
        coordinator: of the federation.

    Raises:
        ConfigError: when the method has no such model, or not all of it.
    """

    #: what stands for a client's id where the scores of the global model are
    ID = -1

    def __init__(self, client: Client, coordinator: Coordinator) -> None:
        self.client, self.coordinator = client, coordinator
        self._get()

    def _get(self) -> Mapping[str, Tensor]:
        method, model = type(self.client).__name__, self.coordinator.server.global_model()
        if model is None:
            raise ConfigError(f"federation.evaluate=global: {method} has no global model; use before or after.")
        expected = [name for name in self.client.roles() if name not in self.client.frozen]
        if self.client.shared_extras:
            expected += extra_tensors(self.client.extra, self.client.shared_extras, statistics=True)
        lacking = [name for name in expected if name not in model] if model else []
        if lacking:
            hint = "; set model.norm_stats=averaged" if "running" in lacking[0] else ""
            raise ConfigError(
                f"federation.evaluate=global: with {method} every client has a {lacking[0]!r} of its own{hint}."
            )
        return model

    def score(self, batches: Iterable[Any], split: Split, trainer: L.Trainer) -> Score | None:
        """Score it as it is now; None if the server has not finished one yet.

        ``trainer`` is whom the learner may ask how things are.
        """
        model = self._get()
        if not model:
            return None
        self.client.place_on(trainer.strategy.root_device)
        self.client.load_global(model)
        with lent_trainer(self.client, trainer):
            return score(self.client.learner, batches, split)
