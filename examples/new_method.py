"""A new method in 30 lines: clients sit in a ring, and each averages its body with its two neighbours'.

python examples/new_method.py
lit-pfl fit --model examples.new_method.Ring --data Digits
"""

from collections.abc import Mapping

import lightning as L
import torch

from lit_pfl import Client, Federation, MixingServer, Payload
from lit_pfl.data import Digits
from lit_pfl.models import ResNet9


class Ring(Client):
    """Averages the body with the two neighbours'; heads stay at home."""

    shares = frozenset({"body", "norm"})

    def configure_server(self) -> "RingServer":
        return RingServer()


class RingServer(MixingServer):
    """Mixes by a K x K matrix with a third for each client and its neighbours."""

    def mixing_matrix(self, round: int, latest: Mapping[int, Payload]) -> torch.Tensor:
        eye = torch.eye(len(latest))
        return (eye + eye.roll(1, 0) + eye.roll(-1, 0)) / 3


def main(rounds: int = 10) -> float:
    L.seed_everything(1)
    method = Ring(backbone=lambda channels, classes: ResNet9(channels, classes, width=8))
    trainer = L.Trainer(max_epochs=rounds, logger=False, enable_checkpointing=False, enable_model_summary=False)
    trainer.fit(Federation(method, local_epochs=3), datamodule=Digits(num_clients=10, permute_labels=True))
    return float(trainer.callback_metrics["test/acc"])


if __name__ == "__main__":
    print(f"accuracy, mean over clients: {main():.3f}")
