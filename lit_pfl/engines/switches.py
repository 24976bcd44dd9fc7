"""PyTorch's switches of a process, which change the numbers that come out."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch


class Switches(NamedTuple):
    """PyTorch's switches of a whole process that change its numbers.

    Args:
        deterministic: whether algorithms must be deterministic.
        warn_only: whether those that are not are only warned of.
        dtype: the default type.
        matmul_precision: the precision of products of float32 matrices; None where it was set for one backend.
        mkldnn: whether oneDNN computes.
    """

    deterministic: bool
    warn_only: bool
    dtype: torch.dtype
    matmul_precision: str | None
    mkldnn: bool

    @classmethod
    def now(cls) -> "Switches":
        """Return those of this process."""
        precision: str | None = None
        with suppress(RuntimeError):  # where `fp32_precision` of a backend has been set
            precision = torch.get_float32_matmul_precision()
        return cls(
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_default_dtype(), precision, bool(torch.backends.mkldnn.enabled),
        )  # fmt: skip

    def apply(self) -> None:
        """Set them in this process."""
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.set_default_dtype(self.dtype)
        if self.matmul_precision is not None:
            torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.mkldnn.enabled = self.mkldnn  # type: ignore[assignment]


class Modes(NamedTuple):
    """PyTorch's switches, as they are where a question is put.

    Args:
        grad: whether gradients are computed.
        autocast: the type that is cast to; None for none.
    """

    grad: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device: str) -> "Modes":
        """Return those of this process."""
        on = torch.is_autocast_enabled(device)
        return cls(torch.is_grad_enabled(), torch.get_autocast_dtype(device) if on else None)

    @contextmanager
    def active(self, device: str) -> Iterator[None]:
        """Switch to them."""
        with torch.set_grad_enabled(self.grad), torch.autocast(device, self.autocast, self.autocast is not None):
            yield
