"""FedPer: a common body, personal last layers."""

import re
from typing import Any

from jsonargparse.typing import NonNegativeInt

from lit_pfl.core import Client
from lit_pfl.core.sharing import EVERYTHING, Role, needs_head
from lit_pfl.errors import ConfigError


class FedPer(Client):
    """Everything but the last layers is averaged as in FedAvg; those are each client's own. All train together.

    Args:
        personal_layers: what stays at home. A number K_P: the last layers, the classifier first; 1 is the classifier
            alone, 0 nothing, which is FedAvg. A layer is one with weights (a convolution, say) and the norm that
            follows. Or a list of regular expressions: the classifier and everything of the body of whose name one is
            found, for networks that are not a sequence (``["^layer4"]``).
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the network has fewer layers, or nothing with such a name.

    Source:
        Arivazhagan et al. 2019, Algorithms 1 and 2.
    """

    shares = EVERYTHING

    private: frozenset[str]

    def __init__(self, personal_layers: NonNegativeInt | list[str] = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.personal_layers = personal_layers

    def configure_learner(self) -> None:  # noqa: D102
        super().configure_learner()
        needs_head(self.learner, self.head_names, "FedPer")
        if isinstance(self.personal_layers, int):
            self.private = last_layers(self, self.personal_layers, "model.personal_layers")
        else:
            self.private = last_layers(self, 1, "").union(*map(self._found, self.personal_layers))

    def _found(self, pattern: str) -> set[str]:
        roles = self.roles()
        prefix = self._prefix_of_the_body()
        body = [name.removeprefix(prefix) for name, role in roles.items() if role != "head"]
        found = {
            name for name, role in roles.items() if role != "head" and re.search(pattern, name.removeprefix(prefix))
        }
        if not found:
            raise ConfigError(
                f"model.personal_layers: nothing of the body is named like {pattern!r}; it has {', '.join(body)}."
            )
        return found

    def _prefix_of_the_body(self) -> str:
        body = self.encoder_module
        return next((f"{path}." for path, module in self.learner.named_modules() if module is body), "")

    def is_shared(self, name: str, role: Role) -> bool:  # noqa: D102
        return name not in self.private and super().is_shared(name, role)


def last_layers(client: Client, count: int, option: str) -> frozenset[str]:
    """Return the names in the learner's ``state_dict()`` of its last layers.

    Args:
        client: a client with a learner.
        count: how many, the classifier being one.
        option: what the number is called, for the error.

    Raises:
        ConfigError: when there are not that many.
    """
    layers: list[list[str]] = []
    owner = None
    for name, role in sorted(client.roles().items(), key=lambda item: item[1] == "head"):
        of = role if role == "head" else name.rpartition(".")[0]
        if not layers or (of != owner and role not in ("norm", "norm_stats")):
            layers.append([])
            owner = of
        layers[-1].append(name)
    if not 0 <= count <= len(layers):
        raise ConfigError(f"{option}={count}: the learner has {len(layers)} layers; give 0 to {len(layers)}.")
    return frozenset(name for layer in layers[len(layers) - count :] for name in layer)
