"""What happens between clients and server whatever the link: bytes are counted, and a round keeps its order."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.core.asynchronous import InTraining
from lit_pfl.core.checks import Checks, without_frozen
from lit_pfl.core.encoding import Expected
from lit_pfl.core.ledger import Ledger
from lit_pfl.core.participation import Sampling
from lit_pfl.core.payload import Payload, Upload, as_payload
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.errors import ConfigError, LateUpload, UploadError
from lit_pfl_callbacks.protocols import Refusal


class Trains(Protocol):
    """What a round needs: somebody who lets clients train."""

    def train(self, replies: Mapping[int, Payload], completed: int) -> Mapping[int, Upload]:
        """Let clients load their replies and train a round.

        Args:
            replies: by client id.
            completed: number of rounds before this one.

        Returns:
            Their uploads, by client id. A client whose fit ended on its own has none.
        """


class Coordinator:
    """Runs a server round by round: checks uploads, counts bytes, keeps the order.

    Args:
        server: the method's server.
        quorum: the share of a round's participants whose uploads must be usable for the round to count.
        max_update_norm: largest Euclidean norm of an update that is used; None: any.

    Attributes:
        round: number of rounds completed.
        privacy: protects uploads, see :meth:`protect`; None: nothing does.
        in_training: the clients that train while the server continues; None: it waits for all.
        changes: functions that change a round's uploads before they are checked, by round and client id: attacks.
        under_way: whether a round has begun and not ended.
        clock: simulated seconds that the rounds so far have taken.
        refused: what was wrong with the uploads that were refused in the latest round.
        seconds: time spent so far: ``aggregate``, in the server's steps and in making its replies, and
            ``link``, in checking and counting what is sent.
    """

    def __init__(self, server: Server, quorum: float = 0.5, max_update_norm: float | None = None) -> None:
        self.server = server
        self.quorum = quorum
        self.max_update_norm = max_update_norm
        self.privacy: ClientPrivacy | None = None
        self.in_training: InTraining | None = None
        self.changes: list[Callable[[int, Mapping[int, Upload]], Mapping[int, Upload]]] = []
        self.ledger = Ledger()
        self.round = 0
        self.clock = self._takes = 0.0
        self._nobody_drawn = False
        self.under_way = False
        self.refused: list[UploadError] = []
        self.seconds = {"aggregate": 0.0, "link": 0.0}
        self._uploads: dict[int, Upload] = {}

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        """Take in the clients, by id, before the first round.

        Raises:
            ConfigError: when there is no client, or one without samples, or with a tensor that cannot be sent, or
                that is not finite; when the robust mean cannot do with these clients.
        """
        clients, frozen = without_frozen(clients)
        self._checks = Checks(clients, frozen, self.server, self.max_update_norm)
        if self.server.robust is not None:
            self.server.robust.check(clients)
        tensors = (tensor for info in clients.values() for tensor in info.initial.values())
        self._device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        self.server.start(clients)

    def protect(self, privacy: ClientPrivacy | None, sampling: Sampling, seed: int) -> None:
        """Protect uploads from now on. :meth:`start` comes first.

        Args:
            privacy: how, if at all.
            sampling: how clients are sampled.
            seed: seed of the noise.

        Raises:
            ConfigError: when the method, or the clients' tensors, cannot be protected so.
        """
        if privacy is not None:
            privacy.start(self.server, self._checks.layouts, sampling, seed)
        self.privacy = privacy

    def begin_round(self, seconds: float = 0.0, nobody_drawn: bool = False) -> None:
        """Begin a round. Until :meth:`end_round` the server does not change, so all replies are of one state.

        Args:
            seconds: how long it takes in simulated time.
            nobody_drawn: whether whoever trains was not drawn for it, which matters to central privacy alone.
        """
        self.under_way, self._takes, self._nobody_drawn = True, seconds, nobody_drawn
        self.ledger.new_round(self.round + 1)
        self._uploads = {}

    def train(self, engine: Trains, clients: Sequence[int]) -> None:
        """Let some of a round's participants train; all at once or one after another makes no difference."""
        self.take_in(engine.train({client: self.reply(client) for client in clients}, self.round))

    def send_out(self, clients: Iterable[int], staleness: Mapping[int, int]) -> None:
        """Let clients begin whose uploads are of this round or of later ones; :attr:`in_training` is set.

        Args:
            clients: their ids.
            staleness: that of the uploads of this round, by client id.
        """
        assert self.in_training is not None
        self.in_training.begin({client: self.reply(client) for client in clients}, staleness)

    def take_in(self, uploads: Mapping[int, Upload]) -> None:
        """Keep uploads of a round until it ends; see :meth:`collect`."""
        self._uploads |= uploads

    def end_round(self) -> None:
        """End the round with what has been uploaded; see :meth:`collect`. Without any upload it counts all the same."""
        if self._uploads:
            self.collect(self._uploads)
        else:
            self.round, self.refused = self.round + 1, []
        self.clock += self._takes
        self._uploads, self.under_way = {}, False

    def reply(self, client: int) -> Payload:
        """Return what a participant loads, and count it as sent, unless that is done."""
        if self.in_training is not None and client in self.in_training.models:
            return self.in_training.models[client]
        with self._timed("aggregate"):
            reply = self.server.reply(client)
            if not isinstance(reply, Mapping):
                raise ConfigError(
                    f"{type(self.server).__name__}.reply({client}) returns a {type(reply).__name__}; it must be "
                    "what the client loads, tensors by name."
                )
            reply = as_payload(reply)
        with self._timed("link"):
            self.ledger.sent_down(client, reply)
        return reply

    def collect(self, uploads: Mapping[int, Upload]) -> None:
        """Refuse those uploads of a round that cannot be used, hand the others to the server by client id.

        Args:
            uploads: by client id; an UploadError instead of one says what is known to be wrong with it already.

        Raises:
            UploadError: when fewer uploads are usable than the quorum asks for.
        """
        uploads = {client: self._checked(client, upload) for client, upload in uploads.items()}
        self.round += 1
        for change in self.changes:
            uploads = {client: self._checked(client, upload) for client, upload in change(self.round, uploads).items()}
        with self._timed("link"):
            usable = self._usable(self._protected(uploads))
            if self.in_training is not None:
                usable = self.in_training.counted(usable, self.server)
        if len(usable) < self.quorum * len(uploads) - 1e-9:
            raise UploadError(
                f"Round {self.round}: {len(usable)} of {len(uploads)} uploads are usable, fewer than the quorum of "
                f"{self.quorum:.0%}. The first that is not: {self.refused[0]}"
            )
        if usable:
            with self._timed("aggregate"):
                if self.privacy is not None:
                    planned = 0 if self._nobody_drawn else len(uploads)
                    usable = self.privacy.protect_centrally(self.round, self.server, usable, planned)
                self.server.aggregate(self.round, usable)

    def _protected(self, uploads: Mapping[int, Upload]) -> Mapping[int, Upload]:
        """Return uploads as clients send them."""
        if self.privacy is None:
            return uploads
        sent = {client: upload for client, upload in uploads.items() if isinstance(upload, Payload)}
        return {**uploads, **self.privacy.protect_locally(self.round, self.server, sent)}

    def _usable(self, uploads: Mapping[int, Upload]) -> dict[int, Payload]:
        """Return the uploads that can be used, counted; note what is wrong with the others."""
        self.refused = []
        usable: dict[int, Payload] = {}
        for client, upload in sorted(uploads.items()):
            if isinstance(upload, UploadError):
                upload.client = client
                self.refused.append(upload)
                if not isinstance(upload, LateUpload):  # which is nothing that anybody should look into
                    rank_zero_warn(f"Round {self.round} continues without one upload. {upload}")
                continue
            assert isinstance(upload, Payload)
            self.ledger.sent_up(client, upload)
            usable[client] = upload
        return usable

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - began

    def _checked(self, client: int, upload: Upload) -> Upload:
        """Return an upload as a payload, or what is wrong with it."""
        if isinstance(upload, UploadError):
            return upload
        try:
            payload = as_payload(upload)
            self._refuse_unknown(client, payload)
            self._checks.check(client, payload, self._begun(client))
        except UploadError as error:
            return error
        return payload

    def _refuse_unknown(self, client: int, upload: Payload) -> None:
        """See that whatever measures updates knows what everything of an upload was before.

        Raises:
            UploadError: when a weight has just been unfrozen, which would all be an update.
        """
        mean = self.server.robust
        options = {
            "federation.max_update_norm": self.max_update_norm is not None,
            "federation.privacy": self.privacy is not None,
            f"model.mean={type(mean).__name__}": mean is not None and mean.from_center,
        }
        option = next((option for option, measures in options.items() if measures), None)
        if option is not None and (name := self._checks.unknown(upload)) is not None:
            raise UploadError(
                f"Client {client}: {option} measures updates, and the server does not know what tensor {name!r} was "
                "before it was unfrozen; let it train from round 1, or leave the option out.",
                name,
            )

    def _begun(self, client: int) -> Payload | None:
        """Return the model that a client began with while the server continued; None where it has not."""
        return None if self.in_training is None else self.in_training.models.get(client)

    def center(self, client: int, upload: Payload) -> Mapping[str, torch.Tensor]:
        """Return what the tensors of a client's upload were before it trained, see :meth:`~lit_pfl.Server.center`."""
        begun = self._begun(client)
        return self.server.center(client, upload) if begun is None else begun

    @property
    def refusals(self) -> list[Refusal]:
        """What :attr:`refused` says, as a table has it."""
        return [Refusal(self.round, error.client, error.tensor, str(error)) for error in self.refused]

    def expected(self, client: int) -> Expected:
        """Return names, shapes and types of the tensors that a client is to upload; none for one that never joined."""
        return self._checks.expected(client)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed federation needs of the server's side."""
        more: dict[str, Any] = {} if self.privacy is None else {"privacy": self.privacy.state_dict()}
        if self.clock:
            more["clock"] = self.clock
        if self.in_training is not None:
            more["in_training"] = self.in_training.state_dict()
        return {"round": self.round, "ledger": self.ledger.state_dict(), "server": self.server.state_dict(), **more}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`, on the clients' device. :meth:`start` comes first."""
        self.round, self.clock = state["round"], state.get("clock", 0.0)
        self.refused, self._uploads, self.under_way = [], {}, False
        # both matter to runs that train on, which have been compared
        if self.privacy is not None and "privacy" in state:
            self.privacy.load_state_dict(state["privacy"])
        self.ledger.load_state_dict(state["ledger"])
        self.server.load_state_dict(move_data_to_device(state["server"], self._device))
        if self.in_training is not None and "in_training" in state:
            self.in_training.load_state_dict(move_data_to_device(state["in_training"], self._device))
