"""The scores of a federation's clients, or of the global model."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Literal

import torch

from lit_pfl.core.coordinator import Coordinator
from lit_pfl.core.payload import Payload
from lit_pfl.core.scores import Row, summary
from lit_pfl.data import FederatedDataModule, has_batches
from lit_pfl.engines import Engine, Local, Work
from lit_pfl.engines.questions import scored
from lit_pfl.engines.threads import computing
from lit_pfl.errors import ConfigError
from lit_pfl.federation.global_model import GlobalModel
from lit_pfl.learners.scoring import Score, Split
from lit_pfl.randomness import Draws, scoring_draws
from lit_pfl_callbacks.states import BY_OPTION, GLOBAL

State = Literal["before", "after", "global"]


class Scores:
    """Scores clients, and keeps the scores of the latest evaluation.

    Args:
        state: in which state clients are scored: ``before`` or ``after`` aggregation; or ``global``, the one model of
            all. Tests are in further states as well.
        higher_is_better: the directions of metrics that do not say so themselves.
        work: what the engine was told of the federation.
        engine: where the clients live.
        coordinator: the server's side.
        draws: source of all randomness.

    Attributes:
        rows: a score a client and model, in that state.
        other_rows: if it was a test, the scores in the other states.
        higher_is_better: the directions of all metrics that are known.
        trained: ids of the clients that have ever trained.

    Raises:
        ConfigError: when the model of all is to be scored, and the method has none.
    """

    def __init__(
        self,
        state: State,
        higher_is_better: Mapping[str, bool],
        work: Work,
        engine: Engine,
        coordinator: Coordinator,
        draws: Draws,
    ) -> None:
        self.state = state
        self.higher_is_better: dict[str, bool] = {"acc": True, **higher_is_better}
        self.work, self.engine, self.coordinator, self.draws = work, engine, coordinator, draws
        self.rows: list[Row] = []
        self.other_rows: list[Row] = []
        self.trained: set[int] = set()
        self._global_model = self._make_global_model() if state == "global" else None

    def _make_global_model(self) -> GlobalModel:
        return GlobalModel(self.work.fresh(self.work.data.clients[0]), self.coordinator)

    def begin(self) -> None:
        """Forget the former evaluation; its lists stay as they are, for whoever has kept them."""
        self.rows, self.other_rows = [], []

    @cached_property
    def validated_on(self) -> Split:
        """The data that are scored every round: validation data, if any client has some."""
        data = self.work.data
        return "val" if any(has_batches(data.client(client).val) for client in data.clients) else "test"

    def states_of_a_test(self, data: FederatedDataModule) -> list[State]:
        """Return the states in which models are tested, the one of the run's own scores first; to be asked once a test.

        In a state besides its own a run has a global model only if the method and the data have all that it takes.
        """
        if not self.coordinator.round:  # there is one model, that of the start
            return [self.state]
        if self.state != "global":
            self._global_model = None
            with suppress(ConfigError):
                data.everything("test")
                if self.coordinator.server.global_model():
                    self._global_model = self._make_global_model()
        there: list[State] = ["before", "after"] if self.work.keep_trained else ["after"]
        if self._global_model is not None:
            there.append("global")
        return [self.state, *(state for state in there if state != self.state)]

    def replies(self, clients: Iterable[int]) -> dict[int, Payload | None]:
        """Return by id what clients load to be in the run's own state; None for those that are in it as they are."""
        return {
            client: None if self._is_in(self.state, client) else self.coordinator.server.evaluation_reply(client)
            for client in clients
        }

    def evaluate(
        self, data: FederatedDataModule, clients: Sequence[int], split: Split, states: Sequence[State]
    ) -> None:
        """Score clients on their own data in some states, and add the rows.

        Args:
            data: the data of all, for the global model.
            clients: the clients' ids.
            split: which data.
            states: in which states; the clients' own Trainers are to show the first one.
        """
        with computing(self.work.threads):
            if "global" in states and not any(row.state == GLOBAL for row in (*self.rows, *self.other_rows)):
                with scoring_draws(self.draws.seed):
                    self._score_global(data.everything(split), split)
            if own := [state for state in states if state != "global"]:
                self._score(clients, split, own)

    def _score(self, clients: Sequence[int], split: Split, states: Sequence[State]) -> None:
        first, *others = states
        moved = [client for client in clients if not all(self._is_in(state, client) for state in states)]
        replies = {client: self.coordinator.server.evaluation_reply(client) for client in moved}
        # of whoever has never trained, or is sent nothing, aggregation changes nothing
        differing = [client for client in moved if client in self.trained and replies[client]]
        models = self.work.prototype.evaluated
        found: dict[State, dict[str, dict[int, Score]]] = {}
        for state in (*others, first):  # the first one last, since it is what the clients' own Trainers are to show
            asked = clients if state == first else differing
            loaded = {client: None if self._is_in(state, client) else replies[client] for client in asked}
            found[state] = {model: self.engine.ask(partial(scored, model, split), loaded) for model in models}
        for client in clients:
            for state in states:
                for model, scores in found[state].items():
                    one = scores[client] if client in scores else found[first][model][client]
                    kind = f"{model}:{state if client in self.trained else 'untrained'}"
                    self.higher_is_better = {**one.higher_is_better, **self.higher_is_better}
                    self._add(state, Row(client, self.coordinator.round, split, kind, one.n, one.values, one.sizes))

    def _score_global(self, batches: Iterable[Any], split: Split) -> None:
        model = self._global_model
        if model is not None and (one := model.score(batches, split, self.work.trainer)) is not None:
            self._add("global", Row(GlobalModel.ID, self.coordinator.round, split, "global", one.n, one.values))

    def _is_in(self, state: State, client: int) -> bool:
        """Say whether a client is in a state as it is, and need not load anything."""
        return state == "before" and client in self.trained

    def _add(self, state: State, row: Row) -> None:
        (self.rows if state == self.state else self.other_rows).append(row._replace(state=BY_OPTION[state]))

    def names(self, data: FederatedDataModule, client: int) -> set[str]:
        """Return the names of what :meth:`summary` will be of; a client is scored for that, and no row kept."""
        other = copy.copy(self)
        other.begin()
        other.evaluate(data, [client], self.validated_on, [self.state])
        return {*other.summary(self.validated_on)}

    def complete_test(self, data: FederatedDataModule, clients: Sequence[int]) -> dict[str, float]:
        """Test all clients in those states in which they have not just been; return the summaries of these."""
        everybody = [GlobalModel.ID] if self.state == "global" else clients
        # there were no validation data, and nobody was left out
        done = {row[:3] for row in self.rows} == {(client, self.coordinator.round, "test") for client in everybody}
        rows = [*self.rows] if done else []
        self.begin()
        self.rows = rows  # another list, since there is more to write
        self.evaluate(data, clients, "test", self.states_of_a_test(data)[done:])
        self.evaluate_new(data)
        return {**({} if done else self.summary("test")), **self.summary_of_others()}

    def evaluate_new(self, data: FederatedDataModule) -> None:
        """Score clients that were held out on their test data, as they would join now and after a round of training.

        Nobody else notices: the server does not get their uploads, and they are forgotten afterwards.
        """
        completed = self.coordinator.round
        for client in data.held_out:
            other = self._with(client)
            with computing(self.work.threads), torch.inference_mode(False), torch.no_grad():
                other._score([client], "test", ["after"])
                if completed:
                    reply = other.coordinator.server.reply(client)
                    with torch.enable_grad():
                        other.trained.update(other.engine.train({client: reply}, completed))
                    other._score([client], "test", ["before"])
                other.engine.abort()
            self.other_rows += [row._replace(split="new") for row in (*other.rows, *other.other_rows)]

    def check_new(self, data: FederatedDataModule) -> None:
        """See that the server has something for clients that join after the training, before there is any.

        Raises:
            ConfigError: when it has not.
        """
        for client in data.held_out[:1]:
            server = self._with(client).coordinator.server
            try:
                server.reply(client)
            except (KeyError, IndexError, ValueError) as error:
                raise ConfigError(
                    f"data.new_clients: {type(server).__name__} has nothing for a client that joins after the training "
                    f"({type(error).__name__}: {error}); leave it out, or say so in Server.add."
                ) from error

    def _with(self, client: int) -> "Scores":
        """Return the scores of a client that has just joined, with a server that knows it and an engine for it."""
        other, engine = copy.copy(self), Local()
        engine.setup(self.work, own=[client])
        other.begin()
        other.engine, other.trained = engine, set()
        other.coordinator = copy.copy(self.coordinator)
        other.coordinator.server = copy.copy(self.coordinator.server)
        other.coordinator.server.add(client, engine.joined([client])[client])
        return other

    def summary(self, split: Split) -> dict[str, float]:
        """Return means over clients in the run's own state, see :func:`~lit_pfl.core.scores.summary`."""
        return summary(self.rows, split, self.higher_is_better)

    def summary_of_others(self) -> dict[str, float]:
        """Return the same of a test's other states, which are in the names, and of clients that were held out."""
        metrics: dict[str, float] = {}
        for split, state in dict.fromkeys((row.split, row.state) for row in self.other_rows):
            rows = [row for row in self.other_rows if row.state == state]
            metrics |= summary(rows, split, self.higher_is_better, state)
        return metrics
