"""One client a process: a script that torchrun or a cluster starts, whose every process is a site of its own."""

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.plugins.environments import LSFEnvironment, MPIEnvironment, SLURMEnvironment
from torch import Tensor

from lit_pfl.core.checks import check_quorum
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.core.encoding import Layout
from lit_pfl.core.payload import FROM_FACTORS, Payload, Upload, as_payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.engines.greenlets import how_trained, server_of
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.links.processes import Processes
from lit_pfl.links.unavailable import refuse_unavailable
from lit_pfl.randomness import Draws, check_share
from lit_pfl_callbacks.federated_loop import JoinInfo
from lit_pfl_callbacks.rank_zero import be_rank_zero

#: what rank 0 compares of how clients train
ALIKE = ("method", "local_epochs", "completed")
#: what torchrun tells each of its processes
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: clusters that tell their processes the same in other ways
CLUSTERS = (SLURMEnvironment, LSFEnvironment, MPIEnvironment)


class ProcessGroupLink:
    """Joins the processes of one run, each with a Trainer of its own, by torch.distributed's gloo.

    The processes are those that torchrun, SLURM's ``srun``, LSF's ``jsrun`` or, with mpi4py, ``mpirun`` has started.
    The process of rank r is client r; that of rank 0 is the server too, whenever its own client waits. What is sent is
    encoded as it is counted. Every process makes one link, with the same options, and gives it to one fit.

    Sites that are started one by one say with ``rank``, ``size`` and ``address`` who they are and where they meet. Then
    a site's Trainer may have several processes (``strategy="ddp"``), of which the first one uses the link.

    Without ``rounds`` fits end by themselves, all after as many rounds; the last thing that each does is to load the
    reply of its last round. With ``rounds`` the link ends them, as they were trained in their last round.

    Args:
        server: by default that of the module's method, or one that averages, for a module under none. Only that of
            rank 0 is used.
        rounds: number of rounds; the fits' ``max_epochs`` must leave room for them (-1 does). By default as many as
            fits have.
        participation: who trains in a round: a share of the clients, or above 1 their number; drawn as a
            :class:`~lit_pfl.Federation` of this seed draws. Others wait.
        quorum: the share of a round's uploads that must be usable.
        seed: seed of what is drawn.
        timeout: seconds to wait for another process, as for one whose client takes longer, before giving up.
        rank: this site's number, from 0; by default that of the process.
        size: number of sites; by default that of the processes.
        address: ``host:port``, where the site of rank 0 can be reached; by default as the processes were told.
        others: refused; those of a :class:`~lit_pfl.Federation` with what is different here.

    Attributes:
        coordinator: the server's side, at rank 0: rounds completed, and bytes in ``coordinator.ledger``.

    Raises:
        ConfigError: for options that do not go together, and where nothing has started several processes, or they train
            one model (``strategy="ddp"``) and do not say which site they are; in all processes, when they do not train
            by the same method, for as many epochs a round, and from the same round.
        ConnectionError: when another process is gone, or does not answer.

    Example::

        link = ProcessGroupLink()  # torchrun --nproc-per-node 4 my_script.py
        trainer = L.Trainer(max_epochs=20, callbacks=[FederatedLoop(link, every_n_epochs=5)])
        trainer.fit(module, my_loader)
    """

    coordinator: Coordinator

    def __init__(
        self,
        server: Server | None = None,
        rounds: int | None = None,
        participation: float = 1.0,
        quorum: float = 0.5,
        seed: int = 0,
        timeout: float = 1800.0,
        rank: int | None = None,
        size: int | None = None,
        address: str | None = None,
        **others: object,
    ) -> None:
        waits = (
            "Here, a round waits for all of its participants; a process that needs over timeout seconds ends the run."
        )
        refuse_unavailable(others, "ProcessGroupLink({}=...)", waits)
        if others:
            raise TypeError(f"ProcessGroupLink has no option {', '.join(others)}")
        check_share("participation", participation)
        check_quorum("quorum", quorum)
        if participation != 1 and rounds is None:
            raise ConfigError("rounds: clients that wait for their turn cannot count rounds; say how many there are.")
        if rounds is not None and rounds < 1:
            raise ConfigError(f"rounds={rounds}: give 1 or more.")
        self._site = None if (rank, size, address) == (None, None, None) else _site(rank, size, address)
        self.server, self.rounds, self.participation = server, rounds, participation
        self.quorum, self.timeout = quorum, timeout
        self.draws = Draws(seed)
        self._state: dict[str, Any] | None = None  # of a run that goes on
        self._processes: Processes | None = None
        self._refused: dict[int, tuple[int, str]] = {}  # what clients are told with their next replies: round, reason
        if self.in_every_process:
            be_rank_zero()  # each has a training of its own

    # --------------------------------------------------------------------------------------------------- every process

    @property
    def in_every_process(self) -> bool:
        """Whether each process is a client, and would wait for the others for ever if one spoke for all."""
        return self._site is None

    def take_server(self, module: Any) -> None:
        """Let a module under a method make its server, unless one was given."""
        if self.server is None:
            self.server = server_of(module, self.draws.seed)

    def join(self, info: JoinInfo) -> Mapping[str, Tensor] | None:
        """Find the others and report; wait for the first turn."""
        if info.processes > 1 and self.in_every_process:
            raise ConfigError(
                f"ProcessGroupLink: each process is a client of its own, but this Trainer has {info.processes} that "
                "train one model; give Trainer(devices=1) and no strategy, or say by rank, size and address which site "
                "they are."
            )
        self._limit = max(FROM_FACTORS, sum(tensor.numel() for tensor in info.tensors.values()))
        if self._processes is None:
            where = _started_together() if self._site is None else self._site
            self._processes = Processes(*where, self.timeout, by_torchrun=self.in_every_process)
        if self._processes.rank != 0:
            words = {name: getattr(info, name) for name in ALIKE}
            self._send(0, as_payload(info.tensors), num_samples=info.num_samples, **words)
            return self._reply()
        return self._open(info)

    def exchange(self, upload: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Hand over the upload of one round; wait for the next turn."""
        if self._group.rank == 0:
            self._collect({0: upload})
            return self._begin()
        self._send(0, as_payload(upload))
        return self._reply()

    def no_batches(self) -> None:
        """Refuse a fit that has nothing to train on, since the others would wait for it."""
        raise ConfigError("ProcessGroupLink: this process's training loader gives no batch; each needs one at least.")

    def _reply(self) -> Payload | None:
        words, reply = self._receive(0)
        if "wrong" in words:
            raise ConfigError(words["wrong"])
        if words.get("refused"):
            round, reason = words["refused"]
            warnings.warn(f"Rank 0 has refused this process's upload of round {round}. {reason}", stacklevel=2)
        return None if words["over"] else reply

    @property
    def _group(self) -> Processes:
        assert self._processes is not None
        return self._processes

    def _send(self, to: int, payload: Payload, **words: Any) -> None:
        # The encoding tells of the marks only where they save something.
        head = json.dumps({**words, "sparse": sorted(payload.sparse)}).encode()
        self._group.send(len(head).to_bytes(8, "big") + head + payload.to_bytes(), to)

    def _receive(self, source: int, expected: Layout | None = None) -> tuple[dict[str, Any], Payload]:
        message = self._group.receive(source)
        end = 8 + int.from_bytes(message[:8], "big")
        try:
            words, payload = json.loads(message[8:end]), Payload.from_bytes(message[end:], expected, self._limit)
            plain = {name: tensor for name, tensor in payload.items() if name not in payload.low_rank}
            return words, Payload(plain, words["sparse"], payload.low_rank)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UploadError(f"Client {source}: what it sends cannot be used: {error}") from error

    # ---------------------------------------------------------------------------------------------------------- rank 0

    def _open(self, own: JoinInfo) -> Payload | None:
        """Take in all clients and begin."""
        check_share("participation", self.participation, self._group.size)
        infos = {0: own}
        for client in range(1, self._group.size):
            words, initial = self._receive(client)
            infos[client] = JoinInfo(words["num_samples"], initial, **{name: words[name] for name in ALIKE})
        try:
            self._check_alike(infos)
        except ConfigError as error:
            for client in range(1, self._group.size):
                self._send(client, Payload({}), wrong=str(error))
            raise
        self.coordinator = Coordinator(self.server or Server(), self.quorum)
        self.coordinator.start({c: ClientInfo(info.num_samples, as_payload(info.tensors)) for c, info in infos.items()})
        if self._state is not None:
            self.coordinator.load_state_dict(self._state)
            self._state = None
        return self._begin()

    def _check_alike(self, infos: Mapping[int, JoinInfo]) -> None:
        """See that all clients train in the same way, and have completed as many rounds where all take part in each."""
        own = infos[0]
        for client, info in infos.items():
            if info.method != own.method:
                raise ConfigError(
                    f"Client {client} trains {how_trained(info)}, but rank 0 {how_trained(own)}. Use the same method "
                    "in every process."
                )
            if info.local_epochs != own.local_epochs:
                raise ConfigError(
                    f"Client {client} has FederatedLoop(every_n_epochs={info.local_epochs}), but rank 0 has "
                    f"{own.local_epochs}. Use the same number in every process."
                )
            # with fewer, a client that waits for its turn has not saved its last round yet
            if self.participation == 1 and info.completed != own.completed:
                raise ConfigError(
                    f"Client {client} begins after {info.completed} rounds, but rank 0 after {own.completed}. Give "
                    "every fit the ckpt_path of the same round, or none."
                )

    def _begin(self) -> Payload | None:
        """Begin a round; return rank 0's reply, once it is its turn."""
        everybody = range(self._group.size)
        while self.rounds is None or self.coordinator.round < self.rounds:
            completed = self.coordinator.round
            self._participants = self.draws.choose(everybody, self.participation, "participation", completed)
            self._ledger = self.coordinator.ledger.state_dict()
            self.coordinator.begin_round()
            replies = {client: self.coordinator.reply(client) for client in self._participants}
            for client in self._participants:
                if client != 0:
                    self._send(client, replies[client], over=False, refused=self._refused.pop(client, None))
            if 0 in replies:
                return replies[0]
            self._collect({})
        self._ledger = self.coordinator.ledger.state_dict()
        for client in range(1, self._group.size):
            self._send(client, Payload({}), over=True, refused=self._refused.pop(client, None))
        return None

    def _collect(self, uploads: dict[int, Upload]) -> None:
        """End a round with what has been uploaded here, and with what the others send."""
        for client in self._participants:
            if client != 0:
                try:
                    uploads[client] = self._receive(client, self.coordinator.expected(client))[1]
                except UploadError as error:
                    uploads[client] = error
        self.coordinator.collect(uploads)
        refusals = self.coordinator.refusals
        self._refused |= {client: (round, reason) for round, client, _, reason in refusals if client is not None}

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return where the federation stands, at rank 0: as it was after the last complete round."""
        if not hasattr(self, "coordinator"):
            return {}
        return {**self.coordinator.state_dict(), "ledger": self._ledger}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`, once all have joined."""
        self._state = state


def _started_together() -> tuple[int, int, str, int]:
    """Return rank, number of processes, address and port as whatever has started this process says."""
    missing = [name for name in TORCHRUN if name not in os.environ]
    cluster = next((kind() for kind in CLUSTERS if kind.detect()), None) if "RANK" in missing else None
    if cluster is not None and cluster.world_size() > 1:  # a job of one task has not started them
        return cluster.global_rank(), cluster.world_size(), cluster.main_address, cluster.main_port
    if missing:
        raise ConfigError(
            f"ProcessGroupLink: {missing[0]} is not in the environment; start the script with torchrun "
            "--nproc-per-node N, or with srun in a job of several tasks, or give rank, size and address."
        )
    rank, size, address, port = (os.environ[name] for name in TORCHRUN)
    if not 0 <= int(rank) < int(size):
        raise ConfigError(f"ProcessGroupLink: RANK={rank} and WORLD_SIZE={size}: ranks are from 0 to {int(size) - 1}.")
    return int(rank), int(size), address, int(port)


def _site(rank: int | None, size: int | None, address: str | None) -> tuple[int, int, str, int]:
    """Return what is said of a site, as of a process."""
    if rank is None or size is None or address is None:
        raise ConfigError(
            f"ProcessGroupLink(rank={rank}, size={size}, address={address!r}): a site that is started alone needs "
            "all three."
        )
    if not isinstance(rank, int) or not isinstance(size, int):
        raise ConfigError(f"rank={rank!r} and size={size!r}: give whole numbers.")
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"address={address!r}: give host:port of the site of rank 0, such as 10.0.0.1:29600.")
    if not 0 <= rank < size:
        raise ConfigError(f"rank={rank} and size={size}: ranks are from 0 to {size - 1}.")
    return rank, size, host.strip("[]"), int(port)  # brackets: of IPv6
