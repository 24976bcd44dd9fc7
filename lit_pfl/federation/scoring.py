"""The scores of a federation's clients, or of the one model of all."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import lightning as L
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.core.payload import Payload
from lit_pfl.core.scores import Row, summary
from lit_pfl.engines import Engine
from lit_pfl.engines.questions import scored
from lit_pfl.errors import ConfigError
from lit_pfl.learners.scoring import Score, Split, score
from lit_pfl.lightning_internals import lent_trainer

State = Literal["before", "after", "global"]


class Scores:
    """Scores clients, and keeps the scores of the latest evaluation.

    Args:
        state: in which state clients are scored: ``before`` or ``after`` aggregation; or ``global``, the one model of
            all.
        higher_is_better: the directions of metrics that do not say so themselves.

    Attributes:
        rows: a score a client and model.
        higher_is_better: the directions of all metrics that are known.
        trained: ids of the clients that have ever trained.
    """

    def __init__(self, state: State, higher_is_better: Mapping[str, bool]) -> None:
        self.state = state
        self.higher_is_better: dict[str, bool] = {"acc": True, **higher_is_better}
        self.rows: list[Row] = []
        self.trained: set[int] = set()

    def reply(self, client: int, coordinator: Coordinator) -> Payload | None:
        """Return what a client loads before it is scored; None where it is scored as it is."""
        if self.state == "before" and client in self.trained:
            return None
        return coordinator.server.evaluation_reply(client)

    def replies(self, clients: Iterable[int], coordinator: Coordinator) -> dict[int, Payload | None]:
        """Return :meth:`reply` of several clients, by id."""
        return {client: self.reply(client, coordinator) for client in clients}

    def score(
        self, engine: Engine, models: Sequence[str], clients: Sequence[int], split: Split, coordinator: Coordinator
    ) -> None:
        """Score clients on their own data and add the rows.

        Args:
            engine: where they live.
            models: names of their models that are scored.
            clients: their ids.
            split: which data.
            coordinator: the server's side.
        """
        replies = self.replies(clients, coordinator)
        found = {model: engine.ask(partial(scored, model, split), replies) for model in models}
        for client in clients:
            when = self.state if client in self.trained else "joining"
            for model, scores in found.items():
                one = scores[client]
                self.higher_is_better = {**one.higher_is_better, **self.higher_is_better}
                self.rows.append(Row(client, coordinator.round, split, f"{model}:{when}", one.n, one.values, one.sizes))

    def score_global(self, model: "GlobalModel", batches: Iterable[Any], split: Split, trainer: L.Trainer) -> None:
        """Score the one model of all, once an evaluation; see :meth:`GlobalModel.score`."""
        if not self.rows and (one := model.score(batches, split, trainer)) is not None:
            self.rows = [Row(GlobalModel.ID, model.coordinator.round, split, "global", one.n, one.values)]

    def are_of(self, clients: Iterable[int], round: int, split: Split) -> bool:
        """Say whether the rows are these clients', of this round and these data."""
        everybody = {GlobalModel.ID} if self.state == "global" else set(clients)
        return {row[:3] for row in self.rows} == {(client, round, split) for client in everybody}

    def summary(self, split: Split) -> dict[str, float]:
        """Return means over clients, see :func:`~lit_pfl.core.scores.summary`."""
        return summary(self.rows, split, self.higher_is_better)


class GlobalModel:
    """The one model of all, for methods that have one: a network beside the clients' that is given what the server has.

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
            raise ConfigError(f"federation.evaluate=global: {method} has no model of all; use before or after.")
        expected = [name for name in self.client.roles() if name not in self.client.frozen]
        lacking = [name for name in expected if name not in model] if model else []
        if lacking:
            hint = "; set model.norm_stats=averaged" if "running" in lacking[0] else ""
            raise ConfigError(
                f"federation.evaluate=global: with {method} every client has a {lacking[0]!r} of its own{hint}."
            )
        return model

    def score(self, batches: Iterable[Any], split: Split, trainer: L.Trainer) -> Score | None:
        """Score it as it is now; None if the server has not finished one yet.

        Args:
            batches: the samples.
            split: which of them.
            trainer: whom the learner may ask how things are.
        """
        model = self._get()
        if not model:
            return None
        self.client.load_global(model)
        with lent_trainer(self.client, trainer):
            return score(self.client.learner, batches, split)
