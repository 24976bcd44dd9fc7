"""Memory that every batch frees and the next one needs again."""

import torch


def keep_freed_memory() -> None:
    """Let the C library keep what tensors free, up to 64 MB, instead of handing it back to the system at once.

    A small network's batch otherwise gives some megabytes back and faults them in again, page by page: a tenth of the
    time of a CNN's training on two threads. The GNU library keeps as much as twice the largest block that was ever
    freed, and blocks up to 32 MB count; so one is taken here and freed, without ever being touched. Where another
    library is in use this does nothing.
    """
    torch.empty(2**25 - 2**14, dtype=torch.uint8)
