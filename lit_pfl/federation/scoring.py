"""What a federation does where a Trainer validates, tests and predicts."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.scores import Row, summary
from lit_pfl.data import has_batches, labels_of, samples_of
from lit_pfl.engines.threads import computing
from lit_pfl.errors import ConfigError
from lit_pfl.federation.global_model import GlobalModel
from lit_pfl.federation.parts import Parts
from lit_pfl.learners.scoring import Score, Split
from lit_pfl.randomness import scoring_draws
from lit_pfl_callbacks.dashboard import RoundLog
from lit_pfl_callbacks.states import BY_OPTION


class Scoring(Parts):
    """The part of a federation that scores clients, a batch being some of them."""

    evaluate: Literal["before", "after", "global"]
    global_model: GlobalModel
    seed: int | None
    threads: int | None
    _fresh: Callable[[int], Client]

    def __init__(self, higher_is_better: dict[str, bool]) -> None:
        super().__init__()
        self.higher_is_better = {"acc": True, **higher_is_better}
        self.rows: list[Row] = []
        self.other_rows: list[Row] = []
        self.round_log = RoundLog()
        self._validated: dict[str, float] = {}

    def on_validation_epoch_start(self) -> None:
        """Begin an evaluation."""
        self.rows, self.other_rows = [], []

    def on_test_epoch_start(self) -> None:
        """Begin a test, in every state that there is."""
        self.rows, self.other_rows = [], []
        self._tested = self._states()

    def validation_step(self, batch: list[int], batch_idx: int) -> None:
        """Evaluate a set of clients on their validation data."""
        self._evaluate(batch, self._validated_on, [self.evaluate])

    def on_validation_epoch_end(self) -> None:
        """Log means over clients; to the loggers they go with the rest of the round."""
        self._gather_rows()
        if not self.trainer.sanity_checking:
            self._validated = summary(self.rows, self._validated_on, self.higher_is_better)
            self._log(self._validated, write=self.trainer.state.fn != "fit")  # in a fit, with the rest of the round

    def test_step(self, batch: list[int], batch_idx: int) -> None:
        """Evaluate a set of clients on their test data."""
        self._evaluate(batch, "test", self._tested)

    def on_test_epoch_end(self) -> None:
        """Log means over clients."""
        self._gather_rows()
        self._log({**summary(self.rows, "test", self.higher_is_better), **self._summary_of_others()}, write=True)

    def predict_step(self, batch: list[int], batch_idx: int) -> dict[int, Any]:
        """Return what every client of the set predicts on its test data, by client id: (n, classes) logits, if tensors.

        Predictions that are no tensors come as a list of batches.
        """
        own = [client for client in batch if client in self.clients]
        predicted = {client: self.engine.predict(client, self._shown_with(client)) for client in own}
        joined = {
            client: torch.cat(batches) if all(isinstance(x, torch.Tensor) for x in batches) else batches
            for client, batches in predicted.items()
            if batches  # a client may have no test samples
        }
        return self.from_all_ranks(joined) if self.ranks.size > 1 else joined

    def from_all_ranks(self, tensors: dict[int, Any]) -> dict[int, Any]:
        """Return tensors of clients by id: at process 0 those of all processes' clients, elsewhere of its own.

        Raises:
            ConfigError: when they are no tensors.
        """
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise ConfigError("trainer.devices: only tensors can be gathered from several processes; give 1.")
        told = self.ranks.exchange(list(tensors), list(tensors.values()), only_to=0)
        pairs = [pair for one in told for pair in zip(one.words, one.tensors, strict=False)]
        return dict(sorted((client, tensor.clone()) for client, tensor in pairs))

    def test_samples(self, client: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the (n,) places in the data set of a client's test samples, and their (n,) labels if they have any."""
        data = self.data.client(client)
        return samples_of(data.test), None if data.num_classes is None else labels_of(data.test)

    def standalone(self, client: int) -> nn.Module:
        """Return a copy of a client's personalized model as a network by itself, in the state in which it is scored."""
        if client not in self.clients:
            raise ConfigError(f"There is no client {client}; there are {_some(list(self.clients))}.")
        return self.engine.standalone(client, self._shown_with(client))

    @cached_property
    def _validated_on(self) -> Split:
        own = {k: has_batches(client.data.val) for k, client in self.clients.items() if client.data}
        return "val" if any(self.ranks.merged(own).values()) else "test"

    def _states(self) -> list[str]:
        """Return the states in which models are tested, the one of the run's own scores first; to be asked once a test.

        In a state besides its own a run has a global model only if the method and the data have all that it takes.
        """
        if not self.coordinator.round:  # there is one model, that of the start
            return [self.evaluate]
        if self.evaluate != "global":
            self.__dict__["global_model"] = None
            with suppress(ConfigError):
                self.data.everything("test")
                if self.ranks.rank == 0 and self.coordinator.server.global_model():
                    self.__dict__["global_model"] = GlobalModel(self._fresh(self.data.clients[0]), self.coordinator)
                    self.global_model.client.place_on(self.device)
        there = ["before", "after", *(["global"] if self.global_model is not None else [])]
        return [self.evaluate, *(state for state in there if state != self.evaluate)]

    def _evaluate(self, clients: list[int], split: Split, states: Sequence[str]) -> None:
        """Score clients in some states; the scores of the run's own state are ``rows``, the others ``other_rows``."""
        with computing(self.threads):
            if "global" in states:
                self._add(self._score_of_all(split))
            personal = [state for state in states if state != "global"]
            for client in [client for client in clients if client in self.clients and personal]:
                first, *others = personal
                trained = self.engine.has_trained(client)
                reply = None if trained and personal == ["before"] else self.coordinator.server.evaluation_reply(client)
                if not trained or not reply:  # aggregation changes nothing of it
                    others = []
                # the first one last, since it is what the client's own Trainer is to show
                scores = {
                    state: self._scores(client, split, None if trained and state == "before" else reply)
                    for state in (*others, first)
                }
                for state in personal:
                    self._add(self._rows_of(client, split, state, scores.get(state, scores[first])))

    def _add(self, rows: list[Row]) -> None:
        for row in rows:
            (self.rows if row.state == BY_OPTION[self.evaluate] else self.other_rows).append(row)

    def _score_of_all(self, split: Split) -> list[Row]:
        if self.ranks.rank != 0 or any(r.state == "global" for r in (*self.rows, *self.other_rows)):
            return []  # once is enough
        assert self.seed is not None
        with scoring_draws(self.seed):
            score = self.global_model.score(self.data.everything(split), split, self.trainer)
        round = self.coordinator.round
        if score is None:
            return []
        return [Row(GlobalModel.ID, round, split, "global", score.n, score.values, state="global")]

    def _scores(self, client: int, split: Split, reply: Payload | None) -> dict[str, Score]:
        return {m: self.engine.evaluate(client, m, split, reply) for m in self.clients[client].evaluated}

    def _rows_of(self, client: int, split: Split, state: str, scores: dict[str, Score]) -> list[Row]:
        when = state if self.engine.has_trained(client) else "untrained"
        rows = []
        for model, score in scores.items():
            self.higher_is_better = {**score.higher_is_better, **self.higher_is_better}
            found = score.n, score.values, score.sizes
            rows.append(Row(client, self.coordinator.round, split, f"{model}:{when}", *found, BY_OPTION[state]))
        return rows

    def _gather_rows(self) -> None:
        """Take in the scores of all processes, in the order of clients."""
        if self.ranks.size == 1:
            return
        told = [told.words for told in self.ranks.exchange((self.rows, self.other_rows, self.higher_is_better))]
        self.rows, self.other_rows = (
            sorted((Row(*row) for one in told for row in one[which]), key=lambda row: row.client) for which in (0, 1)
        )
        for _, _, higher_is_better in told:
            self.higher_is_better = {**higher_is_better, **self.higher_is_better}

    def _shown_with(self, client: int) -> Payload | None:
        """Return what a client loads before it is evaluated in the run's own state."""
        if self.evaluate == "before" and self.engine.has_trained(client):
            return None
        return self.coordinator.server.evaluation_reply(client)

    def _summary_of_others(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for state in dict.fromkeys(row.state for row in self.other_rows):
            rows = [row for row in self.other_rows if row.state == state]
            metrics |= summary(rows, "test", self.higher_is_better, state)
        return metrics

    def _test_last_round(self) -> None:
        everybody = {GlobalModel.ID} if self.evaluate == "global" else {*self.data.clients}
        # there were no validation data, and nobody was left out
        done = {row[:3] for row in self.rows} == {(client, self.coordinator.round, "test") for client in everybody}
        self.rows = [*self.rows] if done else []  # another list, since there is more to write
        self.other_rows = []
        with torch.no_grad(), self.trainer.precision_plugin.test_step_context():  # as in a test by the Trainer
            self._evaluate(list(self.clients), "test", self._states()[done:])
        self._gather_rows()
        metrics = {} if done else summary(self.rows, "test", self.higher_is_better)
        metrics |= self._summary_of_others()
        self.round_log.write(self.trainer.loggers, self.coordinator.round, metrics)
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    def _log(self, metrics: dict[str, float], write: bool = False) -> None:
        """Tell the Trainer and its callbacks; the loggers only if asked to."""
        self.round_log.name_axes(self.trainer.loggers, metrics)
        metrics = {"round": self.coordinator.round, **metrics}
        # as tensors, since byte counts do not fit the 32 bits that Lightning gives to plain numbers
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        self.log_dict(values, logger=None if write else False, batch_size=1)


def _some(ids: list[int]) -> str:
    return ", ".join(map(str, ids[:10])) + (", ..." if len(ids) > 10 else "")
