"""Which process of a training writes and warns."""

from lightning.pytorch.utilities.rank_zero import rank_zero_only


def be_rank_zero() -> None:
    """Let this process write to loggers, warn and call all hooks, as the only one of its training.

    By the number that SLURM or torchrun has given it, Lightning may take it for one of several that train one model,
    where the first one writes for all.
    """
    rank_zero_only.rank = 0  # type: ignore[attr-defined]
