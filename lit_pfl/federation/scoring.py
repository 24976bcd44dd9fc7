"""What a federation does where a Trainer validates, tests and predicts."""

from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from lit_pfl.core.payload import Payload
from lit_pfl.core.scores import Row, summary
from lit_pfl.data import has_batches, labels_of, samples_of
from lit_pfl.engines.threads import computing
from lit_pfl.errors import ConfigError
from lit_pfl.federation.global_model import GlobalModel
from lit_pfl.federation.parts import Parts
from lit_pfl.learners.scoring import Split
from lit_pfl.randomness import scoring_draws
from lit_pfl_callbacks.dashboard import RoundLog


class Scoring(Parts):
    """The part of a federation that scores clients, a batch being some of them."""

    evaluate: Literal["before", "after", "global"]
    global_model: GlobalModel
    seed: int | None
    threads: int | None

    def __init__(self, higher_is_better: dict[str, bool]) -> None:
        super().__init__()
        self.higher_is_better = {"acc": True, **higher_is_better}
        self.rows: list[Row] = []
        self.round_log = RoundLog()
        self._validated: dict[str, float] = {}

    def on_validation_epoch_start(self) -> None:
        """Begin an evaluation."""
        self.rows = []

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: list[int], batch_idx: int) -> None:
        """Evaluate a set of clients on their validation data."""
        self._evaluate(batch, self._validated_on)

    def on_validation_epoch_end(self) -> None:
        """Log means over clients; to the loggers they go with the rest of the round."""
        self._gather_rows()
        if not self.trainer.sanity_checking:
            self._validated = summary(self.rows, self._validated_on, self.higher_is_better)
            self._log(self._validated, write=self.trainer.state.fn != "fit")  # in a fit, with the rest of the round

    def test_step(self, batch: list[int], batch_idx: int) -> None:
        """Evaluate a set of clients on their test data."""
        self._evaluate(batch, "test")

    def on_test_epoch_end(self) -> None:
        """Log means over clients."""
        self._gather_rows()
        self._log(summary(self.rows, "test", self.higher_is_better), write=True)

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

    def _evaluate(self, clients: list[int], split: Split) -> None:
        with computing(self.threads):
            if self.evaluate == "global":
                if self.ranks.rank != 0 or self.rows:  # once is enough
                    return
                assert self.seed is not None
                with scoring_draws(self.seed):
                    score = self.global_model.score(self.data.everything(split), split, self.trainer)
                if score is not None:
                    self.rows = [Row(GlobalModel.ID, self.coordinator.round, split, "global", score.n, score.values)]
                return
            for client in [client for client in clients if client in self.clients]:
                for model in self.clients[client].evaluated:
                    score = self.engine.evaluate(client, model, split, self._shown_with(client))
                    self.higher_is_better = {**score.higher_is_better, **self.higher_is_better}
                    kind = f"{model}:{self._when(client)}"
                    self.rows.append(
                        Row(client, self.coordinator.round, split, kind, score.n, score.values, score.sizes)
                    )

    def _gather_rows(self) -> None:
        """Take in the scores of all processes, in the order of clients."""
        if self.ranks.size == 1:
            return
        told = [told.words for told in self.ranks.exchange((self.rows, self.higher_is_better))]
        self.rows = sorted((Row(*row) for rows, _ in told for row in rows), key=lambda row: row.client)
        for _, higher_is_better in told:
            self.higher_is_better = {**higher_is_better, **self.higher_is_better}

    def _when(self, client: int) -> str:
        """Return in which state a client is evaluated, for ``clients.csv``."""
        return self.evaluate if self.engine.has_trained(client) else "joining"

    def _shown_with(self, client: int) -> Payload | None:
        """Return what a client loads before it is evaluated."""
        if self.evaluate == "before" and self.engine.has_trained(client):
            return None
        return self.coordinator.server.evaluation_reply(client)

    def _test_last_round(self) -> None:
        everybody = {GlobalModel.ID} if self.evaluate == "global" else {*self.data.clients}
        if {row[:3] for row in self.rows} == {(client, self.coordinator.round, "test") for client in everybody}:
            return  # there were no validation data, and nobody was left out
        self.rows = []
        with torch.no_grad(), self.trainer.precision_plugin.test_step_context():  # as in a test by the Trainer
            self._evaluate(list(self.clients), "test")
        self._gather_rows()
        metrics = summary(self.rows, "test", self.higher_is_better)
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
