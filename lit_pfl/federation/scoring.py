"""What a federation does where a Trainer validates, tests and predicts."""

from typing import Any, Literal

import torch

from lit_pfl.data import labels_of, samples_of
from lit_pfl.engines.threads import computing
from lit_pfl.evaluation import Row, Split, summary
from lit_pfl.federation.parts import Parts
from lit_pfl.global_model import GlobalModel
from lit_pfl.payload import Payload
from lit_pfl.round_log import RoundLog


class Scoring(Parts):
    """The part of a federation that scores clients, a batch being some of them."""

    evaluate: Literal["before", "after", "global"]
    global_model: GlobalModel
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

    def validation_step(self, batch: list[int], batch_idx: int) -> None:
        """Evaluate a set of clients on their validation data."""
        self._evaluate(batch, self._validated_on)

    def on_validation_epoch_end(self) -> None:
        """Log means over clients; to the loggers they go with the rest of the round."""
        if not self.trainer.sanity_checking:
            self._validated = summary(self.rows, self._validated_on, self.higher_is_better)
            self._log(self._validated, write=self.trainer.state.fn != "fit")  # in a fit, with the rest of the round

    def on_test_epoch_start(self) -> None:
        """Begin an evaluation."""
        self.rows = []

    def test_step(self, batch: list[int], batch_idx: int) -> None:
        """Evaluate a set of clients on their test data."""
        self._evaluate(batch, "test")

    def on_test_epoch_end(self) -> None:
        """Log means over clients."""
        self._log(summary(self.rows, "test", self.higher_is_better), write=True)

    def predict_step(self, batch: list[int], batch_idx: int) -> dict[int, Any]:
        """Return what every client of the set predicts on its test data, by client id: (n, classes) logits, if tensors.

        Predictions that are no tensors come as a list of batches.
        """
        predicted = {client: self.engine.predict(client, self._shown_with(client), self.trainer) for client in batch}
        return {
            client: torch.cat(batches) if all(isinstance(x, torch.Tensor) for x in batches) else batches
            for client, batches in predicted.items()
            if batches  # a client may have no test samples
        }

    def test_samples(self, client: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the (n,) places in the data set of a client's test samples, and their (n,) labels if they have any."""
        data = self.data.client(client)
        return samples_of(data.test), None if data.num_classes is None else labels_of(data.test)

    @property
    def _validated_on(self) -> Split:
        return "val" if any(len(client.data.val) for client in self.clients.values() if client.data) else "test"

    def _evaluate(self, clients: list[int], split: Split) -> None:
        with computing(self.threads):
            if self.evaluate == "global":
                score = None if self.rows else self.global_model.score(self.data.everything(split), split, self.trainer)
                if score is not None:
                    self.rows = [Row(GlobalModel.ID, self.coordinator.round, split, "global", score.n, score.values)]
                return
            for client in clients:
                for model in self.clients[client].evaluated:
                    score = self.engine.evaluate(client, model, split, self._shown_with(client), self.trainer)
                    self.higher_is_better = {**score.higher_is_better, **self.higher_is_better}
                    kind = f"{model}:{self._when(client)}"
                    self.rows.append(Row(client, self.coordinator.round, split, kind, score.n, score.values))

    def _when(self, client: int) -> str:
        """Return in which state a client is evaluated, for ``clients.csv``."""
        return self.evaluate if self.engine.has_trained(client) else "joining"

    def _shown_with(self, client: int) -> Payload | None:
        """Return what a client loads before it is evaluated."""
        if self.evaluate == "before" and self.engine.has_trained(client):
            return None
        return self.coordinator.server.reply(client)

    def _test_last_round(self) -> None:
        if self.rows and (self.rows[0].split, self.rows[0].round) == ("test", self.coordinator.round):
            return  # there were no validation data
        self.rows = []
        with torch.no_grad():
            self._evaluate(list(self.clients), "test")
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
