"""What server and clients agree on for the masked sum."""

from dataclasses import dataclass

from flwr.app import UserConfig

from lit_pfl.errors import ConfigError
from lit_pfl.links.flower.plan import Plan

#: uploads are summed up modulo this number
MODULUS = 2**32


@dataclass(frozen=True)
class Masking:
    """How uploads become whole numbers, which can be masked, and how many clients may drop out.

    A client sends its parameters, multiplied by its number of samples over ``largest``, in steps of ``step``.

    Args:
        clients: number of clients.
        clip: largest absolute value of what is sent.
        largest: the largest number of samples that a client may have.
        threshold: how many clients a round needs; as many together could unmask an upload.
    """

    clients: int
    clip: float
    largest: int
    threshold: int

    @classmethod
    def of(cls, config: UserConfig, plan: Plan) -> "Masking":
        """Return what a run's configuration says.

        Raises:
            ConfigError: for an option with which uploads are not protected, or which secure aggregation does not have.
        """
        clip, largest = config["clipping-range"], config["largest-samples"]
        if plan.clients < 3:
            raise ConfigError(
                f"run-config clients={plan.clients}: of two, each learns the other's upload from the mean; give 3."
            )
        if plan.participation != 1:
            raise ConfigError(f"run-config participation={plan.participation}: all take part here; leave it out.")
        if not plan.quorum > 0.5:
            raise ConfigError(
                f"run-config quorum={plan.quorum}: each half of the clients could unmask the other half's uploads; "
                "give more than 0.5."
            )
        if isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < float("inf"):
            raise ConfigError(f"run-config clipping-range={clip!r}: give a number above 0.0.")
        if type(largest) is not int or largest < 1:
            raise ConfigError(f"run-config largest-samples={largest!r}: give a whole number above 0.")
        least = plan.clients // 2 + 1
        return cls(plan.clients, clip, largest, max(least, -int(-plan.quorum * plan.clients // 1)))

    @property
    def levels(self) -> int:
        """How many whole numbers a value may be: as many as fit into the sum, so that steps are as small as can be."""
        return 1 << ((MODULUS - 1) // self.clients).bit_length() - 1

    @property
    def step(self) -> float:
        """What a value differs by between two neighboring whole numbers."""
        return 2 * self.clip / self.levels
