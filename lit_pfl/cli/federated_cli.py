"""``lit-pfl fit|validate|test|predict``: LightningCLI over every method and data set."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

import lit_pfl.methods  # noqa: F401 - imported, like data and models, so that classes go by their short names
from lit_pfl.cli.folders import check_root, folder_of, root_of_runs, taken_folder
from lit_pfl.cli.messages import refuse_abstract, say
from lit_pfl.cli.options import by_name, of_a_run
from lit_pfl.cli.record import (
    RunRecord,
    begins_anew,
    go_on,
    is_run_logger,
    name_of,
    place,
    refuse_missing,
    saved_record,
    taken,
)
from lit_pfl.cli.stopping import Stopped, Stops
from lit_pfl.cli.trial import (
    check_rounds,
    check_seed,
    open_wandb,
    refuse_null,
    refuse_unknown_metrics,
    try_optimizer,
)
from lit_pfl.core import Client
from lit_pfl.data import FederatedDataModule
from lit_pfl.engines.trainers import several
from lit_pfl.errors import ConfigError
from lit_pfl.federation import Federation
from lit_pfl.federation.trainer import refuse_processes
from lit_pfl.lightning_internals import LastCheckpoint, came_of_loading, leave_jobs_alone
from lit_pfl_callbacks import (
    ClientsTable,
    CommunicationLedger,
    EmbeddingMap,
    Predictions,
    RefusedUploads,
    RoundProgress,
    RoundTimer,
    Similarity,
    SparsityMonitor,
    resume_command,
    run_folder,
)
from lit_pfl_callbacks.rank_zero import be_rank_zero
from lit_pfl_callbacks.run_folder import RUNS

#: what writes a run's tables and fills its loggers, as the defaults have it; a configuration may give its own in place
WATCHING = (RefusedUploads, CommunicationLedger, RoundTimer, SparsityMonitor, Similarity, EmbeddingMap, ClientsTable)


class FederatedCLI(LightningCLI):
    """LightningCLI whose ``model`` is a method and whose Trainer runs a federation of it.

    Args:
        held: what is to be let go of in the end, such as the run folder's lock.
        args: the arguments; None for those of the process.
        kwargs: see LightningCLI.
    """

    def __init__(self, held: ExitStack, args: ArgsType = None, **kwargs: Any) -> None:
        self.held = held
        self.words = args if isinstance(args, list) else sys.argv[1:]
        self.changed: dict[str, tuple[Any, Any]] = {}
        self.folder: Path | None = None  # the run folder that the checkpoint is in
        self.loggers: list[list[Any]] = []  # those of the run that is resumed
        self.stops = Stops()
        be_rank_zero()
        super().__init__(Client, FederatedDataModule, args=args, **kwargs)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # a static method there
        """Return the commands: where it is plain which one is meant, only that, since each takes its time to set up."""
        commands = super().subcommands()
        return {word: commands[word] for word in self.words[:1] if word in commands} or commands

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of the federation, and the key by which configuration files build on others."""
        parser.add_argument("--fragments", type=list[str] | None, help="In a configuration file: files to read before.")
        parser.add_argument(
            "--folder",
            type=str | None,
            help="The folder of a new run; by default one of its own in trainer.default_root_dir, or runs/.",
        )
        parser.add_class_arguments(Federation, "federation", skip={"client"}, instantiate=False)
        parser.set_defaults({"data": {"class_path": "lit_pfl.data.Digits"}})

    def _parse_ckpt_path(self) -> None:
        """Do without LightningCLI's look into the checkpoint for options: it has none there, and this takes time."""

    def _set_seed(self) -> None:
        """Take the seed, if it is one."""
        check_seed(self.own.seed_everything)
        super()._set_seed()

    @property
    def own(self) -> Namespace:
        """The configuration of the command that runs."""
        return self.config[self.subcommand]

    @property
    def scoring(self) -> bool:
        """Whether nothing is trained."""
        return self.subcommand != "fit"

    def before_instantiate_classes(self) -> None:
        """See that the checkpoint fits the options; choose the run folder: the checkpoint's, or one by name."""
        if self.own.fragments is not None:
            raise ConfigError("fragments: only a configuration file has them; give --config FILE for each instead.")
        dumped = self.parser.dump(self.config, skip_unset=False, skip_validation=True)
        self.given: dict[str, Any] = yaml.safe_load(dumped)[self.subcommand]
        backbone = (self.given["model"].get("init_args") or {}).get("backbone")
        if isinstance(backbone, dict):
            refuse_abstract("model.backbone", backbone["class_path"])
        check_rounds(self.own.trainer.max_epochs)
        refuse_null(self.given)
        if self.own.ckpt_path == "last":
            self._find_last()
        if self.own.ckpt_path is not None:
            self._compare_with_checkpoint()
        elif self.subcommand == "predict":
            raise ConfigError("ckpt_path: predict needs a checkpoint; give --ckpt_path RUN/checkpoints/last.ckpt.")
        elif self.scoring:
            say("No --ckpt_path is given: the weights are untrained, and nothing is written.")
        self._refuse_folder()
        self._set_up_loggers()

    def _find_last(self) -> None:
        """Take the last checkpoint of the folder that is named; a fit without one begins there."""
        if not self.own.folder:
            raise ConfigError("ckpt_path=last: give --folder RUN with it, or --ckpt_path RUN/checkpoints/last.ckpt.")
        last = Path(self.own.folder, "checkpoints", "last.ckpt")
        self.own.ckpt_path = str(last) if self.scoring or last.exists() else None

    def _compare_with_checkpoint(self) -> None:
        path = str(self.own.ckpt_path)
        if "://" in path:
            return
        record = saved_record(Path(path), self.own.weights_only)
        self.folder = folder_of(Path(path))
        if record is None:
            return  # written from Python: the federation compares what it knows
        before = record["options"]
        self.loggers = record["loggers"]
        self.changed = taken(before, by_name(of_a_run(self.given)), self.scoring)
        if self.changed and not self.scoring:
            say("Continues with " + ", ".join(f"{k}: {new} (was {old})" for k, (old, new) in self.changed.items()))

    def _refuse_folder(self) -> None:
        """See that a folder is asked for where there is none yet."""
        if self.own.folder is None:
            return
        if self.folder is not None and self.folder.resolve() != Path(self.own.folder).resolve():
            raise ConfigError(
                f"folder={self.own.folder}: what is of a checkpoint is written into the run that it is of, "
                f"{self.folder}; leave --folder out{'' if self.scoring else ', or --ckpt_path for a run of its own'}."
            )
        if self.scoring and self.own.ckpt_path is None:
            raise ConfigError(
                f"folder={self.own.folder}: {self.subcommand} writes only what is of a checkpoint; give --ckpt_path "
                f"{self.own.folder}/checkpoints/last.ckpt, or leave --folder out."
            )

    def _set_up_loggers(self) -> None:
        trainer = self.own.trainer
        listed = isinstance(trainer.logger, list)
        loggers = [one for one in (trainer.logger if listed else [trainer.logger]) if one]
        loggers.sort(key=lambda one: not is_run_logger(one))  # the folder of the first one is the run's
        refuse_missing(loggers)
        if self.scoring and self.own.ckpt_path is None:
            loggers = []
        if not self.scoring:
            go_on(loggers, self.loggers)
            for one in loggers if self.folder is not None else ():
                if begins_anew(one):
                    first = one is loggers[0]
                    what = f"this one gets another folder than {self.folder}" if first else "it begins another one"
                    say(f"{name_of(one)} cannot continue a run: {what}.")
        folder = self.folder or (self.own.folder and Path(self.own.folder))
        if folder and loggers:
            place(loggers, folder)
        for options in (one.init_args for one in loggers if hasattr(one, "init_args")):
            if options.get("save_dir") == RUNS:
                options.save_dir = root_of_runs(trainer.default_root_dir)
        for options in (one.init_args for one in loggers if is_run_logger(one)):
            options.add_only = self.scoring
            if options.name is None:
                method, data = (self.own[key].class_path.rpartition(".")[2] for key in ("model", "data"))
                options.name = f"{method}-{data}"
        if self.own.folder and self.folder is None and not any(map(is_run_logger, loggers)):
            raise ConfigError("folder: RunLogger writes there, and trainer.logger has none; leave one of the two out.")
        trainer.logger = loggers if listed and loggers else loggers[0] if loggers else False

    def instantiate_classes(self) -> None:
        """Make the Trainer, the data and the federation, and take the run folder."""
        super().instantiate_classes()
        refuse_processes(self.trainer)
        if self.own.folder is not None:  # it continues from that folder's checkpoint, and from no other
            leave_jobs_alone(self.trainer)
        self.model, trainer = Federation(self.model, **self._get(self.config_init, "federation")), self.trainer
        try_optimizer(self.model, trainer, self.given["model"].get("init_args") or {})
        begins = not self.scoring and self.own.ckpt_path is None
        if trainer.loggers and not trainer.fast_dev_run and trainer.is_global_zero:  # type: ignore[attr-defined]
            option = "trainer.logger.version" if self.own.folder is None else "folder"
            self.held.enter_context(taken_folder(trainer, self.folder is not None, begins, option))
            open_wandb(trainer.loggers)
        elif not trainer.loggers and begins:
            check_root(trainer)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Make the Trainer, with what a run shows and keeps by default."""
        config = self._get(self.config_init, "trainer")
        own = several(config.callbacks)
        watching = [kind() for kind in WATCHING if not any(isinstance(callback, kind) for callback in own)]
        # Stops first: a round's end begins with it.
        callbacks = [self.stops, *own, *watching, RunRecord(self.given, self.changed)]
        if self.subcommand == "predict":
            callbacks.append(Predictions())
        if config.enable_progress_bar is not False and not any(isinstance(one, ProgressBar) for one in own):
            callbacks.append(RoundProgress())
        if config.enable_checkpointing is not False and not any(isinstance(one, LastCheckpoint) for one in own):
            callbacks.append(LastCheckpoint())
        try:
            return super().instantiate_trainer(callbacks=callbacks, **kwargs)
        except (ValueError, TypeError, RuntimeError, ImportError) as error:
            if error.__cause__ is not None:  # of a callback or a logger, which says itself what is wrong
                raise
            raise ConfigError(f"trainer: {' '.join(str(error).split())}") from error
        except MisconfigurationException as error:
            given = f"trainer, with accelerator={config.accelerator} and devices={config.devices}"
            raise ConfigError(f"{given}: {error}") from error

    def fit(self, model: Federation, **kwargs: Any) -> None:
        """Run the federation. A stop keeps its last complete round, and says how to continue."""
        with self.stops.listening():
            try:
                self._run(self.trainer.fit, model, **kwargs)
                self.stops.written()
            except (SystemExit, SIGTERMException) as ended:
                stopped = self.stops.asked or (Stopped(15) if isinstance(ended, SIGTERMException) else None)
                if stopped is None:
                    raise
                self._say_how_to_go_on(stopped.name)
                raise stopped from None
            finally:
                model.engine.abort()

    def _say_how_to_go_on(self, signal: str) -> None:
        command = resume_command(run_folder(self.trainer)) if self.trainer.loggers else None
        if command is None:
            say(f"Stopped by {signal} before there was a checkpoint; nothing is kept.")
        else:
            say(f"Stopped by {signal}; a round that was not complete is dropped. Continue with:\n  {command}")

    def validate(self, model: Federation, **kwargs: Any) -> None:
        """Score on validation data."""
        self._run(self.trainer.validate, model, **kwargs)

    def test(self, model: Federation, **kwargs: Any) -> None:
        """Score on test data."""
        self._run(self.trainer.test, model, **kwargs)

    def predict(self, model: Federation, **kwargs: Any) -> None:
        """Write predictions of test data."""
        self._run(self.trainer.predict, model, **kwargs)

    def _run(self, command: Any, model: Federation, **kwargs: Any) -> None:
        try:
            command(model, **kwargs)
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            if came_of_loading(error):
                raise ConfigError(f"{kwargs['ckpt_path']} is not a whole checkpoint: {error!r}.") from error
            refuse_unknown_metrics(self.trainer, error)
            raise
