"""How many CPU threads clients compute with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch.utils.flop_counter import FlopCounterMode

from lit_pfl.evaluation import mean_loss
from lit_pfl.learners import size_of


def choose_threads(learner: L.LightningModule, example: Any, batch_size: int | None) -> int:
    """Count one batch's work: a further thread for every 20 million operations of a forward pass.

    Args:
        learner: any client's.
        example: a batch for it.
        batch_size: samples of a training batch; by default those of the example.
    """
    with FlopCounterMode(display=False) as counter:
        mean_loss(learner, [example])
    operations = counter.get_total_flops() / size_of(example) * (batch_size or size_of(example))
    return max(1, min(torch.get_num_threads(), round(operations / 2e7)))


@contextmanager
def computing(threads: int | None) -> Iterator[None]:
    """Compute with so many threads, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
