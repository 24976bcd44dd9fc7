"""What a federation adds to a checkpoint, and which ones it takes."""

from functools import cached_property
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.core import Client
from lit_pfl.core.participation import Participation
from lit_pfl.data import FederatedDataModule
from lit_pfl.errors import ConfigError
from lit_pfl.federation.identity import fingerprint, refuse_another_run
from lit_pfl.federation.parts import Parts
from lit_pfl.randomness import Draws


class Checkpointing(Parts):
    """The part of a federation that is saved and resumed."""

    prototype: Client
    draws: Draws
    seed: int | None
    local_epochs: int
    participation: float | Participation
    _given_seed: int | None
    _made_with: FederatedDataModule

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the whole federation: clients with optimizers, schedulers and random streams, server, byte counts."""
        if self.coordinator.under_way:
            rank_zero_warn(
                f"A checkpoint in the middle of round {self.coordinator.round + 1}: no run can go on from it."
            )
        checkpoint["federation"] = {
            "under_way": self.coordinator.under_way,
            **self._identity(),
            "coordinator": self.coordinator.state_dict(),
            **_together(self.ranks.states(self.engine.state_dict())),
        }

    def _identity(self) -> dict[str, Any]:
        """Return what a checkpoint must agree in, first of all: what made the run, and whose data is whose."""
        return {
            "method": type(self.prototype).__name__,
            "local_epochs": self.local_epochs,
            "participation": repr(p) if isinstance(p := self.participation, Participation) else p,
            "seed": self.seed,
            "data": self._fingerprints,
        }

    @cached_property
    def _fingerprints(self) -> dict[int, str]:
        own = {client: module.data for client, module in self.clients.items()}
        return self.ranks.merged({client: fingerprint(data) for client, data in own.items() if data})

    def _refuse_other_data(self, data: FederatedDataModule) -> None:
        """See that a data module is what the clients were made with, which they go on to train and to be scored on.

        Raises:
            ConfigError: when it holds other samples, or deals them otherwise.
        """
        if {client: fingerprint(data.client(client)) for client in data.clients} != self._fingerprints:
            raise ConfigError(
                "datamodule: the clients of this federation were made with other data, or other labels; give the "
                "data module that they were made with, or a new Federation."
            )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the whole federation.

        Raises:
            ConfigError: when the checkpoint is of another run, or not whole. It names the first thing that differs.
        """
        try:
            state = checkpoint["federation"]
            self._refuse_another_run(state)
            self.seed = self.draws.seed = self.engine.hub.seed = state["seed"]
            self.engine.load_state_dict(state)
            self.coordinator.load_state_dict(state["coordinator"])
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise ConfigError(f"The checkpoint is no federation's, or not whole: {error!r}.") from error

    def _refuse_another_run(self, state: dict[str, Any]) -> None:
        if state.get("under_way"):
            raise ConfigError(
                f"The checkpoint was written in the middle of round {state['coordinator']['round'] + 1}, and no run "
                "can go on from there; give one of a whole round, such as checkpoints/last.ckpt."
            )
        names = ["method"]
        if self.trainer.state.fn == "fit":  # the rest makes no difference to a model that is only scored
            names += ["local_epochs", "participation"] + ([] if self._given_seed is None else ["seed"])
        refuse_another_run(state, self._identity(), names)


def _together(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one state of the engines of all processes: clients by id, in the order of ids, and so on."""
    keys = dict.fromkeys(key for state in states for key in state)
    return {key: dict(sorted(pair for state in states for pair in state.get(key, {}).items())) for key in keys}
