"""Many Trainers in one process: every client's ``fit`` lives in a greenlet and sleeps inside its ``FederatedLoop``."""

import logging
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from lit_pfl.coordinator import Coordinator
from lit_pfl.payload import Payload
from lit_pfl.server import ClientInfo, Server
from lit_pfl_callbacks.federated_loop import JoinInfo


class LocalLink:
    """The client's end: puts the client's fit to sleep until the hub wakes it with a reply."""

    def join(self, info: JoinInfo) -> Mapping[str, Tensor]:
        """Sleep until the federation starts."""
        return self._hub().switch(info)

    def exchange(self, upload: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Sleep until the next reply. What is uploaded is handed over by reference, not copied."""
        return self._hub().switch(upload)

    @staticmethod
    def _hub() -> greenlet:
        hub = getcurrent().parent
        if hub is None:
            raise RuntimeError("A LocalLink works only inside a fit that was given to LocalHub.add().")
        return hub


class RandomStream:
    """The random state of one client: Python's, NumPy's and PyTorch's generators.

    Args:
        seed: the federation's seed.
        client: the client's id. Streams of different clients are independent.
    """

    def __init__(self, seed: int, client: int) -> None:
        words = np.random.SeedSequence([seed, client]).generate_state(4, np.uint32).tolist()
        self._state = _RandomState(
            torch.Generator().manual_seed(words[0] << 32 | words[1]).get_state(),
            words[0] << 32 | words[1],
            np.random.MT19937(words[2]),
            random.Random(words[3]).getstate(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""
        numpy_state: Any = self._state.numpy.state
        key = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
        position = int(numpy_state["state"]["pos"])
        return {**self._state._asdict(), "numpy": [numpy_state["bit_generator"], key, position]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`."""
        name, key, position = state["numpy"]
        generator = np.random.MT19937()
        generator.state = {"bit_generator": name, "state": {"key": key.numpy().astype(np.uint32), "pos": position}}
        self._state = _RandomState(**{**state, "numpy": generator})

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the process's random state; put the former one back afterwards."""
        outside = _get_random_state()
        _set_random_state(self._state)
        try:
            yield
        finally:
            after = _get_random_state()
            self._state = after if after.cuda is not None else after._replace(cuda=self._state.cuda)
            _set_random_state(outside)


class _RandomState(NamedTuple):
    torch: Tensor
    cuda: Tensor | int | None  # a number is a seed, for a device that is not in use yet
    numpy: np.random.BitGenerator  # swapped whole: reading and writing its state takes a hundred times longer
    python: Any


def _get_random_state() -> _RandomState:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in its stubs
    return _RandomState(torch.get_rng_state(), cuda, numpy, random.getstate())


def _set_random_state(state: _RandomState) -> None:
    torch.set_rng_state(state.torch)
    np.random.set_bit_generator(state.numpy)  # type: ignore[attr-defined]
    random.setstate(state.python)
    if isinstance(state.cuda, Tensor):
        torch.cuda.set_rng_state(state.cuda)
    elif state.cuda is not None and torch.cuda.is_initialized():
        torch.cuda.manual_seed(state.cuda)


class LocalHub:
    """The server's end of :class:`LocalLink`: wakes one client's fit at a time.

    Each client has a random stream of its own, so it makes no difference in which order clients run, nor who else runs.

    Args:
        seed: the seed from which the clients' random streams are drawn.

    Example::

        hub = LocalHub()
        for client, (trainer, module, loader) in enumerate(my_runs):
            trainer.callbacks.append(FederatedLoop(hub.link))
            hub.add(client, lambda t=trainer, m=module, x=loader: t.fit(m, x))
        hub.run(Server())
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.link = LocalLink()
        self.streams: dict[int, RandomStream] = {}
        self._fits: dict[int, greenlet] = {}

    def stream(self, client: int) -> RandomStream:
        """Return a client's random stream."""
        if client not in self.streams:
            self.streams[client] = RandomStream(self.seed, client)
        return self.streams[client]

    def add(self, client: int, fit: Callable[[], object]) -> None:
        """Add a client.

        Args:
            client: its id.
            fit: calls ``Trainer.fit`` with a ``FederatedLoop(hub.link)`` among the callbacks. Live progress bars
                of several Trainers do not share a screen: ``Trainer(enable_progress_bar=False)``.
        """
        self._fits[client] = greenlet(fit)

    def __contains__(self, client: int) -> bool:
        return client in self._fits

    def start(self, client: int) -> JoinInfo:
        """Let a client's fit run until it joins."""
        drawn = self.stream(client).state_dict()
        try:
            with undisturbed():
                return self._switch(client)
        finally:
            # so that a fit that starts again has drawn no more than one that slept
            self.stream(client).load_state_dict(drawn)

    def resume(self, client: int, reply: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
        """Give a client a reply; let it run until its next upload, or until its fit ends, which returns ``None``."""
        return self._switch(client, reply)

    def stop(self) -> None:
        """End all fits in good order."""
        with undisturbed():
            for client in sorted(self._fits):
                self.resume(client, None)
        self._fits.clear()

    def abort(self) -> None:
        """End all fits at once, as after an error."""
        with undisturbed():
            for fit in self._fits.values():
                fit.throw(GreenletExit)
        self._fits.clear()

    def run(self, server: Server, quorum: float = 0.5) -> Coordinator:
        """Run a whole federation, round by round, until every fit has ended by itself.

        Args:
            server: the method's server; a plain ``Server()`` averages.
            quorum: the share of a round's uploads that must be usable.

        Returns:
            The coordinator of the finished federation, with its server and its byte counts.

        Raises:
            UploadError: when fewer uploads of a round are usable than the quorum asks for.
        """
        coordinator = Coordinator(server, quorum)
        try:
            infos = {client: self.start(client) for client in sorted(self._fits)}
            coordinator.start({c: ClientInfo(info.num_samples, Payload(info.tensors)) for c, info in infos.items()})
            while self._fits:
                coordinator.begin_round()
                uploads = {client: self.resume(client, coordinator.reply(client)) for client in sorted(self._fits)}
                self._fits = {client: fit for client, fit in self._fits.items() if not fit.dead}
                arrived = {client: upload for client, upload in uploads.items() if upload is not None}
                if arrived:
                    coordinator.collect(arrived)
        finally:
            self.abort()
        return coordinator

    def _switch(self, client: int, *message: object) -> Any:
        with self.stream(client).active():
            try:
                return self._fits[client].switch(*message)
            except Exception as error:
                error.add_note(f"(in the fit of client {client})")
                raise


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let fits start or end without traces in the process.

    Every fit installs a SIGTERM handler that calls the one it found, and puts that back when it ends: a thousand fits
    inside one another's would call each other, and leave a dead one's behind. And every Trainer tells of its device,
    which the federation's own Trainer has done once.
    """
    handler, logger = signal.getsignal(signal.SIGTERM), logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
