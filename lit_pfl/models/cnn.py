"""Small networks."""

from torch import nn

from lit_pfl.errors import ConfigError
from lit_pfl.models.backbone import Backbone


class CNN(Backbone):
    """The two-layer CNN common in the field: conv5 x 5 (32), pool, conv5 x 5 (64), pool, 512 features, classifier.

    Args:
        channels: channels of the input images.
        classes: number of classes.

    Source:
        McMahan et al. 2017, Section 3, without padding as most code bases have it.
    """

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.LazyLinear(512), nn.ReLU(),
        )  # fmt: skip
        super().__init__(body, nn.Linear(512, classes))


class MLP(Backbone):
    """Two hidden layers of 200 units: McMahan et al. 2017, Section 3.

    Args:
        channels: channels of the input images.
        classes: number of classes.
        hidden: units of a hidden layer.

    Raises:
        ConfigError: for less than one unit, through which nothing would be seen of an image.
    """

    def __init__(self, channels: int = 1, classes: int = 10, hidden: int = 200) -> None:
        if hidden < 1:
            raise ConfigError(f"model.backbone.hidden={hidden}: give 1 unit or more.")
        body = nn.Sequential(
            nn.Flatten(), nn.LazyLinear(hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
        )  # fmt: skip
        super().__init__(body, nn.Linear(hidden, classes))
