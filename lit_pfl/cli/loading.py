"""A run that is over, loaded again to be looked at."""

from contextlib import ExitStack
from pathlib import Path

from lit_pfl.cli.command import FederatedCLI
from lit_pfl.cli.run import command
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import undisturbed
from lit_pfl_callbacks import latest_config


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
                f"{folder} is not the folder of a run that was made by `lit-pfl fit`: it has no {file.name}."
            )
    # Predicting nothing is what loads a checkpoint and does no more.
    options = {"limit_predict_batches": "0", "logger": "false", "callbacks": "null", "accelerator": "cpu",
               "enable_progress_bar": "false", "devices": "1", "strategy": "auto"}  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--trainer.{name}", value)]
    with ExitStack() as held, undisturbed():
        return command(held, ["predict", "--config", str(config), "--ckpt_path", str(checkpoint), *words])
