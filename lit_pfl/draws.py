"""What a federation draws at random: from its seed and a purpose alone, whatever else is drawn in the process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from lit_pfl.errors import ConfigError


class Draws:
    """Random numbers for any number of purposes, independent of one another.

    Args:
        seed: the federation's seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def generator(self, *purpose: str | int) -> np.random.Generator:
        """Return a fresh generator for a purpose: the same one whenever it is asked for."""
        words = [w if isinstance(w, int) else int.from_bytes(w.encode(), "big") for w in purpose]
        return np.random.default_rng([self.seed, *words])

    @contextmanager
    def torch(self, purpose: str) -> Iterator[None]:
        """Let PyTorch's default generator draw for a purpose, then put it back."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(self.generator(purpose).integers(2**63)))
            yield

    def choose(self, ids: Sequence[int], share: float, *purpose: str | int) -> list[int]:
        """Return a share of some ids, at least one, or if it is above 1 so many of them; in their order."""
        count = round(share * len(ids)) if share <= 1 else int(share)
        if count >= len(ids):
            return list(ids)
        chosen = self.generator(*purpose).choice(len(ids), max(1, count), replace=False)
        return [ids[i] for i in sorted(chosen)]


def check_share(option: str, share: float, num_clients: int | None = None) -> None:
    """See that an option is a share of the clients or a number of them.

    Raises:
        ConfigError: when it is not, or when there are fewer clients.
    """
    if share <= 0 or (share > 1 and share != int(share)):
        raise ConfigError(f"{option}={share}: give a share above 0 and up to 1, or a whole number of clients.")
    if num_clients is not None and share > num_clients:
        raise ConfigError(f"{option}={share:g} is more than the {num_clients} clients.")
