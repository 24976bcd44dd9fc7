"""What methods have in common whose rounds train the head first and the body afterwards."""

import lightning as L
from torch import nn

from lit_pfl.errors import ConfigError

#: by part, the option that says what it is, and what may be wrong where it has no weights
OF_NONE = {
    "head": (
        "model.head",
        " of its own: they are frozen, or the body's too (tied weights); say by a regular expression which others are "
        "the head's",
    ),
    "body": ("model.backbone", ""),
}


class Phases:
    """Head and body of a learner, of which one may be frozen: neither momentum nor weight decay moves it then.

    Args:
        learner: the learner.
        head: names of the head's entries in its ``state_dict()``.
        method: the method, for errors.

    Raises:
        ConfigError: when head or body have no weights that train.
    """

    def __init__(self, learner: L.LightningModule, head: frozenset[str], method: str) -> None:
        trained = [(name, weight) for name, weight in learner.named_parameters() if weight.requires_grad]
        self.parts: dict[str, list[nn.Parameter]] = {
            "head": [weight for name, weight in trained if name in head],
            "body": [weight for name, weight in trained if name not in head],
        }
        for part, weights in self.parts.items():
            if not weights:
                option, why = OF_NONE[part]
                raise ConfigError(f"{option}: {method} trains the {part} alone, and this one has no weights{why}.")

    def train(self, *parts: str) -> None:
        """Let only these of ``head`` and ``body`` train."""
        for part, weights in self.parts.items():
            for weight in weights:
                weight.requires_grad_(part in parts)


def check_epochs(local_epochs: int | None, epochs: int, option: str, rest: str = "body") -> None:
    """See that a round has an epoch left for one part after those for another one: for the body after the head.

    Raises:
        ConfigError: when it has none.
    """
    if local_epochs is not None and local_epochs <= epochs:
        raise ConfigError(
            f"{option}={epochs} leaves none of federation.local_epochs={local_epochs} for the {rest}; give at least "
            f"{epochs + 1} local epochs."
        )
