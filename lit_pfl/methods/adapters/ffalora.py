"""FFA-LoRA: factor A of every LoRA is frozen, B is averaged."""

from lit_pfl.methods.adapters.fedit import FedIT, needs_lora


class FFALoRA(FedIT):
    """As :class:`~lit_pfl.methods.FedIT`, with the factors A of all LoRAs frozen at their first values.

    With A common to all clients, the mean of the products is the product with the mean: ``sum_k p_k B_k A =
    (sum_k p_k B_k) A``. Only B trains and is sent, half of what FedIT sends where layers are square. A is the same at
    all clients: a client that joins with another one is refused.

    Args:
        kwargs: see :class:`~lit_pfl.Client`.

    Raises:
        ConfigError: when the learner has no LoRA.

    Source:
        Sun et al. 2024. There is no code by the authors; that of FedSA-LoRA has it as ``federate.freeze_A``.
    """

    def configure_learner(self) -> None:
        super().configure_learner()
        for name in needs_lora(self.learner, type(self).__name__):
            self.learner.get_parameter(name).requires_grad_(False)
