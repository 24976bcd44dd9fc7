"""Comparing states bit for bit."""

from typing import Any

import torch
from torch import Tensor


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Compare nested states bit for bit.

    Raises:
        AssertionError: naming the first place where they differ.
    """
    if isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where}: {sorted(map(str, a.keys() ^ b.keys()))} is in one of them only"
        for key in a:
            assert_equal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), f"{where}: {len(a)} and {len(b)} entries"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}/{i}")
    elif isinstance(a, Tensor):
        assert torch.equal(a, b), f"{where} differs"
    else:
        assert a == b, f"{where}: {a!r} and {b!r}"
