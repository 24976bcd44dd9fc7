"""What a module may offer to the callbacks of this package: public attributes, each of them optional.

A callback looks for the protocol that it names, and does without where a module does not have it. So any
LightningModule takes part by having the attribute; ``lit_pfl.Federation`` and its clients have them all. What is of
another kind, such as a number called ``clients``, is the module's own affair.

=======================  ===============================  =========================================================
protocol                 attribute                        who looks for it
=======================  ===============================  =========================================================
:class:`HasClients`      ``client_ids``, ``ask(...)``     ``Similarity``, ``SparsityMonitor``, ``FeatureAlignment``,
                                                          ``FeatureMap``, ``PersonalizedModels``,
                                                          ``CommunicationLedger``, ``RoundProgress``
:class:`HasScores`       ``rows``, ``higher_is_better``   ``ClientsTable``, ``PersonalizedModels``
:class:`HasOtherStates`  ``other_rows``                   ``ClientsTable``
:class:`HasTraffic`      ``traffic``                      ``CommunicationLedger``, ``Similarity``, ``EmbeddingMap``,
                                                          ``ClientsTable``, ``RoundProgress``
:class:`HasSeconds`      ``seconds``                      ``RoundTimer``
:class:`HasMixing`       ``mixing()``                     ``Similarity``
:class:`HasRefusals`     ``refused``                      ``RefusedUploads``
:class:`HasTestSamples`  ``test_samples(client)``         ``Predictions``
:class:`HasRoles`        ``roles()``, of a client         ``CommunicationLedger``
:class:`HasWeightParts`  ``weight_parts()``, of a client  ``SparsityMonitor``
=======================  ===============================  =========================================================

A Trainer with a :class:`~lit_pfl_callbacks.FederatedLoop` is one site of a federation: there the loop has ``watchers``
and ``seconds``, whatever the module.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

Direction = Literal["up", "down"]


class Transfer(NamedTuple):
    """Something that has just been sent.

    Args:
        round: the round that it is of, from 1.
        client: whose it is; None at a site, which is one client itself.
        direction: ``up``, to the server, or ``down``.
        tensors: what was sent, by name: the sender's own memory, which changes later.
        sizes: bytes of every tensor, as encoded.
        nbytes: bytes in all, with names and shapes.
    """

    round: int
    client: int | None
    direction: Direction
    tensors: Mapping[str, Tensor]
    sizes: Mapping[str, int]
    nbytes: int


Watcher = Callable[[Transfer], None]


class WeightParts(NamedTuple):
    """What a layer's weight is the sum of.

    Args:
        sparse: a part whose zeros count, such as mu or p; None without one.
        factors: a part whose rank counts: one matrix, or two, (rows, r) and (columns, r), of which it is the product.
    """

    sparse: Tensor | None
    factors: tuple[Tensor] | tuple[Tensor, Tensor]


class Row(Protocol):
    """One client's scores."""

    @property
    def client(self) -> int:
        """Its id."""

    @property
    def round(self) -> int:
        """The round after which it was scored."""

    @property
    def split(self) -> str:
        """The data: ``val`` or ``test``."""

    @property
    def model(self) -> str:
        """The model: ``personalized:before``; with ``:untrained``, of a client that has never trained."""

    @property
    def state(self) -> str:
        """The state in which it was scored: ``trained``, ``aggregated`` or ``global``."""

    @property
    def n(self) -> int:
        """Number of samples."""

    @property
    def scores(self) -> Mapping[str, float]:
        """The metrics, by name."""


@runtime_checkable
class Traffic(Protocol):
    """Bytes sent so far.

    Attributes:
        total: both ways.
        clients: by client id, up and down.
        watchers: functions that are called with everything that is sent.
    """

    total: int
    clients: Any  # Mapping[int, Sequence[int]], which no dict of lists would be
    watchers: list[Watcher]


#: of what kind attributes are
KINDS: dict[str, Any] = {
    "client_ids": Sequence, "ask": Callable, "rows": Sequence, "other_rows": Sequence, "higher_is_better": Mapping,
    "traffic": Traffic, "seconds": Mapping, "refused": Sequence,
    "mixing": Callable, "test_samples": Callable, "roles": Callable, "weight_parts": Callable,
}  # fmt: skip


class _OfKinds(type(Protocol)):  # type: ignore[misc]  # there is no public name for it
    """Makes ``isinstance`` look at the kinds of attributes too, since their names are common words."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) and all(
            isinstance(getattr(instance, name, None), kind) for name, kind in KINDS.items() if hasattr(cls, name)
        )


@runtime_checkable
class HasClients(Protocol, metaclass=_OfKinds):
    """``client_ids``: the clients' ids; ``ask(question)``: what a function of a client's module returns, by id.

    Clients may live in other processes, so the question is a function of a Python module, or a ``functools.partial`` of
    one, and what it returns can be sent.
    """

    @property
    def client_ids(self) -> Sequence[int]: ...

    def ask(
        self, question: Callable[[Any], Any], clients: Iterable[int] | None = None, as_scored: bool = False
    ) -> Mapping[int, Any]:
        """Ask clients, by default all; ``as_scored`` in the state in which they are scored, otherwise as they are."""


@runtime_checkable
class HasScores(Protocol, metaclass=_OfKinds):
    """``rows``: the scores of the latest evaluation; ``higher_is_better``: by metric, which end is the good one."""

    @property
    def rows(self) -> Sequence[Row]: ...

    @property
    def higher_is_better(self) -> Mapping[str, bool]: ...


@runtime_checkable
class HasOtherStates(Protocol, metaclass=_OfKinds):
    """``other_rows``: the scores of the latest test in further states than that of ``rows``."""

    @property
    def other_rows(self) -> Sequence[Row]: ...


@runtime_checkable
class HasTraffic(Protocol, metaclass=_OfKinds):
    """``traffic``: what has been sent, and who is notified of it."""

    @property
    def traffic(self) -> Traffic: ...


@runtime_checkable
class HasSeconds(Protocol, metaclass=_OfKinds):
    """``seconds``: what has been spent so far, by phase: ``aggregate``, ``link``."""

    @property
    def seconds(self) -> Mapping[str, float]: ...


class Refusal(NamedTuple):
    """An upload that was refused.

    Args:
        round: the round that it is of, from 1.
        client: whose it was.
        tensor: name of the tensor that was wrong; empty where none was.
        reason: what was wrong, in one line.
    """

    round: int
    client: int | None
    tensor: str
    reason: str


@runtime_checkable
class HasRefusals(Protocol, metaclass=_OfKinds):
    """``refused``: the uploads of the latest round that were refused."""

    @property
    def refused(self) -> Sequence[Refusal]: ...


@runtime_checkable
class HasMixing(Protocol, metaclass=_OfKinds):
    """``mixing()``: clients' ids, and (J, J) weights, row i being everybody's in what client i is sent next.

    None before the first round, and where clients are not distinguished.
    """

    def mixing(self) -> tuple[Sequence[int], Tensor] | None: ...


@runtime_checkable
class HasRoles(Protocol, metaclass=_OfKinds):
    """``roles()``: which group every tensor that is sent belongs to, by name."""

    def roles(self) -> Mapping[str, str]: ...


@runtime_checkable
class HasWeightParts(Protocol, metaclass=_OfKinds):
    """``weight_parts()``: what the weights are made of, by the layer's name."""

    def weight_parts(self) -> Mapping[str, WeightParts]: ...


@runtime_checkable
class HasTestSamples(Protocol, metaclass=_OfKinds):
    """``test_samples(client)``: the (n,) places of a client's test samples in the data set, and (n,) labels or None."""

    def test_samples(self, client: int) -> tuple[Tensor, Tensor | None]: ...


@runtime_checkable
class Encoded(Protocol):
    """Named tensors that know how they will be sent: ``sizes``, by name, and ``nbytes`` in all."""

    @property
    def sizes(self) -> Mapping[str, int]: ...

    @property
    def nbytes(self) -> int: ...


def transfer(round: int, client: int | None, direction: Direction, tensors: Mapping[str, Tensor]) -> Transfer:
    """Return what watchers get of tensors that are sent; those that are not :class:`Encoded` count as they are."""
    if isinstance(tensors, Encoded):
        return Transfer(round, client, direction, tensors, tensors.sizes, tensors.nbytes)
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    return Transfer(round, client, direction, tensors, sizes, sum(sizes.values()))
