"""Suggest how many layers Psi-Net should share, from a short training of the plain network.

One node trains the network of the configuration, undivided, on all of its training data. Then every neuron's preference
of every class is measured (Eq. 2 of the paper), and how far the neurons of each layer are apart in them (Eq. 5), which
rises where layers stop to be of use to all classes alike. Shown are the layers' total variances and the depth at which
half of the rise is reached, for --model.depth; the run folder has features.csv and preferences.csv.
"""

import argparse

from jsonargparse.typing import PositiveInt

from lit_pfl.cli.run import run as run_command


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s --config FILE [--config FILE ...] [--epochs N] [--batches N] [-- OPTIONS OF FIT]"
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="configuration, as for fit")
    parser.add_argument("--epochs", type=PositiveInt, default=10, help="epochs of training (10; the paper has 50)")
    parser.add_argument("--batches", type=PositiveInt, default=8, help="validation batches to measure on (8)")
    parser.add_argument("options", nargs="*", help="further options of fit, such as -- --data.root FOLDER")


def run(options: argparse.Namespace) -> None:
    """Train and measure."""
    given = [word for file in options.config for word in ("--config", file)]
    run_command([
        "fit", *given, "--trainer.logger.name", "depth", *options.options,
        # one node has all training data, and trains a plain network
        "--model", "StandAlone", "--model.factorization", "null",
        "--data.num_clients", "1", "--data.partition", "Uniform", "--data.permute_labels", "false",
        "--federation.participation", "1", "--federation.evaluate", "before",
        "--trainer.max_epochs", str(options.epochs), "--federation.local_epochs", "1",
        "--trainer.callbacks+=FeatureAlignment", f"--trainer.callbacks.batches={options.batches}",
        "--trainer.callbacks.preferences=true",
    ])  # fmt: skip
