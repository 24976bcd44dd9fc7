"""FedPer: a common body, personal last layers."""

import re
from typing import Any

from jsonargparse.typing import NonNegativeInt

from lit_pfl.core import Client
from lit_pfl.core.sharing import EVERYTHING, Role, last_layers, needs_head
from lit_pfl.errors import ConfigError


class FedPer(Client):
    """Everything but the last layers is averaged as in FedAvg; those are each client's own. All train together.

    Args:
        personal_layers: what is kept local. A number K_P: the last layers, the classifier first; 1 is the classifier
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

    def configure_learner(self) -> None:
        super().configure_learner()
        needs_head(self.learner, self.head_names, "FedPer")
        if isinstance(self.personal_layers, int):
            self.private = last_layers(self.roles(), self.personal_layers, "model.personal_layers")
        else:
            self.private = last_layers(self.roles(), 1, "").union(*map(self._found, self.personal_layers))

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

    def is_shared(self, name: str, role: Role) -> bool:
        return name not in self.private and super().is_shared(name, role)
