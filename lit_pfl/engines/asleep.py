"""Clients that sleep on disk: at most this many of an engine's clients are in memory."""

import copy
import gc
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import lightning as L
import torch
from torch import Tensor

from lit_pfl.core import Client, ClientSpec
from lit_pfl.core.encoding import bits
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo
from lit_pfl.data import ClientData
from lit_pfl.data.batches import tensors_in
from lit_pfl.engines.frozen import constant
from lit_pfl.engines.visitors import as_at_first
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import ASLEEP, FOLDER, Content, SavedStates, StateFiles
from lit_pfl_callbacks.frozen import FROZEN, read_table
from lit_pfl_callbacks.run_folder import run_folder

if TYPE_CHECKING:
    from lit_pfl.engines.local import Local

T = TypeVar("T")
#: how much of those that sleep may stay in memory until the garbage is searched for it, in bytes: Trainers and modules
#: refer to themselves, and of small ones Python's own search is enough
GARBAGE = 2**28


class Carried:
    """States that come with a worker's work, and go back with what came of it: another process has the files.

    Attributes:
        sent: by client id the state of a client that is to work next; None for one that is as it was made.
        changed: by client id the state that came of it.
    """

    def __init__(self) -> None:
        self.sent: Mapping[int, Content | None] = {}
        self.changed: dict[int, Content] = {}

    def read(self, client: int) -> Content | None:
        """Return a client's state.

        Raises:
            KeyError: when it has not been sent: a client must not begin again that has trained before.
        """
        return self.sent[client]

    def put(self, client: int, state: Content, trained: bool) -> None:
        """Take note of the state of a client that has trained."""
        self.changed[client] = state


#: where states of clients are that are not in memory
States = StateFiles | Carried


class Asleep:
    """Lets the clients of an engine sleep on disk, those first that have not been needed for longest.

    A client is made when it is first needed, and made again from its file when it is needed next. What it comes to is
    what a checkpoint's resume would come to: the same bits.

    Args:
        engine: whose clients they are.
        awake: how many are in memory at most.
        states: where the states of the others are.
    """

    def __init__(self, engine: "Local", awake: int, states: States) -> None:
        self.engine, self.awake, self.states = engine, awake, states
        self._changed: set[int] = set()  # of those awake, who has trained since its state was written
        self._initial: dict[int, Payload] = {}  # what is said to be sent by clients on joining that were not asked
        self._garbage = 0

    # ------------------------------------------------------------------------------------------------ who is in memory

    def wake(self, client: int, trains: bool = False) -> None:
        """Have a client in memory; ``trains``: its state is about to change."""
        clients = self.engine.clients
        if client in clients:
            clients[client] = clients.pop(client)  # the last one needed is last
        else:
            with as_at_first(self.engine.work.trainer):
                while len(clients) >= self.awake:
                    self._put_to_sleep(next(iter(clients)))
                self._make(client)
        if trains:
            self._changed.add(client)

    def _make(self, client: int) -> None:
        engine = self.engine
        engine.make([client])
        sent = engine.work.joined(engine.clients[client]).initial  # which may give its tensors their shapes
        if (stored := self.states.read(client)) is not None:
            state = stored.state()
            engine.take_up({ASLEEP: True, **{part: {client: own} for part, own in state.items()}}, [client])
            if changed := _changed(engine.clients[client], state["clients"]["state_dict"]):
                engine.frozen_weights.note(changed, engine.clients[client])
        elif not _begins_as(sent, self._initial.get(client, sent)):
            raise ConfigError(
                f"federation.engine.awake: client {client} begins with other tensors than clients like it, so all "
                "have to be made at the start; leave federation.engine.awake out."
            )

    def _put_to_sleep(self, client: int) -> None:
        if client in self._changed:
            self._write(client)
        self._garbage += sum(weight.nbytes for weight in self.engine.clients[client].parameters())
        self._forget(client)
        if self._garbage > GARBAGE:
            gc.collect()
            self._garbage = 0

    def _forget(self, client: int) -> None:
        self.engine.hub.drop(client)
        self.engine.release(client)
        self._changed.discard(client)

    def _write(self, client: int) -> None:
        state = self.engine.states([client])
        own, stream = state["clients"][client], state["streams"].get(client)
        replaced = frozenset[str]() if self.engine.work.keep_trained else self.engine.replaced.names(client)
        if replaced:
            own = {**own, "lacking": sorted(replaced)}
        self._put(client, own, stream, constant(self.engine.clients[client]) | replaced)
        self._changed.discard(client)

    def _put(self, client: int, own: Mapping[str, Any], stream: Any, fixed: Collection[str]) -> None:
        """Write a state without what stays as it is in a client's module."""
        left_out = [name for name in own["state_dict"] if name in fixed]
        rest = {name: value for name, value in own["state_dict"].items() if name not in fixed}
        state = {"clients": {**own, "state_dict": rest}, "streams": stream, "constant": left_out}
        self.states.put(client, Content.of(state), len(own) > 1)

    # --------------------------------------------------------------------------------------------------------- joining

    def joined(self, clients: Iterable[int]) -> dict[int, ClientInfo]:
        """Return what clients send on joining; of those that are alike one is asked."""
        work = self.engine.work
        kinds: dict[Any, Payload | None] = {}
        first: Payload | None = None
        infos: dict[int, ClientInfo] = {}
        for client in clients:
            data = work.data.client(client)
            kind = _kind(data)
            if kind not in kinds:
                kinds[kind] = self._common(client, data)
            if (initial := kinds[kind]) is not None:
                self._initial[client] = initial
            else:
                initial = work.joined(work.fresh(client, data)).initial
                first = initial if first is None or not _same(initial, first) else first
                initial = first if _same(initial, first) else initial
            infos[client] = ClientInfo(data.num_samples, initial)
        return infos

    def _common(self, client: int, data: ClientData) -> Payload | None:
        """Return what a client sends on joining, if neither its id nor its data have to do with that."""
        work = self.engine.work
        asked: list[str] = []
        spec = _watched(ClientSpec.of(client, data, work.local_epochs), {"client_id"}, asked.append)
        module = work.fresh(client, data, spec)
        module.data = _watched(data, {"train", "val", "test", "example"}, asked.append)
        sent = work.joining(module).clone()
        return None if asked or work.visitors.sets else sent

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def write(self) -> None:
        """Write the states of those who have changed."""
        with as_at_first(self.engine.work.trainer):
            for client in sorted(self._changed):
                self._write(client)

    def load(self, state: Mapping[str, Any], files: StateFiles) -> None:
        """Take over a state of any engine; nobody is awake then.

        Raises:
            ConfigError: when it is of another network.
        """
        for client in list(self.engine.clients):
            self._forget(client)
        self._initial = {}  # the checkpoint may be of another seed
        with as_at_first(self.engine.work.trainer):
            if isinstance(state["clients"], SavedStates):
                self._try(state)
                files.take_over(state["clients"].files)
            else:
                self._write_all(state, files)

    def _try(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
        """See that the first client can take up a state; return what it had before, and what of that is constant."""
        first = next(iter(state["clients"]), None)
        if first is None:
            return {}, frozenset()
        self.engine.make([first])
        module = self.engine.clients[first]
        self.engine.work.joined(module)
        begun, fixed = {name: copy.deepcopy(x) for name, x in module.state_dict().items()}, constant(module)
        self.engine.take_up(state, [first])
        self._forget(first)
        return begun, fixed

    def _write_all(self, state: Mapping[str, Any], files: StateFiles) -> None:
        begun, fixed = self._try(state)
        files.forget()
        for client in self.engine.work.data.clients:
            own = state["clients"][client]
            there = own["state_dict"]
            same = {name for name in fixed & there.keys() if _equal(there[name], begun[name])}
            if len(own) > 1 or not _same(there, begun):
                self._put(client, own, state["streams"].get(client), same.union(own.get("lacking", ())))


def _changed(client: Client, stored: Collection[str]) -> list[str]:
    """Return the names of those frozen weights that lie in a client's file: its module has been seen to change them."""
    return [name for name in client.frozen if any(f"{part}.{name}" in stored for part in client.learners)]


def files_of(trainer: L.Trainer) -> StateFiles:
    """Return files in a folder next to a Trainer's checkpoints; if it writes none, near what the run writes else.

    Raises:
        ConfigError: when that folder cannot be written into.
    """
    if trainer.state.fn == "fit":
        for callback in trainer.checkpoint_callbacks:
            if (path := getattr(callback, "dirpath", None)) is not None:
                return StateFiles(Path(path) / FOLDER)
    return StateFiles(None, run_folder(trainer) if trainer.loggers and trainer.state.fn == "fit" else None)


def _kind(data: ClientData) -> Any:
    """Return what clients must have in common to begin with the same tensors, as far as the data are concerned."""
    layout = [(tensor.shape[1:], tensor.dtype) for tensor in tensors_in(data.example)]
    return data.num_classes, data.labels_agree, type(data.example), tuple(layout)


def _watched(thing: T, names: set[str], note: Callable[[str], None]) -> T:
    """Return a copy of an object that notes when one of some attributes is asked for."""
    kind: Any = type(thing)

    def asked(self: Any, name: str) -> Any:
        if name in names:
            note(name)
        return kind.__getattribute__(self, name)

    other = copy.copy(thing)
    object.__setattr__(other, "__class__", type(kind.__name__, (kind,), {"__getattribute__": asked}))
    return other


def _begins_as(sent: Payload, initial: Payload) -> bool:
    """Say whether a client sends on joining what those like it do.

    Weights that a module has been seen to change since are no longer among a client's frozen ones.
    """
    frozen, expected = (read_table(one[FROZEN]) if FROZEN in one else {} for one in (sent, initial))
    return frozen.items() <= expected.items() and _same(sent.without(FROZEN), initial.without(FROZEN))


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Say whether two mappings hold the same tensors, and the same else."""
    return a is b or (a.keys() == b.keys() and all(_equal(value, b[name]) for name, value in a.items()))


def _equal(a: Any, b: Any) -> bool:
    """Say whether two values are the same, bit for bit: a loss that nobody has computed yet may be NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
            return False
        a, b = (x if x.layout is torch.strided else x.to_dense() for x in (a, b.to(a.device)))
        return torch.equal(bits(a), bits(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return _same(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and pickle.dumps(a) == pickle.dumps(b)
