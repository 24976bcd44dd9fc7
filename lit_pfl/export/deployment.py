"""A model with all that is needed to use it elsewhere, in a folder that needs nothing of this library."""

import copy
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_pfl.errors import ConfigError, first_line
from lit_pfl.export.network import save_model, save_program, to_dense
from lit_pfl_callbacks.files import write_whole

WEIGHTS, PROGRAM, ONNX, ABOUT, CARD, SCRIPT = (
    "model.safetensors", "model.pt2", "model.onnx", "model.json", "README.md", "classify.py",
)  # fmt: skip
LARGEST_DIFFERENCE = 1e-4
CLASSIFY = """\
import json, sys, numpy, onnxruntime, PIL.Image
model, session = json.load(open("model.json")), onnxruntime.InferenceSession("model.onnx")
image = numpy.asarray(PIL.Image.open(sys.argv[1]).convert(model["mode"]).resize(model["size"]))
logits = session.run(None, {"inputs": image.reshape(model["shape"]).transpose(0, 3, 1, 2)})[0]
print(model["labels"][logits.argmax()])
"""


class Pixels(nn.Module):
    """A network for images as they are: (B, C, H, W) uint8.

    Args:
        network: maps normalized images to logits.
        mean: (C,) or (1,), of values from 0 to 1.
        std: likewise.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", mean.detach().clone().view(-1, 1, 1))
        self.register_buffer("std", std.detach().clone().view(-1, 1, 1))
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Return (B, classes) logits."""
        return self.network((images.float() / 255 - self.mean) / self.std)


@dataclass(frozen=True)
class Deployment:
    """A model, and what is to be known about it.

    Args:
        network: the model, with its preprocessing; it stays as it is.
        examples: (B, ...) inputs of it, B at least 2, on which what is written is compared with it.
        labels: names of the classes, in the order of the logits; None where there are none. Of a model that has not as
            many outputs, such as a single logit, they are left out.
        about: further entries of ``model.json``.
        facts: lines of the model card, by what they are about.
    """

    network: nn.Module
    examples: Tensor
    labels: Sequence[str] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: str | os.PathLike[str], onnx: bool = True) -> dict[str, float]:
        """Write the folder: weights, program, ONNX, ``model.json``, a model card, and for images a script.

        Every file is written next to its place and renamed. Factorized and Hadamard weights are written as the plain
        ones that they make.

        Args:
            folder: it is made if it is not there.
            onnx: whether ONNX is among the formats; it needs the packages of the extra ``export``.

        Returns:
            By how much the logits of each format are off at most, by file.

        Raises:
            ConfigError: when the extra is not installed, the model cannot be followed or has no ONNX, or a format does
                not compute what the model does.
        """
        check_packages(onnx)
        folder, network = Path(folder), to_dense(self.network).eval()
        expected = self._outputs()
        save_model(network, folder / WEIGHTS)
        try:
            save_program(network, folder / PROGRAM, self.examples)
        except Exception as error:  # whatever a forward pass may do with what is no tensor
            name = type(self.network).__name__
            raise ConfigError(f"{name} cannot be exported by torch.export: {first_line(error)}") from error
        with torch.no_grad():
            found = {PROGRAM: torch.export.load(folder / PROGRAM).module()(self.examples)}
        if onnx:
            try:
                save_onnx(folder / PROGRAM, folder / ONNX)
            except Exception as error:  # what ONNX has no operator for; what this PyTorch and this onnxscript cannot
                raise ConfigError(
                    f"{type(self.network).__name__} cannot be written as ONNX by PyTorch {torch.__version__}, which "
                    f"another version may be able to: {_last_cause(error)}; or do without it, --no-onnx."
                ) from error
            found[ONNX] = run_onnx(folder / ONNX, self.examples)
        differences = {file: _difference(logits, expected) for file, logits in found.items()}
        for file, difference in differences.items():
            if not difference <= LARGEST_DIFFERENCE:
                raise ConfigError(f"{folder / file} does not compute what the model does: it is off by {difference:g}.")
        logits = self.labels is not None and expected.shape[1:] == (len(self.labels),)
        self._describe(folder, differences, self.labels if logits else None)
        return differences

    def _outputs(self) -> Tensor:
        """Return what the model computes of the examples."""
        name = type(self.network).__name__
        try:
            with torch.no_grad():
                outputs = copy.deepcopy(self.network).eval()(self.examples)
        except Exception as error:  # whatever somebody's forward pass may do
            raise ConfigError(f"{name} cannot be exported: its forward does not run: {first_line(error)}") from error
        if not isinstance(outputs, Tensor):
            raise ConfigError(
                f"{name} cannot be exported: its forward returns a {type(outputs).__name__}; it must return a tensor."
            )
        return outputs

    def _describe(self, folder: Path, differences: Mapping[str, float], labels: Sequence[str] | None) -> None:
        shape = list(self.examples.shape[1:])
        about = {"input": {"name": "inputs", "shape": [None, *shape], "dtype": str(self.examples.dtype)[6:]}}
        labels = None if labels is None else list(labels)
        write_whole(folder / ABOUT, json.dumps({**about, "labels": labels, **self.about}, indent=2) + "\n")
        files = [WEIGHTS, *differences, ABOUT]
        if ONNX in differences and self.about.get("mode") and labels is not None:
            write_whole(folder / SCRIPT, CLASSIFY)
            files.append(SCRIPT)
        sizes = {file: (folder / file).stat().st_size for file in files}
        write_whole(folder / CARD, card(self.facts, labels, sizes, differences, shape))


def _last_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def check_packages(onnx: bool) -> None:
    """See that what writes ONNX is there, if it is asked for.

    Raises:
        ConfigError: when it is not.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if onnx and missing:
        raise ConfigError(
            f"ONNX needs {', '.join(missing)}: pip install 'lit-pfl[export]'; or do without it, --no-onnx."
        )


def save_onnx(program: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write a program of :func:`~lit_pfl.export.save_program` as ONNX, weights included, for batches of any size.

    Its input is called ``inputs``, its output ``logits``.
    """
    exported = torch.onnx.export(
        torch.export.load(program), dynamo=True, input_names=["inputs"], output_names=["logits"], verbose=False
    )
    assert exported is not None
    write_whole(Path(path), exported.model_proto.SerializeToString())


def run_onnx(path: str | os.PathLike[str], inputs: Tensor) -> Tensor:
    """Return what an ONNX file computes, by ONNX Runtime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    [logits] = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    return torch.from_numpy(logits)


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return by how much two results differ at most; infinities must agree."""
    same = (found == expected) | (found.isnan() & expected.isnan())
    return float(torch.where(same, 0.0, (found - expected).abs()).max()) if found.numel() else 0.0


def card(
    facts: Mapping[str, Any],
    labels: Sequence[str] | None,
    sizes: Mapping[str, int],
    differences: Mapping[str, float],
    shape: Sequence[int],
) -> str:
    """Return a model card: what it is, what is in the folder, how to use it."""
    lines = ["---", "library_name: torch", "tags: [personalized-federated-learning]", "---", "", "# Model card", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "## Files", "", "| file | bytes | largest difference of outputs |", "|---|---|---|"]
    lines += [
        f"| {file} | {size} | {f'{differences[file]:.1e}' if file in differences else ''} |"
        for file, size in sizes.items()
    ]
    lines += ["", "## Use", "", f"Inputs are a batch of {' x '.join(map(str, shape))}; preprocessing is in the model."]
    if SCRIPT in sizes:
        lines += ["", "```", f"python {SCRIPT} IMAGE", "```"]
    lines += ["", "```python", "import torch", f'model = torch.export.load("{PROGRAM}").module()', "```"]
    if labels is not None:
        lines += ["", "## Labels", "", "In the order of the outputs:", ""]
        lines += [f"{number}. {label}" for number, label in enumerate(labels)]
    return "\n".join(lines) + "\n"


def pixels_about(shape: Sequence[int]) -> dict[str, Any]:
    """Return the entries of ``model.json`` that tell how an image becomes an input of (C, H, W)."""
    channels, height, width = shape
    return {
        "mode": {1: "L", 3: "RGB"}.get(channels),
        "size": [width, height],
        "shape": [1, height, width, channels],
        "values": "0 to 255; scaled and normalized in the model",
    }
