"""All clients in this process, many trained in one step."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from jsonargparse.typing import PositiveInt
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload
from lit_pfl.engines.engine import NO_LIMITS, Trained
from lit_pfl.engines.local import Local
from lit_pfl.engines.stack import ELEMENTWISE, Epoch, train_together
from lit_pfl.errors import ConfigError
from lit_pfl.learners import ImageClassifier
from lit_pfl.lightning_internals import HOOKS, Elsewhere
from lit_pfl.randomness import random_state_kept

#: what makes a client's objective that of its learner alone, as long as a method leaves them as they are
OBJECTIVE = ("objective", "loss", "penalized", "training_step")


class Stacked(Local):
    """Trains many clients at once in this process: a batch of each in one step, by ``torch.func.vmap``.

    A client's own Trainer does everything but the steps, for which it lends its client, optimizer and batches. What
    comes of them is what would have come of them one after another, except for rounding. Clients train in the same step
    as long as they have batches of one shape; those with more batches than others continue without them.

    Args:
        size: how many clients there are in a stack at most.
        awake: see :class:`~lit_pfl.engines.Local`; a stack has no more clients than that.

    Raises:
        ConfigError: when ``size`` or ``awake`` is not a number of clients.

    Example::

        Federation(FedAvg(), engine=Stacked(size=64))
    """

    all_at_once = True

    def __init__(self, size: PositiveInt = 32, awake: PositiveInt | None = None) -> None:
        self.size = size
        super().__init__(awake)  # which checks both
        self.size = int(size if awake is None else min(size, awake))
        self._checked: set[int] = set()

    def make(self, clients: Iterable[int]) -> None:
        clients = list(clients)
        super().make(clients)
        for client in clients:
            if isinstance(learner := self.clients[client].learner, ImageClassifier):
                learner.channels_last = False  # a lay-out of four dimensions; stacked images have five

    def stacked(self, clients: int) -> int:
        return min(self.size, clients)

    def train(
        self, replies: Mapping[int, Payload], completed: int, batches: Mapping[int, int] = NO_LIMITS
    ) -> dict[int, Trained]:
        """Let clients load their replies and train a round, many at once.

        Raises:
            ConfigError: when they cannot train so.
        """
        trained: dict[int, Trained] = {}
        with random_state_kept():
            for start in range(0, len(replies), self.size):
                some = dict(islice(replies.items(), start, start + self.size))
                trained |= self._train_together(some, completed, batches)
        return trained

    def _train_together(
        self, replies: Mapping[int, Payload], completed: int, batches: Mapping[int, int]
    ) -> dict[int, Trained]:
        before = {k: self._prepare(k, reply, completed, batches.get(k)) for k, reply in replies.items()}
        sent: dict[int, Any] = {}
        for client, reply in replies.items():
            sent[client] = self.hub.resume(client, reply)
            if client not in self._checked:
                _check(self.clients[client], sent[client])
                self._checked.add(client)
        while epochs := {client: message for client, message in sent.items() if isinstance(message, Epoch)}:
            train_together(list(epochs.values()))
            sent |= {client: self.hub.resume(client, None) for client in epochs}
        return {client: self._conclude(client, before[client], sent[client], completed) for client in replies}

    def _elsewhere(self, module: Client) -> Elsewhere:
        return lambda *epoch: self.hub.link.lend(Epoch(module, *epoch))


def _check(client: Client, message: Any) -> None:
    """See that a client can train with others.

    Args:
        client: the client.
        message: what its fit has handed over first: an epoch, unless its Trainer has trained on its own.
    """
    kind: Any = type(client)
    optimizer: Any = client.trainer.optimizers[0]
    if any(getattr(kind, name) is not getattr(Client, name) for name in OBJECTIVE):
        reason = f"{kind.__name__} minimizes more than its learner's loss"
    elif type(client.learner) is not ImageClassifier:
        reason = f"a step of {type(client.learner).__name__} may do what cannot be done for many clients at once"
    elif type(optimizer) not in ELEMENTWISE:
        reason = f"{type(optimizer).__name__} may not treat every number on its own, as SGD and Adam do"
    elif _has_hooks(client, optimizer):
        reason = f"{kind.__name__} has hooks in every step of a client"
    elif any(schedule.interval == "step" for schedule in client.trainer.lr_scheduler_configs):
        reason = "the learning rate changes from step to step"
    elif hook := next((hook for hook in HOOKS if is_overridden(hook, client)), None):
        reason = f"{kind.__name__}.{hook} is about single steps of a client"
    elif not isinstance(message, Epoch):
        reason = "trainer.precision or federation.client_trainer is about single steps of a client"
    else:
        return
    raise ConfigError(f"federation.engine=Stacked: {reason}; use federation.engine=Local.")


def _has_hooks(client: Client, optimizer: Any) -> bool:
    """Say whether a client's own functions are called in its steps, which would be those of another one in a stack."""
    dictionaries = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    for part in client.learner.modules():
        dictionaries += [part._forward_pre_hooks, part._forward_hooks, part._backward_hooks, part._backward_pre_hooks]
    for weight in client.learner.parameters():
        dictionaries += [weight._backward_hooks, weight._post_accumulate_grad_hooks]
    return any(dictionaries)
