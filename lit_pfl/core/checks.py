"""What clients send is checked: once on joining, and every upload."""

from collections.abc import Mapping
from numbers import Number

import numpy as np
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_pfl.core.encoding import Expected, Layout, misfit
from lit_pfl.core.payload import Payload, not_held
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.core.updates import update_norm
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl_callbacks.frozen import FROZEN, read_table, refuse_other_weights, table_of

#: above it weights of means, which are of double precision, would not be exact
MOST_SAMPLES = 2**53
#: how often a client may count each of its training samples in a round: an upload with larger counts is refused
MOST_COUNTED = 1000


class Checks:
    """Checks what clients join with, and from then on their uploads.

    Args:
        clients: the clients by id, as they join.
        frozen: shapes and types of weights that are sent once they are unfrozen.
        server: the method's server.
        max_update_norm: largest Euclidean norm of an update that is used; None: any.

    Attributes:
        layouts: shapes and types of what clients joined with, by id.

    Raises:
        ConfigError: when there is no client, or one without samples, or with a tensor that cannot be sent, or that is
            not finite.
    """

    def __init__(
        self, clients: Mapping[int, ClientInfo], frozen: Layout, server: Server, max_update_norm: float | None = None
    ) -> None:
        if not clients:
            raise ConfigError("A federation needs at least one client.")
        self.server, self.max_update_norm, self._frozen = server, max_update_norm, frozen
        known: dict[int, Layout] = {}  # of payloads, which clients that are alike have in common
        for client, info in clients.items():
            check_samples(client, info.num_samples)
            if id(info.initial) not in known:
                known[id(info.initial)] = info.initial.layout
                self._check_initial(client, info.initial)
        self.layouts = {client: known[id(info.initial)] for client, info in clients.items()}
        self._samples = {client: int(info.num_samples) for client, info in clients.items()}

    def _check_initial(self, client: int, initial: Payload) -> None:
        for name, tensor in initial.items():
            if wrong := not_held(name, tensor):
                raise ConfigError(f"Client {client}: {wrong}")
        # in a payload of its own, which remembers what it finds; what is not averaged need not be there yet
        if bad := Payload({k: v for k, v in initial.items() if self.server.is_averaged(k)}).not_finite:
            raise ConfigError(
                f"Client {client}: tensor {bad!r} holds NaN or infinity before any training, and no upload may; "
                "keep it local by register_buffer(..., persistent=False), by the method's local=..., or without a "
                "method by FederatedLoop(share=...)."
            )

    def expected(self, client: int) -> Expected:
        """Return names, shapes and types of the tensors that a client is to upload; none for one that never joined."""
        layout = self.server.layout(client) if client in self.layouts else {}
        return Expected(self.layouts[client] if layout is None else layout, self._frozen)

    def unknown(self, upload: Payload) -> str | None:
        """Return a tensor that was frozen, so that the server does not know what it was; None if there is none."""
        model = self.server.model
        return next((name for name in upload if name in self._frozen and name not in model), None)

    def check(self, client: int, upload: Payload, begun: Payload | None = None) -> None:
        """See that an upload can be used.

        Args:
            client: whose it is.
            upload: the upload.
            begun: what the client has trained from, where that is not what the server would reply now.

        Raises:
            UploadError: when it cannot.
        """
        if client not in self.layouts:
            raise UploadError(f"Client {client} has never joined.")
        if wrong := misfit(upload.layout, self.expected(client)):
            raise UploadError(f"Client {client}: {wrong[0]}", wrong[1])
        if upload.not_finite is not None:
            raise UploadError(
                f"Client {client}: tensor {upload.not_finite!r} holds NaN or infinity.", upload.not_finite
            )
        most = MOST_COUNTED * self._samples[client]
        for name in self.server.count_tensors:
            if name in upload and bool(((upload[name] < 0) | (upload[name] > most)).any()):
                raise UploadError(
                    f"Client {client}: tensor {name!r} counts samples or steps; with its {self._samples[client]} "
                    f"training samples it must be from 0 to {most}.",
                    name,
                )
        if self.max_update_norm is not None:
            norm = update_norm(upload, self.server.center(client, upload) if begun is None else begun)
            if norm > self.max_update_norm:
                raise UploadError(
                    f"Client {client}: its update has a norm of {norm:.6g}, above "
                    f"federation.max_update_norm={self.max_update_norm:g}."
                )


def check_samples(client: int, number: object) -> None:
    """See that a client's number of training samples is one."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number > MOST_SAMPLES:
        raise ConfigError(
            f"Client {client}: its number of training samples is {number!r}; it must be a whole number up to "
            f"{MOST_SAMPLES}."
        )
    if number < 1:
        raise ConfigError(f"Client {client} has no training sample.")


def check_quorum(option: str, quorum: float) -> None:
    """See that a quorum is a share; an error names the option."""
    if not isinstance(quorum, Number) or not 0 <= quorum <= 1:
        raise ConfigError(f"{option}={quorum!r}: give a share from 0 to 1.")


def without_frozen(clients: Mapping[int, ClientInfo]) -> tuple[dict[int, ClientInfo], Layout]:
    """Compare what clients say of weights that never train.

    Returns:
        What they share of the others; and the shapes and types of those weights, which travel once they are unfrozen.

    Raises:
        ConfigError: when frozen weights differ between clients.
    """
    if not any(FROZEN in info.initial for info in clients.values()):
        return dict(clients), {}
    tables = {client: info.initial.get(FROZEN, table_of({})) for client, info in clients.items()}
    first = next(iter(tables.values()))
    try:
        for client, table in tables.items():
            refuse_other_weights(table, first, f"Client {client}")
        frozen = {name: (torch.Size(shape), dtype) for name, (dtype, shape, _) in read_table(first).items()}
    except (MisconfigurationException, ValueError) as error:
        raise ConfigError(str(error)) from None
    distinct = {id(info.initial): info.initial.without(FROZEN) for info in clients.values()}
    return {k: ClientInfo(info.num_samples, distinct[id(info.initial)]) for k, info in clients.items()}, frozen
