"""A client whose Trainer has several processes, which train one model."""

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def check_strategy(trainer: L.Trainer) -> None:
    """See that every process of a client holds the whole model.

    Raises:
        MisconfigurationException: when it does not.
    """
    if trainer.world_size > 1 and type(trainer.strategy) is not DDPStrategy:
        raise MisconfigurationException(
            f"FederatedLoop: a client of {trainer.world_size} processes needs strategy='ddp', under which each holds "
            f"the whole model; with {type(trainer.strategy).__name__}, give Trainer(devices=1)."
        )


def check_alike(trainer: L.Trainer, module: L.LightningModule) -> None:
    """See that all processes of a client have come to the same weights, since the first one uploads for all.

    What a module does besides steps along gradients, which are averaged over the processes, may differ among them, for
    example what it counts in its own part of the data.

    Raises:
        MisconfigurationException: in all processes, when a weight's norm differs by more than rounding.
    """
    if trainer.world_size == 1:
        return
    weights = {name: weight.detach() for name, weight in module.named_parameters() if weight.requires_grad}
    if not weights:
        return
    norms = torch.stack([torch.linalg.vector_norm(weight).double() for weight in weights.values()])
    of_all = trainer.strategy.all_gather(norms)  # (processes, weights)
    alike = torch.isclose(of_all, of_all[:1], rtol=1e-3, atol=1e-6, equal_nan=True).all(0)
    if other := next((name for name, same in zip(weights, alike.tolist(), strict=True) if not same), None):
        raise MisconfigurationException(
            f"FederatedLoop: {other!r} differs among this client's processes, since {type(module).__name__} changes it "
            "by more than its averaged gradients; give Trainer(devices=1)."
        )
