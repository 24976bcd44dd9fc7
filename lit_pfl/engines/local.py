"""All clients in this process, one awake at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import lightning as L
import torch
from jsonargparse.typing import PositiveInt
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload, as_payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.engines.asleep import Asleep, States, files_of
from lit_pfl.engines.engine import NO_LIMITS, Engine, Trained
from lit_pfl.engines.frozen import FrozenWeights, constant, keep_apart, share_frozen
from lit_pfl.engines.greenlets import LocalHub
from lit_pfl.engines.last_good import LastGoodState, overwritten
from lit_pfl.engines.states import Replaced, Unfreezing, refuse_another_network
from lit_pfl.engines.trainers import AlreadyJoined
from lit_pfl.engines.validation import check_monitored, warn_of_unused
from lit_pfl.engines.work import Work
from lit_pfl.errors import ConfigError, check_options_of
from lit_pfl.learners.unchanged import put_back, unchanged
from lit_pfl.lightning_internals import (
    ASLEEP,
    Elsewhere,
    LateLoader,
    MemoryCheckpointIO,
    limit_batches,
    make_lean,
    undisturbed,
)
from lit_pfl.randomness import random_state_kept, scoring_draws
from lit_pfl_callbacks.federated_loop import next_epoch
from lit_pfl_callbacks.tensors import copied

#: what a client's own Trainer needs of a checkpoint to go on
TRAINER_STATE = ("state_dict", "loops", "optimizer_states", "lr_schedulers", "callbacks")
#: what a Trainer writes of a data module's options, which nobody reads again; they may be objects of any class
OPTIONS_OF_DATA = frozenset(
    getattr(L.LightningDataModule, f"CHECKPOINT_HYPER_PARAMS_{part}") for part in ("KEY", "NAME", "TYPE")
)
T = TypeVar("T")


class Local(Engine):
    """Trains a federation's clients one after another in this process.

    Every client's own Trainer sleeps in a :class:`~lit_pfl.links.LocalHub`. It is made when the client first takes
    part. A client that is resumed joins again, and learns where the federation stands.

    Args:
        awake: how many clients are in memory at most; the others' states lie in files of the run folder, or of a
            temporary folder where no checkpoints are written. Default: all are in memory.

    Raises:
        ConfigError: when ``awake`` is not a number of clients.

    Example::

        Federation(FedAvg(), engine=Local())  # what a federation has by default
        Federation(FedAvg(), engine=Local(awake=200), participation=10)  # for many thousand clients
    """

    work: Work

    def __init__(self, awake: PositiveInt | None = None) -> None:
        super().__init__()
        self.awake = awake
        check_options_of(self, "federation.engine")
        self.awake = None if awake is None else int(awake)
        self.asleep: Asleep | None = None
        self.hub = LocalHub()
        self.frozen_weights = FrozenWeights(self.clients, asleep=awake is not None)
        self.replaced, self.unfreezing = Replaced(), Unfreezing()
        self._restored: dict[int, dict[str, Any]] = {}  # states of clients' Trainers that are yet to be restarted
        self._aborted = False  # until a state is loaded, nobody trains on
        self._said: set[str] = set()  # of optimizers that clients continue with

    def setup(self, work: Work, own: Sequence[int] | None = None, states: States | None = None) -> None:
        """Make the clients the first time; move them to the Trainer's device.

        Args:
            work: see :class:`~lit_pfl.engines.Engine`.
            own: ids of the clients to make; by default all.
            states: where the states of clients are that are not in memory; by default files.

        Raises:
            ConfigError: when these files cannot be written.
        """
        self.work = work
        if self.awake is not None:
            if self.asleep is None:
                if states is None:
                    states = self.files = files_of(work.trainer)
                self.hub.seed, self.asleep = work.seed, Asleep(self, self.awake, states)
        elif not self.clients:
            self.hub.seed = work.seed
            self.make(work.data.clients if own is None else own)
        self._place()

    def make(self, clients: Iterable[int]) -> None:
        """Make further clients."""
        made = dict(self.clients)
        for client in clients:
            module = made[client] = self.work.fresh(client, self.work.data.client(client))
            self.unfreezing.made(client, module)
            self.frozen_weights.leave_out(module)
            share_frozen(module, next(iter(made.values())))  # at once, so that memory never holds all of them
        self.clients.update(made)

    def drop(self, client: int) -> None:
        """Let a client go, which lives elsewhere from now on, and may be asleep."""
        self.left.discard(client)
        if client in self.clients:
            self.hub.drop(client)
            self.release(client)

    def release(self, client: int) -> None:
        """Keep nothing of a client in memory that is not training."""
        del self.clients[client]
        self._restored.pop(client, None)
        self.replaced.forget(client)
        self.unfreezing.forget(client)

    def _place(self) -> None:
        if not self.clients:
            return
        first = next(iter(self.clients.values()))
        for module in self.clients.values():
            module.place_on(self.work.trainer.strategy.root_device)
            share_frozen(module, first)
        self.work.visitors.share_frozen(first)

    def joined(self, own: Sequence[int] | None = None) -> dict[int, ClientInfo]:
        """Return what clients send on joining, by id.

        Args:
            own: ids of the clients that live here; by default all.
        """
        if self.asleep is not None:
            return self.asleep.joined(self.work.data.clients if own is None else own)
        return {client: self.work.joined(module) for client, module in self.clients.items()}

    # ------------------------------------------------------------------------------------------------------- training

    def train(
        self, replies: Mapping[int, Payload], completed: int, batches: Mapping[int, int] = NO_LIMITS
    ) -> dict[int, Trained]:
        with random_state_kept():
            return {
                client: self._train(client, reply, completed, batches.get(client)) for client, reply in replies.items()
            }

    def _train(self, client: int, reply: Payload, completed: int, batches: int | None) -> Trained:
        before = self._prepare(client, reply, completed, batches)
        return self._conclude(client, before, self.hub.resume(client, reply), completed)

    def _prepare(self, client: int, reply: Payload, completed: int, batches: int | None) -> LastGoodState:
        """Start a client's fit, if it has not been; return how the client is before it loads a reply."""
        if self._aborted:
            raise ConfigError(
                "The last fit was ended by an error or by hand, and what its clients had trained since the last "
                "checkpoint is lost; continue from it by ckpt_path, or make another Federation."
            )
        if self.asleep is not None:
            self.asleep.wake(client, trains=True)
        module = self.clients[client]
        if client not in self.hub:
            with undisturbed():
                self._start(client)
            check_monitored(module)
            warn_of_unused(module)
        module.completed_rounds = completed
        limit_batches(module.trainer, batches)
        self.frozen_weights.begin(client)
        replaced = overwritten(module, reply)
        self.replaced.loads(client, replaced, trains=True)
        return LastGoodState(module, module.trainer.optimizers, replaced, constant(module))

    def _conclude(
        self, client: int, before: LastGoodState, sent: Mapping[str, Tensor] | None, completed: int
    ) -> Trained:
        """Return what a client has uploaded, or what is wrong with it."""
        module = self.clients[client]
        if sent is None:
            raise ConfigError(
                f"Client {client}: its fit ended before round {completed + 1} did. Nothing may end it, neither the "
                "method nor a callback of federation.client_trainer."
            )
        if module.trainer.should_stop:
            self.left.add(client)
        self.frozen_weights.look_at(client)
        loss, n = module.release_round_state()
        upload = as_payload(sent)
        if trouble := before.trouble(client, upload):
            before.restore()
            return Trained(trouble)
        return Trained(upload, loss, n)

    def _start(self, client: int) -> None:
        """Start a client's fit, which waits for a reply then."""
        module = self.clients[client]
        assert module.data is not None
        memory, loop = MemoryCheckpointIO(), AlreadyJoined(self.hub.link, self.work.local_epochs, self._said)
        trainer = self.work.client_trainer(module, loop, memory)
        make_lean(trainer, module, loop, self._elsewhere(module), module.data.module)
        restored = self._restored.pop(client, None)
        if restored is None:
            module.data.begin()
        else:
            memory.checkpoint = restored
        path = None if restored is None else MemoryCheckpointIO.MEMORY
        batches = LateLoader(module.training_data())
        self.hub.stream(client).own = module.data.generators
        self.hub.add(client, lambda: trainer.fit(module, batches, ckpt_path=path, weights_only=False))
        self.hub.start(client)
        if restored is not None:
            self.unfreezing.restore(client, module, restored)

    def _elsewhere(self, module: Client) -> Elsewhere | None:
        """Return who trains a client's batches instead of its Trainer, if somebody does."""
        return None

    def stop(self) -> None:
        self._restored |= {client: self._state(client) for client in self.clients if client in self.hub}
        self.hub.stop()
        self._place()  # a Trainer that ends takes its module to the CPU

    def abort(self) -> None:
        self._aborted |= any(client in self.hub for client in self.clients)
        self.hub.abort()

    # --------------------------------------------------------------------------------------------------------- asking

    def ask(self, question: Callable[[Client], T], replies: Mapping[int, Payload | None]) -> dict[int, T]:
        return {client: self._ask(question, client, reply) for client, reply in replies.items()}

    def _ask(self, question: Callable[[Client], T], client: int, reply: Payload | None) -> T:
        if self.asleep is not None:
            self.asleep.wake(client)
        data = self.clients[client].data
        draws = scoring_draws(self.hub.seed, client, None if data is None else data.scored_with)
        with draws, self._holding(client, reply) as module:
            answer = question(module)
            # what of it is the client's own memory is about to be put back
            return answer if reply is None else _copied(answer)

    @contextmanager
    def _holding(self, client: int, reply: Payload | None) -> Iterator[Client]:
        """Let a client hold a reply, if there is one; put it back afterwards."""
        module = self.clients[client]
        with self.work.visitors.lent(module, self._restored.get(client, {})):
            replaced = {} if reply is None else overwritten(module, reply)
            self.replaced.loads(client, replaced)
            if reply is None:
                yield module
                return
            has_trained = client in self.hub or client in self._restored
            # a download of a method's own may change anything; to put all of it back takes as long as all else here
            with put_back(module, replaced) if replaced else _all_put_back(module):
                with next_epoch(module.trainer) if has_trained else nullcontext():
                    module.download(reply)
                yield module

    # ----------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        left = {"left": dict.fromkeys(sorted(self.left))} if self.left else {}
        if self.asleep is None or self.files is None:
            return {**self.states(self.clients), **left}
        self.asleep.write()
        return {ASLEEP: self.files.references(), **left}

    def states(self, clients: Iterable[int]) -> dict[str, Any]:
        """Return the same of some clients."""
        streams = self.hub.streams
        clients = list(clients)
        return {
            "clients": {client: self._state(client) for client in clients},
            "streams": {client: streams[client].state_dict() for client in clients if client in streams},
        }

    def _state(self, client: int) -> dict[str, Any]:
        module = self.clients[client]
        if client in self.hub:
            module.trainer.save_checkpoint(MemoryCheckpointIO.MEMORY, weights_only=False)
            memory = module.trainer.strategy.checkpoint_io
            assert isinstance(memory, MemoryCheckpointIO)
            state = {name: value for name, value in memory.checkpoint.items() if name not in OPTIONS_OF_DATA}
            return state | self.unfreezing.changes(client, module)
        return self._restored.get(client, {"state_dict": module.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._aborted = False
        self.hub.seed = self.work.seed = state.get("seed", self.work.seed)
        # of what these clients did before nothing is left, nor of those that have not trained yet in that state
        self._restored.clear()
        self.hub.streams.clear()
        self.left = set(state.get("left", ()))
        if self.asleep is None or self.files is None:
            self.take_up(state, self.clients)
        else:
            self.asleep.load(state, self.files)

    def take_up(self, state: Mapping[str, Any], clients: Iterable[int]) -> None:
        """Put some clients into their states, as :meth:`states` returns them; whoever is training is not asked."""
        some = {client: self.clients[client] for client in clients}
        for client, module in some.items():
            self.hub.drop(client)
            own = self._own(state, client)
            if (visitors := self.work.visitors).sets is not False:
                with visitors.lent(module, own):
                    visitors.set_up(module)
            if len(own) > 1:  # it has trained
                # at once, as it may be scored before it trains again; first, since shapes and names depend on it
                module.on_load_checkpoint({**own})  # which the fit asks for once more
                module.thaw(own.get("thawed", ()))
                self.replaced.lacks(client, own.get("lacking", ()))
                self._restored[client] = {name: own[name] for name in (*TRAINER_STATE, *own)}
                self.hub.stream(client).load_state_dict(state["streams"][client])
            saved, now = own["state_dict"], module.state_dict()
            names = saved.keys() | now.keys() if module.strict_loading else saved.keys() & now.keys()
            before, after = ({name: own[name] for name in own if name in names} for own in (saved, now))
            refuse_another_network(client, before, after, module.resizes)
        for client, module in some.items():
            saved = self._own(state, client)["state_dict"]
            keep_apart(module, saved)
            module.load_state_dict(saved, strict=module.strict_loading)

    def _own(self, state: Mapping[str, Any], client: int) -> dict[str, Any]:
        """Return a client's own state, of which files leave out what the client has anyhow, see :class:`Asleep`."""
        if ASLEEP not in state:
            return state["clients"][client]
        if client not in state["clients"]:
            module = self.work.fresh(client, self.work.data.client(client))
            self.work.joined(module)
            return {"state_dict": module.state_dict()}
        own, now = state["clients"][client], self.clients[client].state_dict()
        left_out = {name: now[name] for name in state["constant"][client] if name in now}
        return {**own, "state_dict": {**left_out, **own["state_dict"]}}


@contextmanager
def _all_put_back(module: Client) -> Iterator[None]:
    """Put a client back: its tensors, but for frozen ones, and its own attributes."""
    fixed = constant(module)
    before = copied({name: value for name, value in module.state_dict().items() if name not in fixed})
    try:
        with unchanged(module, parts=False):
            yield
    finally:
        module.load_state_dict(before, strict=False)


@torch.no_grad()
def _copied(answer: T) -> T:
    return apply_to_collection(answer, Tensor, torch.clone, allow_frozen=True)
