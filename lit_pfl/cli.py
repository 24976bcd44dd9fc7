"""The command line: ``lit-pfl fit|validate|test|predict``, LightningCLI over every method and data set."""

import logging
import re
import sys
import warnings
from inspect import isabstract
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import yaml
from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lit_pfl.methods  # noqa: F401 - imported, like data and models, so that classes go by their short names
from lit_pfl.client import Client
from lit_pfl.data import Augment, FederatedDataModule, Partition
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.federation import Federation
from lit_pfl.models import Backbone
from lit_pfl_callbacks import ClientsTable, RoundProgress, RunLogger, run_folder

#: the options whose value is the name of a class
CLASSES: dict[str, type] = {
    "model": Client,
    "data": FederatedDataModule,
    "partition": Partition,
    "augment": Augment,
    "backbone": Backbone,
}


class Parser(LightningArgumentParser):
    """Reads configuration files with their fragments, and says what is wrong in one line."""

    def add_argument(self, *args: Any, **kwargs: Any) -> Any:
        """Add an argument; one for configuration files reads fragments too."""
        if kwargs.get("action") is ActionConfigFile:
            kwargs["action"] = ConfigFile
        return super().add_argument(*args, **kwargs)

    def get_defaults(self, *args: Any, **kwargs: Any) -> Namespace:
        """Return the defaults: a data set without its options, else another one chosen in its place would get them."""
        defaults = super().get_defaults(*args, **kwargs)
        if "data" in defaults:
            defaults["data"].pop("init_args", None)
        return defaults

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message and exit with code 2."""
        if not self.exit_on_error:  # one of several readings of a value that are tried out
            super().error(message, ex)
        keys = re.findall(r'Parser key "([\w.]+)"', message)
        if keys:  # classes within classes: the innermost error is the one that was made
            reason = re.sub(r'.*Parser key "[\w.]+":\s*', "", message, flags=re.DOTALL)
            reason = re.sub(r".*Problem with given class_path '\S+':", "", reason, flags=re.DOTALL)
            reason = re.split(r"\s*- Expected a <class 'NoneType'>|\s*Given value type", reason)[0]
            reason = re.sub(r".*\bErrors:\s*-\s*", "", reason, flags=re.DOTALL)
            wrong = re.search(r"Expected a dot import path string: (\S+)|Expected an instantiatable class", reason)
            if wrong and keys[-1] in CLASSES:
                names = ", ".join(sorted(_names_of_subclasses(CLASSES[keys[-1]])))
                problem = f"there is no {wrong[1]!r}" if wrong[1] else "it has options, but no name"
                reason = f"{problem}; choose one of {names}, or a class path of your own."
            message = f"{'.'.join(keys)}: {reason}"
        fail(message)


def _names_of_subclasses(cls: type) -> set[str]:
    subclasses: list[type] = cls.__subclasses__()
    names = {sub.__name__ for sub in subclasses if not sub.__name__.startswith("_") and not isabstract(sub)}
    return names.union(*map(_names_of_subclasses, subclasses))


class ConfigFile(ActionConfigFile):
    """Reads a configuration file, and before it its ``fragments``: the files that it builds on, by relative paths."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Read."""
        for file in with_fragments(values):
            super().__call__(parser, cfg, file, option_string)
            if cfg.get("fragments"):
                cfg["fragments"] = None  # they are read: the configuration that is saved is whole without them


def with_fragments(file: str, above: tuple[Path, ...] = ()) -> list[str]:
    """Return the files to read for a configuration file, in order: all that it builds on, and itself.

    Args:
        file: the file.
        above: the files that it is a fragment of.

    Raises:
        ConfigError: when a fragment is not there, or builds on a file that is built on it.
    """
    path = Path(file)
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        content = None  # the parser says what is wrong
    fragments = (content.get("fragments") if isinstance(content, dict) else None) or []
    if not isinstance(fragments, list):
        raise ConfigError(f"{file}: fragments: give a list of files, not {fragments!r}.")
    above = (*above, path.resolve())
    files: list[str] = []
    for fragment in (path.parent / str(name) for name in fragments):
        if not fragment.is_file():
            raise ConfigError(f"{file}: fragments: there is no file {fragment}.")
        if fragment.resolve() in above:
            raise ConfigError(f"{file}: fragments: {fragment} is built on this very file.")
        files += with_fragments(str(fragment), above)
    return [*files, file]


class SaveConfig(SaveConfigCallback):
    """Saves the configuration into the run folder, whatever the logger."""

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Save."""
        if trainer.loggers:
            path = run_folder(trainer) / "config.yaml"
            self.parser.save(self.config, path, skip_none=False, overwrite=True, multifile=False)


class FederatedCLI(LightningCLI):
    """LightningCLI whose ``model`` is a method and whose Trainer runs a federation of it."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of the federation, and the key by which configuration files build on others."""
        parser.add_argument("--fragments", type=list[str] | None, help="In a configuration file: files to read before.")
        parser.add_class_arguments(Federation, "federation", skip={"client"}, instantiate=False)
        parser.set_defaults({"data": {"class_path": "lit_pfl.data.Digits"}})

    def before_instantiate_classes(self) -> None:
        """Choose the run folder: the one that the checkpoint is in, or one named after method and data set."""
        config = self.config[self.subcommand]
        if config.fragments is not None:
            raise ConfigError("fragments: only a configuration file has them; give --config FILE for each instead.")
        folder = resumed_folder(config.ckpt_path) if self.subcommand == "fit" else None
        logger = config.trainer.logger
        for one in logger if isinstance(logger, list) else [logger]:
            if getattr(one, "class_path", "").rpartition(".")[2] != RunLogger.__name__:
                continue
            if folder is not None:
                one.init_args.save_dir, one.init_args.name, one.init_args.version = str(folder.parent), "", folder.name
            elif one.init_args.name is None:
                method, data = (config[key].class_path.rpartition(".")[2] for key in ("model", "data"))
                one.init_args.name = f"{method}-{data}"

    def instantiate_classes(self) -> None:
        """Make the Trainer, the data and the federation."""
        super().instantiate_classes()
        self.model = Federation(self.model, **self._get(self.config_init, "federation"))
        if self.trainer.loggers and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            try:
                run_folder(self.trainer).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"The run folder cannot be written: {error}. Choose another with --trainer.logger.save_dir FOLDER."
                ) from None

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Make the Trainer, with what a run shows and keeps by default."""
        config = self._get(self.config_init, "trainer")
        callbacks = [*(config.callbacks or []), ClientsTable()]
        if config.enable_progress_bar is not False:
            callbacks.append(RoundProgress())
        if config.enable_checkpointing is not False:
            callbacks.append(last_checkpoint())
        return super().instantiate_trainer(callbacks=callbacks, **kwargs)


def resumed_folder(ckpt_path: str | None) -> Path | None:
    """Return the run folder that a checkpoint lies in, so that the resumed run goes on there; None if in none."""
    folder = Path(ckpt_path).absolute().parent.parent if ckpt_path else None
    return folder if folder is not None and (folder / "metrics.csv").exists() else None


def last_checkpoint() -> ModelCheckpoint:
    """Return a callback that keeps ``checkpoints/last.ckpt``, of the latest round."""
    # Not save_last=True, which saves only when one of the best is saved too.
    return ModelCheckpoint(filename="last", save_on_train_epoch_end=True, enable_version_counter=False)


def fail(message: str) -> NoReturn:
    """Print what is wrong in one line, and exit with code 2."""
    print(f"lit-pfl: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def main(args: ArgsType = None) -> None:
    """Run the command line.

    Args:
        args: the arguments; by default those of the process.
    """
    if "" not in sys.path:
        sys.path.append("")  # so that class paths may name modules of the current folder
    warnings.filterwarnings("ignore", message=r".*LeafSpec.*", category=FutureWarning)  # Lightning's, of PyTorch's
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.getMessage()
    )
    try:
        FederatedCLI(
            Client,
            FederatedDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=1,
            trainer_defaults={
                "max_epochs": 10,
                "logger": {"class_path": "lit_pfl_callbacks.RunLogger"},
                "devices": 1,
                "num_sanity_val_steps": 0,
                "enable_model_summary": False,
                "log_every_n_steps": 1,
            },
            auto_configure_optimizers=False,
            parser_class=Parser,
            args=args,
        )
    except (ConfigError, UploadError, FileNotFoundError, MisconfigurationException) as error:
        fail(str(error))
    except ValueError as error:
        # jsonargparse's, around one of a class within a class
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        if cause is None:
            raise
        fail(str(cause))
