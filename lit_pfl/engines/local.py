"""All clients in this process, one awake at a time."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload, as_payload
from lit_pfl.data import LateLoader
from lit_pfl.engines.client_logger import visit
from lit_pfl.engines.frozen import FrozenWeights
from lit_pfl.engines.greenlets import LocalHub
from lit_pfl.engines.last_good import LastGoodState
from lit_pfl.engines.validation import check_monitored
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.learners.scoring import Score, Split, predictions, score
from lit_pfl.lightning_internals import MemoryCheckpointIO, lent_trainer, make_lean, show_scores
from lit_pfl.randomness import random_state_kept, scoring_draws
from lit_pfl_callbacks import FederatedLoop
from lit_pfl_callbacks.tensors import copied

#: what a client's own Trainer needs of a checkpoint to go on
TRAINER_STATE = ("state_dict", "loops", "optimizer_states", "lr_schedulers", "callbacks")
MakeTrainer = Callable[[Client, FederatedLoop, MemoryCheckpointIO], L.Trainer]


class LocalEngine:
    """Runs a federation's clients: every one's own Trainer sleeps in a :class:`~lit_pfl.links.LocalHub`.

    A client's Trainer is made when it first takes part. A client that is resumed joins again, and is told where the
    federation stands.

    Args:
        clients: the clients by id.
        seed: the seed from which the clients' random streams are drawn.
        local_epochs: epochs that a client trains in a round.
        make_trainer: makes a client's Trainer around the callback that joins it and the place for its checkpoints.

    Attributes:
        clients: the clients by id.
        left: ids of clients whose training has been ended by a callback of theirs (``EarlyStopping``).
        losses: sum of the training loss over samples, and number of samples, of every client since it was last emptied.
    """

    def __init__(self, clients: dict[int, Client], seed: int, local_epochs: int, make_trainer: MakeTrainer) -> None:
        self.clients = clients
        self.hub = LocalHub(seed)
        self.local_epochs = local_epochs
        self.make_trainer = make_trainer
        self.losses: dict[int, tuple[float, int]] = {}
        self.left: set[int] = set()
        self._frozen: FrozenWeights | None = None
        self._for_visitors: L.Trainer | None = None  # a Trainer for those that have none yet, one after another
        self._restored: dict[int, dict[str, Any]] = {}  # states of clients' Trainers that are yet to be restarted

    # ------------------------------------------------------------------------------------------------------- training

    def train(self, replies: Mapping[int, Payload], completed: int) -> dict[int, Payload | UploadError]:
        """Let clients load their replies and train a round, one after another; return their uploads."""
        with random_state_kept():
            return {client: self._train(client, reply, completed) for client, reply in replies.items()}

    def _train(self, client: int, reply: Payload, completed: int) -> Payload | UploadError:
        before = self._prepare(client, reply, completed)
        return self._conclude(client, before, self.hub.resume(client, reply), completed)

    def _prepare(self, client: int, reply: Payload, completed: int) -> LastGoodState:
        """Start a client's fit, if it has not been; return how the client is before it loads a reply."""
        module = self.clients[client]
        if client not in self.hub:
            self._for_visitors = None  # it may say that it checks sanity
            self._add_fit(client)
            self.hub.start(client)
            check_monitored(module)
        module.completed_rounds = completed
        if self._frozen is None:
            self._frozen = FrozenWeights(self.clients, client)
        return LastGoodState(module, module.trainer.optimizers, module.overwritten(reply), module.constant())

    def _conclude(
        self, client: int, before: LastGoodState, sent: Mapping[str, Tensor] | None, completed: int
    ) -> Payload | UploadError:
        """Return what a client has uploaded, or what is wrong with it."""
        module = self.clients[client]
        if sent is None:
            raise ConfigError(
                f"Client {client}: its fit ended before round {completed + 1} did. Nothing may end it, neither the "
                "method nor a callback of federation.client_trainer."
            )
        if module.trainer.should_stop:
            self.left.add(client)
        assert self._frozen is not None
        self._frozen.look_at(client)
        loss, n = module.release_round_state()
        upload = as_payload(sent)
        if trouble := before.trouble(client, upload):
            before.restore()
            return trouble
        self.losses[client] = loss, n
        return upload

    def _add_fit(self, client: int) -> None:
        module = self.clients[client]
        assert module.data is not None
        memory = MemoryCheckpointIO()
        trainer, loop = self._trainer(module, memory)
        self._make_lean(trainer, module, loop)
        restored = self._restored.pop(client, None)
        if restored is not None:
            memory.checkpoint = restored
        path = None if restored is None else MemoryCheckpointIO.MEMORY
        batches = LateLoader(module.training_data())
        self.hub.add(client, lambda: trainer.fit(module, batches, ckpt_path=path, weights_only=False))

    def _trainer(self, module: Client, memory: MemoryCheckpointIO) -> tuple[L.Trainer, FederatedLoop]:
        assert module.data is not None
        loop = FederatedLoop(self.hub.link, every_n_epochs=self.local_epochs, num_samples=module.data.num_samples)
        return self.make_trainer(module, loop, memory), loop

    def _make_lean(self, trainer: L.Trainer, module: Client, loop: L.Callback) -> None:
        assert module.data is not None
        make_lean(trainer, module, loop, data=module.data.module)

    def stop(self) -> None:
        """End all fits in good order; they can be taken up again."""
        self._restored |= {client: self._state(client) for client in self.clients if client in self.hub}
        self.hub.stop()

    def abort(self) -> None:
        """End all fits at once, as after an error."""
        self.hub.abort()

    def has_trained(self, client: int) -> bool:
        """Say whether a client has ever taken part."""
        return client in self.hub or client in self._restored

    # ------------------------------------------------------------------------------------------------------ evaluation

    def evaluate(self, client: int, model: str, split: Split, reply: Payload | None) -> Score:
        """Score one of a client's models on its own data.

        Args:
            client: the client's id.
            model: which of ``Client.evaluated``.
            split: which data.
            reply: what to load first; the client is put back afterwards.
        """
        module = self.clients[client]
        with self._shown(client, model, reply) as learner:
            scored = score(learner, getattr(module.data, split), split)
            show_scores(module.trainer, scored.logged)
            return replace(scored, sizes=module.sizes(model)) if scored.n else scored

    def predict(self, client: int, reply: Payload | None) -> list[Any]:
        """Return what a client's personalized model predicts on its test data, batch by batch; see :meth:`evaluate`."""
        module = self.clients[client]
        assert module.data is not None
        with self._shown(client, module.evaluated[0], reply) as learner:
            return predictions(learner, module.data.test)

    def standalone(self, client: int, reply: Payload | None) -> nn.Module:
        """Return a copy of a client's personalized model as a network by itself; see :meth:`evaluate`."""
        with scoring_draws(self.hub.seed, client), self._holding(client, reply) as module:
            return module.standalone()

    @contextmanager
    def _shown(self, client: int, model: str, reply: Payload | None) -> Iterator[L.LightningModule]:
        draws = scoring_draws(self.hub.seed, client)
        with draws, self._holding(client, reply) as module, module.as_evaluated(model) as learner:
            yield learner

    @contextmanager
    def _holding(self, client: int, reply: Payload | None) -> Iterator[Client]:
        """Let a client hold a reply, if there is one; put it back afterwards."""
        module = self.clients[client]
        with self._with_trainer(module):
            if reply is None:
                yield module
                return
            constant = module.constant()
            before = copied({name: value for name, value in module.state_dict().items() if name not in constant})
            module.download(reply)
            try:
                yield module
            finally:
                module.load_state_dict(before, strict=False)

    @contextmanager
    def _with_trainer(self, module: Client) -> Iterator[None]:
        """Lend a Trainer like its own to a client that has not trained: its learner may ask how things are."""
        if module._trainer is not None:
            yield
            return
        if self._for_visitors is None:
            with random_state_kept():
                self._for_visitors, _ = self._trainer(module, MemoryCheckpointIO())
            self._for_visitors.state.fn = TrainerFn.VALIDATING
        assert module.data is not None
        visit(self._for_visitors, module, module.data.module)
        with lent_trainer(module, self._for_visitors):
            yield

    # ----------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return clients with optimizers and schedulers, and their random streams."""
        left = {"left": dict.fromkeys(sorted(self.left))} if self.left else {}
        return {
            "clients": {client: self._state(client) for client in self.clients},
            "streams": {client: stream.state_dict() for client, stream in self.hub.streams.items()},
            **left,
        }

    def _state(self, client: int) -> dict[str, Any]:
        module = self.clients[client]
        if client in self.hub:
            module.trainer.save_checkpoint(MemoryCheckpointIO.MEMORY, weights_only=False)
            memory = module.trainer.strategy.checkpoint_io
            assert isinstance(memory, MemoryCheckpointIO)
            return memory.checkpoint
        return self._restored.get(client, {"state_dict": module.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`.

        Raises:
            ConfigError: when it is of another network.
        """
        # of what these clients did before nothing is left, nor of those that have not trained yet in that state
        self._restored.clear()
        self.hub.streams.clear()
        self.left = set(state.get("left", ()))
        for client, module in self.clients.items():
            own = state["clients"][client]
            if len(own) > 1:  # it has trained
                # at once, as it may be scored before it trains again; first, since shapes and names depend on it
                module.on_load_checkpoint(own)
                self._restored[client] = {name: own[name] for name in (*TRAINER_STATE, *own)}
                self.hub.stream(client).load_state_dict(state["streams"][client])
            saved, now = own["state_dict"], module.state_dict()
            names = saved.keys() | now.keys() if module.strict_loading else saved.keys() & now.keys()
            before, after = ({name: own[name] for name in own if name in names} for own in (saved, now))
            refuse_another_network(client, before, after, module.resizes)
        for client, module in self.clients.items():
            module.load_state_dict(state["clients"][client]["state_dict"], strict=module.strict_loading)


def refuse_another_network(
    client: int, saved: Mapping[str, Any], own: Mapping[str, Any], resizes: bool = False
) -> None:
    """Compare the state of a client in a checkpoint and in a run.

    Args:
        client: its id.
        saved: the checkpoint's.
        own: the run's.
        resizes: whether training changes their shapes, so that only numbers of dimensions must agree.

    Raises:
        ConfigError: at the first that has another shape, or is in one of them only.
    """

    def shape(value: object) -> object:
        if not isinstance(value, Tensor):
            return "no tensor"
        return f"of {value.dim()} dimensions" if resizes else tuple(value.shape)

    for name in {**own, **saved}:
        before, now = (shape(tensors[name]) if name in tensors else "not there" for tensors in (saved, own))
        if before != now:
            raise ConfigError(
                f"model: the checkpoint is of another network: client {client}'s tensor {name!r} is {before}, where "
                f"this model's is {now}."
            )
