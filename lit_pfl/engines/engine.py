"""What a federation asks of whoever runs its clients: all that it knows of where they are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from lit_pfl.core import Client
from lit_pfl.core.payload import Payload, Upload
from lit_pfl.core.server import ClientInfo
from lit_pfl.engines.work import Work
from lit_pfl.lightning_internals import StateFiles

T = TypeVar("T")
#: everybody trains all batches of a round
NO_LIMITS: Mapping[int, int] = MappingProxyType({})


class Trained(NamedTuple):
    """What comes of a client's round.

    Args:
        upload: what the client uploads, or an UploadError that says what is wrong with it.
        loss: sum of the training loss over the round's samples.
        samples: number of these samples; 0 where no loss is known.
    """

    upload: Upload
    loss: float = 0.0
    samples: int = 0


class Engine(ABC):
    """Where a federation's clients live, train and are asked. A new engine is a subclass; its options are arguments.

    One process calls all of this, and nothing above an engine knows of processes or machines. Whatever an engine does,
    weights, scores and checkpoints are to be those of :class:`~lit_pfl.engines.Local`.

    Attributes:
        clients: the clients' modules that live in this very process, by id; an engine may have none.
        left: ids of clients whose training has been ended by one of their callbacks (``EarlyStopping``).
        all_at_once: whether :meth:`train` is best called with all participants of a round.
        files: files that states of clients lie in, if it is them that :meth:`state_dict` refers to.
    """

    all_at_once = False
    files: StateFiles | None = None

    def __init__(self) -> None:
        self.clients: dict[int, Client] = {}
        self.left: set[int] = set()

    @property
    def cores(self) -> int | None:
        """Number of CPU cores that a client has to itself; None for all of this machine."""
        return None

    def stacked(self, clients: int) -> int:
        """Return how many clients train in one step if this many do in a round."""
        return 1

    @abstractmethod
    def setup(self, work: Work) -> None:
        """Make the clients the first time; move them to the device of the Trainer, which may be another each time.

        Args:
            work: what there is to do. It is the same object every time, and its Trainer may have changed.
        """

    @abstractmethod
    def joined(self) -> dict[int, ClientInfo]:
        """Return what every client sends on joining, by id, in the order of the data."""

    @abstractmethod
    def train(
        self, replies: Mapping[int, Payload], completed: int, batches: Mapping[int, int] = NO_LIMITS
    ) -> dict[int, Trained]:
        """Let clients load their replies and train a round.

        Args:
            replies: by client id; one object for many clients is sent to each machine once.
            completed: number of rounds before this one.
            batches: by client id how many batches it trains at most; others train all.

        Returns:
            By client id. Uploads are read only, and may change with the next call of this method.
        """

    @abstractmethod
    def ask(self, question: Callable[[Client], T], replies: Mapping[int, Payload | None]) -> dict[int, T]:
        """Put a question to clients where they live.

        A client is asked under random draws of its own, which are the same every time, and is as it was afterwards.

        Args:
            question: a function of a module, or a ``functools.partial`` of one; the client is its last argument.
            replies: by client id what to load before; None to ask the client as it is.

        Returns:
            The answers by client id, in the order of ``replies``. They may share memory with the client.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return clients with optimizers and schedulers, and their random streams."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state of :meth:`state_dict`, of any engine.

        Raises:
            ConfigError: when it is of another network.
        """

    @abstractmethod
    def stop(self) -> None:
        """End all fits in good order; they can be taken up again."""

    @abstractmethod
    def abort(self) -> None:
        """End all fits at once, as after an error, and give back processes."""
