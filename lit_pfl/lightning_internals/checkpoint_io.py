"""Where checkpoints go: the federation's to a file, its clients' into the federation's."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins import CheckpointIO

from lit_pfl_callbacks.files import replacing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it, so that a killed process leaves the former one whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Save."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with replacing(Path(path)) as file:
            torch.save(checkpoint, file)


class MemoryCheckpointIO(CheckpointIO):
    """Keeps the latest checkpoint of a client's Trainer in memory, under whatever name it is saved."""

    checkpoint: dict[str, Any]

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save: keep references, copy nothing."""
        self.checkpoint = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load."""
        return self.checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Forget."""
        self.checkpoint = {}
