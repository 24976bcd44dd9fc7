"""Many Trainers in one process: every client's ``fit`` lives in a greenlet and sleeps inside its ``FederatedLoop``."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from lit_pfl.core.checks import check_quorum
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.core.payload import Payload, as_payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import undisturbed
from lit_pfl.randomness import Draws, RandomStream, random_state_kept
from lit_pfl_callbacks.federated_loop import JoinInfo


class LocalLink:
    """The client's end: puts the client's fit to sleep until the hub wakes it with a reply.

    Attributes:
        round: rounds that the hub has completed in :meth:`LocalHub.run`; it goes into the checkpoints of every fit.
        resumed: the same, as the checkpoint has it from which a fit was resumed.
        needs_server: a seed, while the hub needs the server of the first module under a method.
        server: that server.
    """

    in_every_process = True  # where clients train by several processes, each of these has a hub with them all
    shares_process = True

    def __init__(self) -> None:
        self.round: int | None = None
        self.resumed: dict[greenlet, int] = {}
        self.needs_server: int | None = None
        self.server: Server | None = None

    def take_server(self, module: Any) -> None:
        """Let a module under a method make its server, if the hub needs one."""
        if self.needs_server is not None and self.server is None:
            self.server = server_of(module, self.needs_server)

    def join(self, info: JoinInfo) -> Mapping[str, Tensor]:
        """Sleep until the federation starts."""
        return self._hub().switch(info)

    def exchange(self, upload: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Sleep until the next reply. What is uploaded is handed over by reference, not copied."""
        return self._hub().switch(upload)

    def state_dict(self) -> dict[str, Any]:
        """Return what goes into a fit's checkpoint: the round after which it was saved."""
        return {} if self.round is None else {"round": self.round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take note of what the checkpoint says from which the fit is resumed."""
        self.resumed[getcurrent()] = state["round"]

    def lend(self, work: object) -> None:
        """Hand over something else in the middle of a round, and sleep until it is done."""
        self._hub().switch(work)

    @staticmethod
    def _hub() -> greenlet:
        hub = getcurrent().parent
        if hub is None:
            raise RuntimeError("A LocalLink works only inside a fit that was given to LocalHub.add().")
        return hub


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
        hub.run()
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.link = LocalLink()
        self.streams: dict[int, RandomStream] = {}
        self._fits: dict[int, greenlet] = {}
        self._looks_for_anomalies: tuple[bool, bool] | None = None  # whether PyTorch did before the first fit, and how

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
        """Let a client's fit run until it joins.

        Raises:
            ConfigError: when it ends without.
        """
        drawn = self.stream(client).state_dict()
        if self._looks_for_anomalies is None:
            self._looks_for_anomalies = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        try:
            with undisturbed(), random_state_kept():
                info = self._switch(client)
        finally:
            # so that a fit that starts again has drawn no more than one that slept
            self.stream(client).load_state_dict(drawn)
        if self._fits[client].dead:
            raise ConfigError(
                f"Client {client}: its fit ended before it had joined. Its training loader must give a batch (with "
                "drop_last=True it gives none where a client has fewer samples than a batch), its Trainer have an "
                "epoch left to train, and a FederatedLoop of this hub among its callbacks."
            )
        return info

    def resume(self, client: int, reply: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
        """Give a client a reply; let it run until its next upload, or until its fit ends, which returns ``None``.

        The process's random state is this client's afterwards.
        """
        answer = self._switch(client, reply)
        return None if self._fits[client].dead else answer  # what a fit returns in the end is no upload

    def stop(self) -> None:
        """End all fits in good order."""
        with undisturbed(), random_state_kept():
            for client in sorted(self._fits):
                self.resume(client, None)
        self._all_ended()

    def drop(self, client: int) -> None:
        """End a client's fit at once, and forget its random stream."""
        self.streams.pop(client, None)
        if (fit := self._fits.pop(client, None)) is not None:
            with undisturbed():
                fit.throw(GreenletExit)

    def abort(self) -> None:
        """End all fits at once, as after an error."""
        with undisturbed(), ExitStack() as ends:  # all of them, also where a callback fails on the way
            ends.callback(self._all_ended)
            for fit in reversed(self._fits.values()):
                ends.callback(fit.throw, GreenletExit)

    def _all_ended(self) -> None:
        self._fits.clear()
        if self._looks_for_anomalies is not None:  # fits do not end in the order in which each has put back the former
            torch.autograd.set_detect_anomaly(*self._looks_for_anomalies)
            self._looks_for_anomalies = None

    def run(
        self,
        server: Server | None = None,
        quorum: float = 0.5,
        state: Mapping[str, Any] | None = None,
        after_round: Callable[[Coordinator], object] | None = None,
    ) -> Coordinator:
        """Run a whole federation, round by round, until every fit has ended on its own.

        Args:
            server: by default that of the modules' method, or one that averages, for modules under none.
            quorum: the share of a round's uploads that must be usable.
            state: the ``state_dict()`` of a coordinator, to continue from: where every fit resumes from a checkpoint
                too.
            after_round: called after every round, for example to save the coordinator's ``state_dict()``.

        Returns:
            The coordinator of the finished federation, with its server and its byte counts.

        Raises:
            ConfigError: when a fit ends before it has joined, or resumes from another round than the last that it took
                part in, as ``state`` has it; when no server is given and modules are under different methods.
            UploadError: when fewer uploads of a round are usable than the quorum asks for.
        """
        check_quorum("quorum", quorum)
        try:
            self.link.needs_server = self.seed if server is None else None
            infos = {client: self.start(client) for client in sorted(self._fits)}
            if server is None:
                _check_one_method(infos)
            coordinator = _Coordinator(server or self.link.server or Server(), quorum)
            coordinator.start({c: ClientInfo(i.num_samples, as_payload(i.tensors)) for c, i in infos.items()})
            if state is not None:
                coordinator.load_state_dict(state)
                self._check_rounds(coordinator)
            while self._fits:
                self.link.round = coordinator.round
                coordinator.begin_round()
                coordinator.train(self, sorted(self._fits))
                if not self._fits:  # all had ended
                    break
                coordinator.end_round()
                if after_round is not None:
                    after_round(coordinator)
        finally:
            self.abort()
            self.link.round = self.link.needs_server = self.link.server = None
            self.link.resumed.clear()
        return coordinator

    def _check_rounds(self, coordinator: "_Coordinator") -> None:
        """See that clients continue from the last rounds that they took part in; who has never may begin at any
        time."""
        for client, fit in sorted(self._fits.items()):
            last = coordinator.last_rounds.get(client)
            own = self.link.resumed.get(fit, 0)
            if last is not None and own != last:
                found = f"its checkpoint is of round {own}" if own else "it begins without a checkpoint"
                apart = f"{abs(last - own)} round{'s' * (abs(last - own) > 1)} {'behind' if own < last else 'ahead'}"
                raise ConfigError(
                    f"Client {client}: {found}, but the server's state has it after round {last}: {apart}. Give "
                    "run(state=...) and every fit's ckpt_path of the same round."
                )

    def train(self, replies: Mapping[int, Payload], completed: int) -> dict[int, Mapping[str, Tensor]]:
        """Let fits load their replies and train a round; those that end by themselves leave the hub."""
        with random_state_kept():
            uploads = {client: self.resume(client, reply) for client, reply in replies.items()}
        self._fits = {client: fit for client, fit in self._fits.items() if not fit.dead}
        return {client: upload for client, upload in uploads.items() if upload is not None}

    def _switch(self, client: int, *message: object) -> Any:
        with self.stream(client).active():
            try:
                return self._fits[client].switch(*message)
            except Exception as error:
                error.add_note(f"(in the fit of client {client})")
                raise


def how_trained(info: JoinInfo) -> str:
    """Say by which method a client trains, for a message."""
    return f"by {info.method}" if info.method else "without a method"


def _check_one_method(infos: Mapping[int, JoinInfo]) -> None:
    first = next(iter(infos))
    for client, info in infos.items():
        if info.method != infos[first].method:
            raise ConfigError(
                f"Client {client} trains {how_trained(info)}, but client {first} {how_trained(infos[first])}. Use the "
                "same method at every site, or give LocalHub.run(server) one that suits them all."
            )


def server_of(module: Any, seed: int) -> Server:
    """Return the server of a module that is under a method, as a :class:`~lit_pfl.Federation` of this seed makes it.

    The module draws its own numbers as if there were none.
    """
    module.configure_model()
    with Draws(seed).default_generators("server"):
        return module.configure_server()


class _Coordinator(Coordinator):
    """One whose state says who took part when, since the fits of its clients resume from checkpoints of their own.

    Attributes:
        last_rounds: by client, the last round in which it uploaded.
    """

    def __init__(self, server: Server, quorum: float) -> None:
        super().__init__(server, quorum)
        self.last_rounds: dict[int, int] = {}

    def end_round(self) -> None:
        uploaded = list(self._uploads)
        super().end_round()
        self.last_rounds |= dict.fromkeys(uploaded, self.round)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "last_rounds": dict(self.last_rounds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.last_rounds = dict(state.get("last_rounds", {}))  # of a state of another kind nothing is known
