"""FedRep: a common representation, and heads fitted to it first."""

from typing import Any, Literal

from jsonargparse.typing import PositiveInt
from torch import nn

from lit_pfl.core import Client
from lit_pfl.core.sharing import BODY, needs_head
from lit_pfl.errors import ConfigError


class FedRep(Client):
    """The body is averaged as in FedAvg, the classifier is each client's own; a round trains one after the other.

    What does not train is frozen: it has no gradient, so neither momentum nor weight decay moves it. Running statistics
    of normalization layers follow the batches in both phases, as in ordinary training.

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

    needs_automatic = "freezes head and body in turn, which a learner that chooses its weights itself would undo"

    shares = BODY

    _trained: dict[str, list[nn.Parameter]]  # by the part that they belong to

    def __init__(
        self, mode: Literal["alternating", "joint"] = "alternating", body_epochs: PositiveInt = 1, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.mode, self.body_epochs = mode, body_epochs

    @property
    def min_local_epochs(self) -> int:  # noqa: D102
        return self.body_epochs + 1 if self.mode == "alternating" else 1

    def configure_state(self) -> None:  # noqa: D102
        if self.spec.local_epochs is not None:
            self._check(self.spec.local_epochs)
        head = self.head_names
        needs_head(self.learner, head, "FedRep")
        trained = [(name, weight) for name, weight in self.learner.named_parameters() if weight.requires_grad]
        self._trained = {
            "head": [weight for name, weight in trained if name in head],
            "body": [weight for name, weight in trained if name not in head],
        }
        if not self._trained["body"]:
            raise ConfigError("model.backbone: FedRep trains a body, and this one has no weights.")
        if not self._trained["head"] and self.mode == "alternating":
            raise ConfigError(
                "model.head: FedRep trains the head alone, and this one has no weights of its own: they are frozen, "
                "or the body's too (tied weights); say by a regular expression which others are the head's."
            )

    def _check(self, local_epochs: int) -> None:
        if self.mode == "alternating" and local_epochs <= self.body_epochs:
            raise ConfigError(
                f"model.body_epochs={self.body_epochs} leaves none of federation.local_epochs={local_epochs} for the "
                f"head; give at least {self.body_epochs + 1} local epochs, or model.mode=joint."
            )

    def begin_epoch(self, epoch: int, local_epochs: int) -> None:  # noqa: D102
        self._check(local_epochs)
        if self.mode == "alternating":
            trains_body = epoch >= local_epochs - self.body_epochs
            self._train("body", trains_body)
            self._train("head", not trains_body)

    def end_round(self) -> None:
        """Let nothing be frozen any more."""
        self._train("body", True)
        self._train("head", True)

    def _train(self, part: str, trains: bool) -> None:
        for weight in self._trained[part]:
            weight.requires_grad_(trains)
