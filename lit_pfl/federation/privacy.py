"""What a federation logs of its privacy, and where it ends."""

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_pfl.core.coordinator import Coordinator
from lit_pfl.errors import ConfigError


def end_of_privacy(trainer: L.Trainer, coordinator: Coordinator, begins: bool = False) -> dict[str, float]:
    """Stop a Trainer where another round would exceed the privacy budget; return what is logged.

    Args:
        trainer: the federation's Trainer.
        coordinator: the server's side.
        begins: whether a round is about to begin, and not over.

    Raises:
        ConfigError: when one is about to begin that would exceed the budget.
    """
    privacy, completed = coordinator.privacy, coordinator.round
    if privacy is None:
        return {}
    if privacy.spent(completed):
        budget = f"federation.privacy.budget={privacy.budget:g}"
        if begins:
            raise ConfigError(
                f"{budget}: epsilon is {privacy.epsilon(completed):.4g} after round {completed}, and another round "
                "would exceed the budget; the run is over, or give a larger one."
            )
        rank_zero_info(f"{budget}: another round would exceed it; the federation ends after round {completed}.")
        trainer.should_stop = True
    return {} if begins else privacy.report(completed)
