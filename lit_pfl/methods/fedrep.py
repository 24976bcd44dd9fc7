"""FedRep: a common representation, and heads fitted to it first."""

from typing import Any, Literal

from jsonargparse.typing import PositiveInt

from lit_pfl.client import Client
from lit_pfl.errors import ConfigError
from lit_pfl.payload import Payload


class FedRep(Client):
    """The body is averaged as in FedAvg, the classifier is each client's own; a round trains one after the other.

    What does not train is frozen: it has no gradient, so neither momentum nor weight decay moves it. Running statistics
    of normalisation layers follow the batches in both phases, as in ordinary training.

    Args:
        mode: ``alternating``: a round's first local epochs train the head, its last ``body_epochs`` the body.
            ``joint``: all epochs train both, which is :class:`~lit_pfl.methods.FedPer`, as in FedSLR's comparison.
        body_epochs: how many of a round's local epochs train the body. By default a round has one more, for the head;
            the paper's CIFAR-10 runs have 10 for the head and 1 for the body (``federation.local_epochs=11``),
            CIFAR-100 10 and 5 (released code).
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when a round has no epoch left for the head, or the body no weights.

    Source:
        Collins et al. 2021, Algorithm 1.
    """

    shares = frozenset({"body", "u", "v", "mu", "norm"})

    def __init__(
        self, mode: Literal["alternating", "joint"] = "alternating", body_epochs: PositiveInt = 1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.mode, self.body_epochs = mode, body_epochs

    @property
    def fewest_epochs(self) -> int:  # noqa: D102
        return self.body_epochs + 1 if self.mode == "alternating" else 1

    def configure_memory(self) -> None:  # noqa: D102
        if self.mode == "alternating" and self.task.local_epochs <= self.body_epochs:
            raise ConfigError(
                f"model.body_epochs={self.body_epochs} leaves none of federation.local_epochs="
                f"{self.task.local_epochs} for the head; give at least {self.body_epochs + 1} local epochs, "
                "or model.mode=joint."
            )
        if not list(self.backbone.body.parameters()):
            raise ConfigError("model.backbone: FedRep trains a body, and this one has no weights.")

    def begin_epoch(self, epoch: int) -> None:  # noqa: D102
        if self.mode == "alternating":
            trains_body = epoch >= self.task.local_epochs - self.body_epochs
            self.backbone.body.requires_grad_(trains_body)
            self.backbone.head.requires_grad_(not trains_body)

    def upload(self) -> Payload:
        """Return the body. A round is over, so nothing is frozen any more."""
        if self.mode == "alternating":
            self.backbone.requires_grad_(True)
        return super().upload()
