"""FedRep: a common representation, and heads fitted to it first."""

from typing import Any, Literal

from jsonargparse.typing import PositiveInt

from lit_pfl.core import Client
from lit_pfl.core.sharing import BODY, needs_head
from lit_pfl.methods.partial.phases import Phases, check_epochs


class FedRep(Client):
    """The body is averaged as in FedAvg, the classifier is each client's own; a round trains one after the other.

    What does not train is frozen: it has no gradient, so neither momentum nor weight decay moves it. Running statistics
    of normalization layers follow the batches in both phases, as in ordinary training. The authors' script prints the
    mean of its last ten rounds, and then trains every client's head for ten more epochs ("Final Round"); here the last
    round's score is printed, and nothing trains after it.

    Args:
        mode: ``alternating``: a round's first local epochs train the head, its last ``body_epochs`` the body.
            ``joint``: all epochs train both, which is :class:`~lit_pfl.methods.FedPer`, as in FedSLR's comparison.
        body_epochs: how many of a round's local epochs train the body. By default a round has one more, for the head;
            the paper's CIFAR-10 runs have 10 for the head and 1 for the body (``federation.local_epochs=11``),
            CIFAR-100 10 and 5 (released code).
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when there is no head, or, if they alternate, a round has no epoch left for the head or one of head
            and body has no weights.

    Source:
        Collins et al. 2021, Algorithm 1.
    """

    needs_automatic = "freezes head and body in turn, which a learner that chooses its weights itself would undo"

    shares = BODY

    def __init__(
        self, mode: Literal["alternating", "joint"] = "alternating", body_epochs: PositiveInt = 1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.mode, self.body_epochs = mode, body_epochs
        self.min_local_epochs = body_epochs + 1 if mode == "alternating" else 1

    def configure_state(self) -> None:
        needs_head(self.learner, self.head_names, "FedRep")
        if self.mode == "alternating":
            check_epochs(self.spec.local_epochs, self.body_epochs, "model.body_epochs", "head")
            self.phases = Phases(self.learner, self.head_names, "FedRep")

    def begin_epoch(self, epoch: int, local_epochs: int) -> None:
        if self.mode == "alternating":
            check_epochs(local_epochs, self.body_epochs, "model.body_epochs", "head")
            self.phases.train("body" if epoch >= local_epochs - self.body_epochs else "head")

    def end_round(self) -> None:
        """Let nothing be frozen any more."""
        if self.mode == "alternating":
            self.phases.train("body", "head")
