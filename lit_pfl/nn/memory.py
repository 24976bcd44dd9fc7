"""What a client remembers from round to round besides its network."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class Memory(nn.Module):
    """Named tensors as buffers: they are in checkpoints and follow the device, and are not trained.

    Args:
        tensors: initial values by name, copied; names may hold dots.

    Example:
        >>> control = Memory({"body.weight": torch.ones(2)}).zero_()
        >>> control["body.weight"]
        tensor([0., 0.])
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = tuple(tensors)
        for name, tensor in tensors.items():
            self.register_buffer(self._key(name), tensor.detach().clone())

    @staticmethod
    def _key(name: str) -> str:
        return name.replace(".", "/")  # a buffer's name must not hold a dot

    def __getitem__(self, name: str) -> Tensor:
        return self.get_buffer(self._key(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Return names and tensors."""
        return ((name, self[name]) for name in self.names)

    @torch.no_grad()
    def copy_(self, tensors: Mapping[str, Tensor]) -> "Memory":
        """Take over the values of tensors of the same names; one may have got another shape since, as in ``setup``."""
        for name, tensor in self.items():
            if tensor.shape != tensors[name].shape:
                tensor = self._buffers[self._key(name)] = torch.empty_like(tensors[name])
            tensor.copy_(tensors[name])
        return self

    def zero_(self) -> "Memory":
        """Set all to zero."""
        for _, tensor in self.items():
            tensor.zero_()
        return self
