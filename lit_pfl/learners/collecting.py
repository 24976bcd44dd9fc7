"""A module that collects something while it is scored, which a federation takes back."""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn


@contextmanager
def warned_of_collecting(learner: L.LightningModule) -> Iterator[None]:
    """Warn where a learner collects something that a checkpoint would have, such as an average of its weights."""
    before = _collected(learner)
    yield
    after = _collected(learner)
    changed = sorted(before.keys() ^ after.keys())
    changed += [name for name in before if name in after and _differ(before[name], after[name])]
    if changed:
        rank_zero_warn(
            f"{type(learner).__name__} collects while it is scored ({', '.join(changed[:3])}), and a federation leaves "
            "a module as it was before; let it collect in on_train_epoch_end."
        )


def _collected(module: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of what a checkpoint has of a module besides weights, by name; of these, the names alone.

    Neither are there copies of what cannot be compared, such as sparse tensors.
    """
    found: dict[str, Tensor | None] = dict.fromkeys(name for name, _ in module.named_parameters())
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                is_plain = buffer.layout is torch.strided and type(buffer) is Tensor
                found[f"{path}.{name}".lstrip(".")] = buffer.detach().clone() if is_plain else None
    return found


def _differ(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return one is not other
    return not bool(((one == other) | ((one != one) & (other != other))).all())  # NaN is what it was
