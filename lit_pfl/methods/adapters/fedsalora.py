"""FedSA-LoRA: factor A of every LoRA is averaged, B is each client's own."""

from lit_pfl.core.sharing import Role
from lit_pfl.methods.adapters.fedit import FedIT, needs_lora


class FedSALoRA(FedIT):
    """Clients train both factors of every LoRA, ``W x + s B A x``; A is averaged, B is each client's own.

    A learns what is common to all, B what is a client's. Everything else that trains is the client's own too, a
    classifier among it, as in the authors' code.

    Args:
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no LoRA.

    Source:
        Guo et al. 2025, Figure 1.
    """

    def configure_learner(self) -> None:
        super().configure_learner()
        self.common = frozenset(needs_lora(self.learner, type(self).__name__))

    def is_shared(self, name: str, role: Role) -> bool:
        return name in self.common and super().is_shared(name, role)
