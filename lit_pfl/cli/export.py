"""Write the personalized model of one client of a run, with preprocessing, label names and a model card, into a folder
that needs nothing of this library: as safetensors, as a program of torch.export and as ONNX."""

import argparse
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.cli.federated_cli import FederatedCLI
from lit_pfl.cli.options import by_name
from lit_pfl.cli.run import execute
from lit_pfl.core import Client
from lit_pfl.data import FederatedDataModule, ImageSet, has_batches, labels_of
from lit_pfl.errors import ConfigError
from lit_pfl.export.deployment import CARD, LARGEST_DIFFERENCE, SCRIPT, Deployment, Pixels, check_packages, pixels_about
from lit_pfl.federation import Federation
from lit_pfl.learners.classifier import images_in
from lit_pfl.learners.scoring import predictions
from lit_pfl.lightning_internals import undisturbed
from lit_pfl_callbacks.clients import COLUMNS
from lit_pfl_callbacks.run_folder import latest_config, read_rows

EXAMPLES = 64


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the run folder")
    parser.add_argument(
        "--client", type=int, required=True, help="id of the client whose personalized model is exported"
    )
    parser.add_argument("--to", type=Path, help="folder to write. Default: RUN/export/client_N")
    parser.add_argument("--onnx", action=argparse.BooleanOptionalAction, default=True, help="write ONNX too")


def run(options: argparse.Namespace) -> None:
    """Export."""
    check_packages(options.onnx)
    cli = loaded(options.run_folder)
    scores = _scores(options.run_folder, options.client)
    model = deployment(cli.model, cli.datamodule, options.client, {**_facts(by_name(cli.given)), **scores})
    folder = options.to or options.run_folder / "export" / f"client_{options.client}"
    differences = model.save(folder, options.onnx)
    print(f"Client {options.client}'s model: {folder}")
    for file, difference in differences.items():
        print(f"  {file}: outputs differ from the client's by {difference:.1e} at most")
    if (folder / SCRIPT).exists():
        print(f"See {CARD} there; to classify an image: cd {quote(str(folder))} && python {SCRIPT} IMAGE")


def loaded(folder: Path) -> FederatedCLI:
    """Return the command line of a run as it was, on the CPU and with its last checkpoint; nothing is written.

    Its ``model`` is the federation, its ``datamodule`` the data, ``given`` its options.

    Args:
        folder: the run folder.

    Raises:
        ConfigError: when it is none, when it has no checkpoint, and for whatever :class:`FederatedCLI` finds wrong.
    """
    config, checkpoint = latest_config(folder), folder / "checkpoints" / "last.ckpt"
    for file in (config, checkpoint):
        if not file.is_file():
            raise ConfigError(
                f"{folder} has no {file.relative_to(folder)}; give the folder of a run that `lit-pfl fit` has saved."
            )
    # Predicting nothing is what loads a checkpoint and does no more.
    options = {"limit_predict_batches": "0", "logger": "false", "callbacks": "null", "accelerator": "cpu",
               "enable_progress_bar": "false", "devices": "1", "strategy": "auto"}  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--trainer.{name}", value)]
    words += ["--federation.engine", "Local"]  # whatever cluster the run was on
    with ExitStack() as held, undisturbed():
        return execute(held, ["predict", "--config", str(config), "--ckpt_path", str(checkpoint), *words])


def deployment(
    federation: Federation, data: FederatedDataModule, client: int, facts: dict[str, Any] | None = None
) -> Deployment:
    """Return a client's personalized model in the state in which it is scored, ready to be written.

    Args:
        federation: it has been set up.
        data: its data.
        client: the client's id.
        facts: lines of the model card.

    Raises:
        ConfigError: when there is no such client, or its inputs are no tensors.
    """
    network = federation.standalone(client)
    own, labels = data.client(client), data.label_names(client)
    batch = next(iter(own.test), own.example)
    if federation.prototype.learner is None:
        inputs: Any = images_in(batch)
    else:
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
    if federation.ask(partial(_predicts_otherwise, network, batch, inputs), [client], as_scored=True)[client]:
        rank_zero_warn(
            f"Client {client}: it predicts other values than the forward of {type(network).__name__}, which is what is "
            "exported; what predict_step and hooks of batches (on_after_batch_transfer) do is left out."
        )
    facts = {
        "Client": client, "Trained on": f"{own.num_samples} samples", **(_classes(own, labels) if labels else {}),
        **(facts or {}),
    }  # fmt: skip
    samples: Any = getattr(data, "data", None)
    if isinstance(samples, ImageSet):
        images = _images(samples, own)
        pixels = Pixels(network, samples.mean.cpu(), samples.std.cpu())
        return Deployment(pixels.cpu(), images, labels, pixels_about(images.shape[1:]), facts)
    if not isinstance(inputs, torch.Tensor):
        raise ConfigError(f"Client {client}: its model takes {type(inputs).__name__}; a tensor can be exported.")
    inputs = inputs.cpu().expand(2, *inputs.shape[1:]) if len(inputs) < 2 else inputs.cpu()
    return Deployment(network.cpu(), inputs.contiguous(), labels, facts=facts)


def _predicts_otherwise(network: torch.nn.Module, batch: Any, inputs: Any, client: Client) -> bool:
    """Say whether a client predicts other values of a batch than its network alone of the inputs in it."""
    try:
        with client.as_evaluated(client.evaluated[0]) as learner:
            [predicted] = predictions(learner, [batch])
        with torch.no_grad():
            alone = network.eval()(inputs.to(client.device))
    except Exception:  # who cannot predict has nothing to compare
        return False
    try:  # also classes instead of logits, or both in a dictionary
        torch.testing.assert_close(
            predicted, alone, rtol=1e-5, atol=LARGEST_DIFFERENCE, equal_nan=True, check_dtype=False
        )
    except (AssertionError, TypeError, ValueError):
        return True
    return False


def _images(samples: ImageSet, own: Any) -> torch.Tensor:
    """Return some of a client's own images as they are, uint8."""
    part = own.test if has_batches(own.test) else own.train
    places = part.in_order().samples_of()[:EXAMPLES]
    places = places.repeat(2)[: max(2, len(places))]
    images = samples.images[places].cpu()
    return images.expand(-1, samples.channels, -1, -1).contiguous()


def _classes(own: Any, labels: list[str]) -> dict[str, str]:
    counts = torch.bincount(labels_of(own.train).cpu(), minlength=len(labels)).tolist()
    there = [f"{label} ({count})" for label, count in zip(labels, counts, strict=True) if count]
    return {"Classes in its training data": ", ".join(there)}


def _facts(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "Method": str(options["model"]).rpartition(".")[2],
        "Data": str(options["data"]).rpartition(".")[2],
        "Seed": options.get("seed_everything"),
        "Written by": f"lit-pfl {version('lit-pfl')}, PyTorch {torch.__version__}",
        "Good for": "inputs like this client's own; what it is worth elsewhere has not been measured",
    }


def _scores(folder: Path, client: int) -> dict[str, str]:
    """Return the last scores of a client's own model, by split, as the run has written them."""
    rows = [row for row in read_rows(folder / "clients.csv") if row["client"] == str(client)]
    latest = {row["split"]: row for row in reversed(rows) if row["round"] == rows[-1]["round"]}
    return {
        f"Scores on its {split} data": ", ".join(
            [f"{name} {float(value):.4f}" for name, value in row.items() if name not in COLUMNS and value != ""]
        )
        + f" ({row['n'] + ' samples, ' if row.get('n') else ''}{row['model']}, after round {row['round']})"
        for split, row in latest.items()
    }
