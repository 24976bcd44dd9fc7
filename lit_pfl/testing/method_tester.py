"""A method on a few digits."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lit_pfl.core import Client, ClientSpec
from lit_pfl.data import Digits
from lit_pfl.errors import ConfigError
from lit_pfl.federation import Federation
from lit_pfl.lightning_internals import LastCheckpoint
from lit_pfl.models import Backbone
from lit_pfl_callbacks.tensors import bytes_of, tensors_of

#: 90 images to train on, 90 to validate with; the rest is for testing
FEW: dict[str, Any] = {
    "image_size": 8, "batch_size": 16, "permute_labels": True, "train_fraction": 0.05, "test_fraction": 0.9
}  # fmt: skip
LOCAL_EPOCHS = 2
SPEC = ClientSpec(
    example=(torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64)), num_classes=10, local_epochs=LOCAL_EPOCHS
)


class MixedNet(Backbone):
    """A convolution, batch norm and a classifier."""

    def __init__(self, channels: int, classes: int) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        super().__init__(body, nn.Linear(16, classes))


class GroupNet(Backbone):
    """A network with group norm instead of batch norm."""

    def __init__(self, channels: int, classes: int) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        super().__init__(body, nn.Linear(16, classes))


class PlainNet(Backbone):
    """A chain without any norm, for methods that can do with nothing else."""

    def __init__(self, channels: int, classes: int) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 8), nn.ReLU()
        )
        super().__init__(body, nn.Linear(8, classes))


class LoRALinear(nn.Linear):
    """A frozen linear layer with a LoRA, marked and named as by ``peft``."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
        up = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(up.weight)
        self.lora_B = nn.ModuleDict({"default": up})
        self.scaling = {"default": 2.0}

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the layer makes of (B, inputs)."""
        adapted = self.lora_B["default"](self.lora_A["default"](inputs))
        return super().forward(inputs) + self.scaling["default"] * adapted


class LoRANet(Backbone):
    """A convolution, a frozen layer with a LoRA, and a classifier, for methods that train adapters."""

    def __init__(self, channels: int, classes: int) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(3), nn.Flatten(), LoRALinear(36, 8), nn.ReLU()
        )
        super().__init__(body, nn.Linear(8, classes))


class BackToFront(Federation):
    """A federation whose clients train in the opposite order."""

    def participants(self, completed: int) -> list[int]:
        return super().participants(completed)[::-1]


def trainer(rounds: int = 2, **options: Any) -> L.Trainer:
    """Return a quiet Trainer."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    return L.Trainer(max_epochs=rounds, **{**quiet, **options})


def digits(num_clients: int = 3, **options: Any) -> Digits:
    """Return a few digits a client."""
    return Digits(**{"num_clients": num_clients, **FEW, **options})


def weights(federation: Federation) -> dict[int, dict[str, Tensor]]:
    """Return copies of all clients' states."""
    return {k: {name: t.clone() for name, t in tensors_of(c).items()} for k, c in federation.clients.items()}


class MethodTester:
    """Runs one method on a few digits.

    Args:
        make: the method's class, or anything else that makes its prototype from options of a
            :class:`~lit_pfl.Client`, such as ``backbone``: ``functools.partial(MyMethod, strength=0.1)``.
    """

    def __init__(self, make: Callable[..., Client]) -> None:
        self.make = make

    @cached_property
    def needs_common_labels(self) -> bool:
        """Whether the method refuses data whose labels differ from client to client."""
        return bool(self.method().needs_common_labels)

    def method(self, **options: Any) -> Client:
        """Return the method with a tiny network that it can use."""
        for backbone in (MixedNet, PlainNet, LoRANet):
            method = self.make(**{"backbone": backbone, **options})
            if can_build(method):
                break
        return method

    def digits(self, num_clients: int = 3, **options: Any) -> Digits:
        """Return a few digits a client, under labels of its own unless the method needs common ones."""
        return digits(num_clients, **{"permute_labels": not self.needs_common_labels, **options})

    def run(
        self,
        data: Digits | None = None,
        rounds: int = 2,
        method: Client | None = None,
        kind: type[Federation] = Federation,
        **options: Any,
    ) -> Federation:
        """Run a federation and return it."""
        federation = kind(method or self.method(), **self._options(options))
        trainer(rounds).fit(federation, datamodule=data or self.digits())
        return federation

    def run_saved(self, folder: Path, rounds: int, resume: bool = False) -> Federation:
        """Run a federation in which two of three take part; save it to ``last.ckpt``, and continue from there if
        asked."""
        federation = Federation(self.method(), **self._options({"participation": 2}))
        saving: Any = LastCheckpoint(folder)
        fitting = trainer(rounds, callbacks=[saving], enable_checkpointing=True, default_root_dir=str(folder))
        fitting.fit(federation, datamodule=self.digits(), ckpt_path=folder / "last.ckpt" if resume else None)
        return federation

    @staticmethod
    def _options(options: dict[str, Any]) -> dict[str, Any]:
        return {"seed": 3, "threads": 1, "local_epochs": LOCAL_EPOCHS, **options}


def can_build(method: Client) -> bool:
    """Say whether a method can do with its network; if not it has to say what is in its way."""
    reason = "model."
    try:
        method.build(SPEC)
    except ConfigError as error:
        reason = str(error)
    assert reason.startswith("model."), f"the error does not begin with the option that is in the way: {reason}"
    return reason == "model."


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    """Compare nested states bit for bit.

    Args:
        a: a state: tensors and values in dicts and lists.
        b: the other one.
        where: name of the state in the message.

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
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{where} has another shape or type"
        assert torch.equal(a, b) or bytes_of(a) == bytes_of(b), f"{where} differs"  # NaN does not equal NaN
    else:
        assert a == b, f"{where}: {a!r} and {b!r}"
