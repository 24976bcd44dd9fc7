"""Doing what is typed after ``lit-pfl``, and saying in one line what is wrong with it."""

import errno
import logging
import re
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

from lightning.pytorch.cli import ArgsType
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_pfl.cli.federated_cli import FederatedCLI
from lit_pfl.cli.messages import fail
from lit_pfl.cli.parser import Parser
from lit_pfl.errors import ConfigError, UploadError

DESCRIPTION = "Personalized federated learning: a round is an epoch, max_epochs the number of rounds."


def execute(held: ExitStack, args: ArgsType) -> FederatedCLI:
    """Do what is typed, and return what did it.

    Args:
        held: what is to be let go of in the end, such as the run folder's lock.
        args: the arguments; None for those of the process.
    """
    # So that class paths may name modules of the current folder, before installed ones of the same name, as with
    # `python -m`; by its name, since a configuration file is read in its own folder.
    if sys.path[0] not in ("", here := str(Path.cwd())):
        sys.path.insert(0, here)
    warnings.filterwarnings("ignore", message=r".*LeafSpec.*", category=FutureWarning)  # Lightning's, of PyTorch's
    warnings.filterwarnings("ignore", message="Checkpoint directory .* is not empty")  # a resumed run's own
    # a command beside Lightning's makes its own arguments of those of the process
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.getMessage()
    )
    return FederatedCLI(
        held,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        seed_everything_default=1,
        trainer_defaults={
            "max_epochs": 10,
            "logger": {"class_path": "lit_pfl_callbacks.RunLogger"},
            "devices": 1,
            "num_sanity_val_steps": 0,
            "enable_model_summary": False,
        },
        auto_configure_optimizers=False,
        parser_class=Parser,
        parser_kwargs={"description": DESCRIPTION},
        args=args,
    )


def run(args: ArgsType) -> None:
    """Run the command line, and say in one line what is wrong.

    Args:
        args: the arguments; None for those of the process.
    """
    try:
        with ExitStack() as held:
            execute(held, args)
    except (ConfigError, UploadError, OSError, MisconfigurationException) as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        fail(f"The disk is full: a file of the run cannot be written ({error})." if full else str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except ValueError as error:
        # jsonargparse's, around one of a class within a class
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError | MisconfigurationException):
            cause = cause.__cause__
        # for an option of several kinds, such as a number or a class, it raises from the first kind's error only
        line = re.search(r"^\s*- ((?:federation|model|data)\.[\w.]+=.*)$", str(error), re.MULTILINE)
        if cause is None and line is None:
            raise
        fail(line[1] if cause is None and line else str(cause))
