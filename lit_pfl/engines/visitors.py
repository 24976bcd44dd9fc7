"""A Trainer for clients that have none yet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lit_pfl.core import Client
from lit_pfl.lightning_internals import forget_scores, lend_data, lent_trainer
from lit_pfl.randomness import random_state_kept


class Visitors:
    """Lends clients that have not trained a Trainer like their own, one after another: learners ask it how things are.

    Args:
        make: makes a client's Trainer.
    """

    def __init__(self, make: Callable[[Client], L.Trainer]) -> None:
        self._make = make
        self._trainer: L.Trainer | None = None

    def forget(self) -> None:
        """Make another Trainer next time: something that it was made from has changed."""
        self._trainer = None

    @contextmanager
    def lent(self, client: Client, epoch: int) -> Iterator[None]:
        """Let a client have a Trainer for a while: its own if it has one.

        Args:
            client: the client.
            epoch: the epoch that it has come to, counted from 0.
        """
        if client._trainer is not None:
            yield
            return
        if self._trainer is None:
            with random_state_kept():
                self._trainer = self._make(client)
            self._trainer.state.fn = TrainerFn.VALIDATING
        assert client.data is not None
        trainer = self._trainer
        trainer.fit_loop.epoch_progress.current.completed = epoch
        trainer.strategy.connect(client)
        lend_data(trainer, client.data.module)
        forget_scores(trainer)
        for logger in trainer.loggers:
            logger.__dict__["client"] = client
        with lent_trainer(client, trainer):
            yield
