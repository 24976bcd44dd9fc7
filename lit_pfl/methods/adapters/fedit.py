"""FedIT: the adapters of a frozen network are averaged."""

import lightning as L

from lit_pfl.core import Client
from lit_pfl.errors import ConfigError
from lit_pfl.nn.adapters import adapter_prefixes, lora_factors


class FedIT(Client):
    """Clients train the adapters of a network, and the server averages these, weighted by numbers of samples.

    A layer with a LoRA returns ``W x + s B A x``, with W frozen. The server takes the mean of A and the mean of B:
    ``A = sum_k p_k A_k`` and ``B = sum_k p_k B_k``, whose product is not the mean of the products. This is
    ``FedAvg(shares="adapter")``, bit for bit, but refuses a learner without adapters. What else trains is each
    client's own: a classifier that is the learner's head, norms. A classifier that ``peft`` saves along with the
    adapters (``modules_to_save``) is averaged with them, unless ``head`` names it.

    Args:
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no adapters.

    Source:
        Zhang et al. 2024, Algorithm 1.
    """

    shares = frozenset({"adapter"})

    def configure_learner(self) -> None:
        super().configure_learner()
        if not adapter_prefixes(self.learner):
            raise ConfigError(
                f"model.learner: {type(self).__name__} trains adapters, and {_named(self.learner)} has none; give it "
                "some by peft.get_peft_model, or use another method, such as FedAvg."
            )


def needs_lora(learner: L.LightningModule, method: str) -> dict[str, str]:
    """Return the names of B of a learner's LoRAs by those of A.

    Raises:
        ConfigError: when it has none.
    """
    factors = lora_factors(learner)
    if not factors:
        raise ConfigError(
            f"model.learner: {method} needs the factors A and B of a LoRA, and the adapters of {_named(learner)} "
            "have none; use peft.LoraConfig, or FedIT."
        )
    return factors


def _named(learner: L.LightningModule) -> str:
    """Return the name of a learner's class, or of the network of an image classifier."""
    return type(getattr(learner, "backbone", learner)).__name__
