"""The scores of a federation's clients, or of the global model."""

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
from lit_pfl_callbacks.states import BY_OPTION, GLOBAL

State = Literal["before", "after", "global"]


class Scores:
    """Scores clients, and keeps the scores of the latest evaluation.

    Args:
        state: in which state clients are scored: ``before`` or ``after`` aggregation; or ``global``, the one model of
            all. Tests are in further states as well.
        higher_is_better: the directions of metrics that do not say so themselves.

    Attributes:
        rows: a score a client and model, in that state.
        other_rows: if it was a test, the scores in the other states.
        higher_is_better: the directions of all metrics that are known.
        trained: ids of the clients that have ever trained.
        global_model: the global model, if it is to be scored.
    """

    def __init__(self, state: State, higher_is_better: Mapping[str, bool]) -> None:
        self.state = state
        self.higher_is_better: dict[str, bool] = {"acc": True, **higher_is_better}
        self.rows: list[Row] = []
        self.other_rows: list[Row] = []
        self.trained: set[int] = set()
        self.global_model: GlobalModel | None = None

    def begin(self) -> None:
        """Forget the former evaluation; its lists stay as they are, for whoever has kept them."""
        self.rows, self.other_rows = [], []

    def states(self) -> list[State]:
        """Return the states that there are, the one of the run's own scores first."""
        there: list[State] = ["before", "after"]
        if self.global_model is not None:
            there.append("global")
        return [self.state, *(state for state in there if state != self.state)]

    def replies(self, clients: Iterable[int], coordinator: Coordinator) -> dict[int, Payload | None]:
        """Return by id what clients load to be in the run's own state; None for those that are in it as they are."""
        return {
            client: None if self._is_in(self.state, client) else coordinator.server.evaluation_reply(client)
            for client in clients
        }

    def score(
        self,
        engine: Engine,
        models: Sequence[str],
        clients: Sequence[int],
        split: Split,
        coordinator: Coordinator,
        states: Sequence[State],
    ) -> None:
        """Score clients on their own data in some states and add the rows.

        Args:
            engine: where they live.
            models: names of their models that are scored.
            clients: their ids.
            split: which data.
            coordinator: the server's side.
            states: in which states, except for ``global``; the clients' own Trainers are to show the first one.
        """
        if not states:
            return
        first, *others = states
        moved = [client for client in clients if not all(self._is_in(state, client) for state in states)]
        replies = {client: coordinator.server.evaluation_reply(client) for client in moved}
        # of whoever has never trained, or is sent nothing, aggregation changes nothing
        differing = [client for client in moved if client in self.trained and replies[client]]
        found: dict[State, dict[str, dict[int, Score]]] = {}
        for state in (*others, first):  # the first one last, since it is what the clients' own Trainers are to show
            asked = clients if state == first else differing
            loaded = {client: None if self._is_in(state, client) else replies[client] for client in asked}
            found[state] = {model: engine.ask(partial(scored, model, split), loaded) for model in models}
        for client in clients:
            for state in states:
                for model, scores in found[state].items():
                    one = scores[client] if client in scores else found[first][model][client]
                    kind = f"{model}:{state if client in self.trained else 'untrained'}"
                    self.higher_is_better = {**one.higher_is_better, **self.higher_is_better}
                    self._add(state, Row(client, coordinator.round, split, kind, one.n, one.values, one.sizes))

    def score_global(self, batches: Iterable[Any], split: Split, trainer: L.Trainer) -> None:
        """Score the global model, once an evaluation; see :meth:`GlobalModel.score`."""
        model = self.global_model
        if model is None or any(row.state == GLOBAL for row in (*self.rows, *self.other_rows)):
            return
        if (one := model.score(batches, split, trainer)) is not None:
            self._add("global", Row(GlobalModel.ID, model.coordinator.round, split, "global", one.n, one.values))

    def _is_in(self, state: State, client: int) -> bool:
        """Say whether a client is in a state as it is, and need not load anything."""
        return state == "before" and client in self.trained

    def _add(self, state: State, row: Row) -> None:
        (self.rows if state == self.state else self.other_rows).append(row._replace(state=BY_OPTION[state]))

    def are_of(self, clients: Iterable[int], round: int, split: Split) -> bool:
        """Say whether the rows are these clients', of this round and these data."""
        everybody = {GlobalModel.ID} if self.state == "global" else set(clients)
        return {row[:3] for row in self.rows} == {(client, round, split) for client in everybody}

    def summary(self, split: Split) -> dict[str, float]:
        """Return means over clients in the run's own state, see :func:`~lit_pfl.core.scores.summary`."""
        return summary(self.rows, split, self.higher_is_better)

    def summary_of_others(self, split: Split) -> dict[str, float]:
        """Return the same of the other states, which are in the names."""
        metrics: dict[str, float] = {}
        for state in dict.fromkeys(row.state for row in self.other_rows):
            rows = [row for row in self.other_rows if row.state == state]
            metrics |= summary(rows, split, self.higher_is_better, state)
        return metrics


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
