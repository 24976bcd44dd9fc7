"""What is wrong is said in one line: the option, what was given, what would be right."""

import ast
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

import lit_pfl
import lit_pfl.methods
from cli.typed import TINY, typed
from lit_pfl.cli.messages import CLASSES, names_to_choose
from lit_pfl.cli.overview import families, methods

#: what is typed, behind a configuration where it begins with an option, and how the line begins that comes
REFUSED = [
    ("--nonsense 3", "unrecognized arguments: --nonsense 3"),
    ("--federation.partcipation 1", "unrecognized arguments: --federation.partcipation 1 "
                                    "Did you mean federation.participation?"),
    ("--trainer.devices 0", "trainer, with accelerator=cpu and devices=0: "),
    ("--rounds 3", "unrecognized arguments: --rounds 3 Did you mean trainer.max_epochs?"),
    ("--lr 3", "unrecognized arguments: --lr 3 Did you mean model.optimizer.lr?"),
    ("--model.lr 3", "model: Option 'lr' is not accepted. Did you mean model.optimizer.lr?"),
    ("-modle FedAvg", "unrecognized arguments: -modle FedAvg Did you mean model?"),
    ("--data Digits --data.root X", "data: Option 'root' is not accepted. It has "),
    ("--config group.yaml", "Subcommand 'fit' does not accept option 'modle.init_args.tau' Did you mean model?"),
    ("fit --config nope.yaml", "config=nope.yaml: there is no such file, and no configuration of this name. "
                               "`lit-pfl configs` lists all."),
    ("fit --config simfd.yaml", "config=simfd.yaml: there is no such file, and no configuration of this name. "
                                "Did you mean simfed?"),
    *((f"{command} finished/run", "finished/run is a run's folder; give --config finished/run/config.yaml --ckpt_path "
                                  "finished/run/checkpoints/last.ckpt")
      for command in ("test", "predict", "validate", "fit")),
    ("test nowhere", "unrecognized arguments: nowhere"),
    ("--data.partition Dirichlet --data.partition.lr 3",
     "data.partition: Option 'lr' is not accepted. It has alpha, "),
    ("--model fedavg", "model: there is no 'fedavg'; choose one of APFL, "),
    ("--config key.yaml", "Subcommand 'fit' does not accept option 'federation.local_epoch' "
                          "Did you mean federation.local_epochs?"),
    ("--config no_yaml.yaml", "no_yaml.yaml is not YAML: "),
    ("--model.tua 3", "model: Option 'tua' is not accepted. Did you mean tau?"),
    ("--model.backbone.widht 3", "model.backbone: Option 'widht' is not accepted. Did you mean width?"),
    ("--data.partition Dirichlet --data.partition.alhpa 3",
     "data.partition: Option 'alhpa' is not accepted. Did you mean alpha?"),
    ("--model.optimizer Adm", "model.optimizer: there is no 'Adm'; choose one of ASGD, "),
    ("--model FedAwg", "model: there is no 'FedAwg'; choose one of APFL, APPLE, AgnosticFL, "),
    ("--model TwoModels", "model: there is no 'TwoModels'; choose one of APFL, "),
    ("--model.backbone Backbone", "model.backbone=Backbone: it is only there to be built on; choose one of CNN, "),
    ("--model.backbone ResNet", "model.backbone: there is no 'ResNet'; choose one of CNN, "),
    ("--federation.threads -1", "federation.threads=-1: expected a whole number above 0 or null."),
    ("--federation.threads 100000", "federation.threads=100000: give at most 1024"),
    ("--data.num_clients 0", "data.num_clients=0: expected a whole number above 0."),
    ("--data.permute_labels maybe", "data.permute_labels=maybe: expected true or false."),
    ("--data.partition Dirichlet --data.partition.alpha x", "data.partition.alpha=x: expected a number above 0."),
    ("--federation.evaluate never", "federation.evaluate=never: expected one of before, after, global."),
    ("--federation.participation=null", "federation.participation: there is no 'None'; give a number, choose one of "),
    ("--federation.participation x", "federation.participation: there is no 'x'; give a number, choose one of Share, "),
    ("--trainer.max_epochs x", "trainer.max_epochs=x: expected a whole number or null."),
    ("--model.optimizer.lr x", "model.optimizer.lr=x: expected a number."),
    ("--model.optimizer.lr -1", "model.optimizer=SGD(lr=-1.0, "),
    ("--model.optimizer SparseAdam", "model.optimizer=SparseAdam("),
    ("--model.scheduler StepLR --model.scheduler.step_size 0", "model.scheduler=StepLR(step_size=0, "),
    ("--model.scheduler OneCycleLR --model.scheduler.max_lr 1 --model.scheduler.total_steps 1",
     "model.scheduler=OneCycleLR(max_lr=1.0, total_steps=1, "),
    ("--model.scheduler torch.optim.lr_scheduler.ReduceLROnPlateau", "model.scheduler=ReduceLROnPlateau("),
    ("--model.scheduler ReduceLROnPlateau", "model.scheduler: Multiple subclasses with name ReduceLROnPlateau."),
    ("--model.learner Foo", "model.learner: there is no 'Foo'; give a class path of your own."),
    ("--trainer.logger RunLoger", "trainer.logger: there is no 'RunLoger'; choose one of CSVLogger, "),
    ("--config loggers.yaml", "trainer.logger: Option 'offlin' is not accepted. Did you mean offline?"),
    ("--data.partition torch.nn.Linear", "data.partition: Import path does not correspond to a subclass of Part"),
    ("--model.backbone torch.nn.Linear", "model.backbone: Expected 'torch.nn.Linear' to be a subclass of "),
    ("--trainer.callbacks Similarty", "trainer.callbacks: there is no 'Similarty'; give a class path of your own."),
    ("--model.factorization 3", "model.factorization=3: expected its options, such as --model.factorization.NAME "),
    ("--federation.client_trainer.callbacks Foo", "federation.client_trainer.callbacks=Foo: give Callback objects"),
    ("--federation.client_trainer.accumulate_grad_batches 0", "federation.client_trainer.accumulate_"),
    ("--trainer.callbacks SignFlip --trainer.callbacks.scale nan", "trainer.callbacks.scale=nan: expected a number "),
    ("--config no_seed.yaml", "seed_everything=null: give a whole number from 0 to 4294967295, true for any one, or "),
    ("--federation.engine Stacked --federation.engine.size 0", "federation.engine.size=0: "),
    ("--data.num_clients null", "data.num_clients=null: give a value, or leave it out for 20."),
    ("--model.factorization.rank 99999999999", "model.factorization.rank=99999999999: there is not enough memory for "),
    ("--model.optimizer null", "model.optimizer=null: give a value, or leave it out for the default."),
    ("--data.train_fraction 1e-9", "data.train_fraction=1e-09: no training sample is left; give more."),
    ("--data.seed null", "data.seed=null: give a value, or leave it out for 1234."),
    ("--trainer.logger false --trainer.default_root_dir /proc/no", "trainer.default_root_dir: it cannot be "),
    ("--model", "argument --model: expected one argument"),
    ("--seed_everything -1", "seed_everything=-1: give a whole number from 0 to 4294967295, true for any one, or "),
    ("--trainer.max_epochs -2", "trainer.max_epochs=-2: give the number of rounds, or -1 for no end."),
    ("--trainer.callbacks EarlyStopping", "trainer.callbacks: the following arguments are required: monitor."),
    ("--trainer.num_nodes 2", "trainer.num_nodes=2: one process runs a federation, so give 1; "),
    ("--trainer.strategy ddp", "trainer.strategy=DDPStrategy: one process runs a federation, so leave it at "),
    ("--trainer.devices 4", "trainer.devices=4: one process runs a federation, so give 1; to train clients in "),
    ("--federation.engine stacked", "federation.engine: there is no 'stacked'; choose one of Local, Ray, Stacked, or"),
    ("--federation.engine Stacked --federation.engine.workers 3",
     "federation.engine: Option 'workers' is not accepted. It has size, awake."),
    ("--model FedAvgM --model.server_optimizer ServerAdam",
     "model: Option 'server_optimizer' is not accepted. It has lr, momentum, nesterov, backbone, optimizer, scheduler, "
     "scheduler_counts, factorization, norm_stats, reset_optimizer, share_head, local, channels_last, learner, head, "
     "encoder, shares, mean."),
    ("--model.server_optimizer Adam", "model.server_optimizer: there is no 'Adam'; choose one of ServerAdagrad, "),
    ("--trainer.callbacks EarlyStopping --trainer.callbacks.monitor val/akk",
     "trainer.callbacks: EarlyStopping(monitor=val/akk): there is no such metric. Did you mean val/acc? There are "),
    ("--trainer.callbacks EarlyStopping --trainer.callbacks.monitor nonsense",
     "trainer.callbacks: EarlyStopping(monitor=nonsense): there is no such metric; choose one of comm/down_bytes, "),
    ("--trainer.accelerator banana", "trainer: You selected an invalid accelerator name"),
    ("--trainer.strategy banana", "trainer: You selected an invalid strategy name"),
    ("--trainer.check_val_every_n_epoch 0", "trainer.check_val_every_n_epoch=0: give 1 or more rounds"),
    ("--trainer.limit_test_batches 1", "trainer.limit_test_batches=1: "),
    ("--trainer.callbacks Similarity --trainer.callbacks.most 0", "Similarity(every_n_rounds=5, most=0): give"),
    ("--trainer.logger false --folder somewhere", "folder: RunLogger writes there, and trainer.logger has none"),
    ("--model.scheduler StepLR", "model.scheduler: the following arguments are required: step_size."),
    ("--model.scheduler StepLR --model.scheduler.step_size x", "model.scheduler.step_size=x: expected a whole"),
    # of a class that another one is given
    ("--data.train_fraction 3", "data.train_fraction=3.0"),
    ("--data.partition broken.Partition --data.partition.n 7", "data.partition.n=7: give another."),
    ("--data.partition Domains --data.partition.within broken.Partition", "data.partition.n=2: give another."),
    ("--data.partition.alpha 3", "data.partition: it has options, but no name; choose one of "),
    ("--federation.deadline 5", "federation.deadline: there is no '5'; choose one of Deadline, or a class path"),
    ("--data.partition ClassShards --data.partition.classes_per_client 11", "data.partition.classes_per"),
    ("--model.backbone ResNet9 --model.backbone.fc_layers 3", "model.backbone.fc_layers=3: "),
    ("--model PFedPara --model.factorization.rank 1", "model.factorization: "),
    ("--model FactorizedFL --model.factorization null", "model.factorization: "),
    ("--fragments [a.yaml]", "fragments: only a configuration file has them"),
    # of what is seen with the data alone
    ("--data.num_clients 5000", "data.num_clients=5000 is more than the 1438 training"),
    ("--data CIFAR100", "CIFAR100 is not in "),
    ("--data Digitz", "data: there is no 'Digitz'; choose one of "),
    ("--federation.participation 1.5", "federation.participation=1.5"),
    ("--federation.participation Bernoulli --federation.participation.probability 0",
     "federation.participation.probability=0.0: give one above 0"),
    ("--trainer.logger.save_dir /proc/no", "The run folder cannot be written"),
    ("fit --model FedAvg --model.learner foreign.Regression",
     "model.learner: Regression has no training loss for a batch of this data, (float32["),
    ("--model FedAvg --model.backbone ResNet9 --model.backbone.width 0",
     "model.backbone: this network has no output for an image of shape ("),
    ("fit --model FedAvg --model.learner narrow.Narrow --federation.threads 1",
     "model.learner: Narrow has no training loss for a batch of this data, (float32[1, 1, 16, 16], int64[1]): "),
    # commands that are none or not whole
    ("fit", "model: give --model NAME, or a configuration that names it, such as: lit-pfl fit --config simfed"),
    ("test", "model: give --model NAME, or a configuration that names it, such as: lit-pfl test --config RUN/"),
    ("reprot runs", "there is no command 'reprot'; choose one of fit, validate, test, predict, compare, configs, "
                    "methods, report, export. Did you mean report?"),
    ("runs/mine", "there is no command 'runs/mine'; choose one of fit, "),
    ("fit --config table.csv", "config=table.csv: it holds no options by name, such as `trainer: {max_"),
    ("fit --config empty.yaml", "config=empty.yaml: it holds no options by name, such as `trainer: {max_"),
    ("fit --config last.ckpt", "config=last.ckpt: it is not a text file."),
]  # fmt: skip
#: what they are about, in the current folder
FILES = {
    "key.yaml": "federation: {local_epoch: 3}",
    "group.yaml": "modle: {class_path: SimFed, init_args: {tau: 0.5}}",
    "finished/run/config.yaml": "model: FedAvg",
    "no_yaml.yaml": "[1",
    "no_seed.yaml": "{model: FedAvg, seed_everything: null}",
    "loggers.yaml": "trainer: {logger: [{class_path: RunLogger}, {class_path: WandbLogger, init_args: {offlin: 1}}]}",
    "table.csv": "round,acc\n1,0.5\n",
    "empty.yaml": "",
    "broken.py": """
import lit_pfl.data
from lit_pfl.errors import ConfigError
class Partition(lit_pfl.data.IID):
    def __init__(self, n: int = 2):
        raise ConfigError(f"data.partition.n={n}: give another.")
""",
    "narrow.py": """
import lightning as L, torch
class Narrow(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(7, 10)
    def training_step(self, batch, batch_idx):
        return self.out(batch[0].flatten(1)).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
""",
}


@pytest.mark.few(30)
@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_a_mistake_is_named_in_one_line(words, said, capsys):
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    Path("last.ckpt").write_bytes(b"PK\x80")
    came = typed(capsys, *(["fit", *TINY] if words.startswith("-") else []), *words.split())
    assert came.code == 2
    [error] = came.errors
    said, _, choices = said.partition("choose one of ")
    assert error.startswith(f"lit-pfl: error: {said}"), error
    listed = error.partition("choose one of ")[2].split()
    assert [word for word in listed if word in choices.split()] == choices.split()  # besides classes of other tests


def test_nothing_is_offered_that_cannot_be_chosen():
    offered = {name for kind in ("optimizer", "scheduler") for name in names_to_choose(CLASSES[kind])}
    assert offered > {"SGD", "StepLR"}
    assert not {"Optimizer", "ServerStep", "ReduceLROnPlateau"} & offered
    loggers = set(names_to_choose(CLASSES["logger"]))
    assert loggers > {"RunLogger", "WandbLogger"}
    assert not {"ClientLogger", "ElsewhereLogger", "DummyLogger"} & loggers


def test_a_class_of_one_s_own_is_offered_beside_the_one_it_builds_on():
    own = type("Later", (CLASSES["deadline"],), {})
    assert {"Deadline", own.__name__} <= set(names_to_choose(CLASSES["deadline"]))


def test_names_to_choose_from_are_those_of_the_package():
    own = {name for name in names_to_choose(CLASSES["model"]) if name in vars(lit_pfl.methods)}
    assert own == set(lit_pfl.methods.__all__)
    assert not {"TwoModels", "Client"} & set(names_to_choose(CLASSES["model"]))


def test_the_overview_names_all_methods_without_importing_them(capsys):
    assert sorted(methods()) == sorted(lit_pfl.methods.__all__)
    assert all(about for members in families().values() for about in members.values())
    assert len(families()) == len(list(Path(lit_pfl.methods.__file__).parent.glob("*/__init__.py")))
    assert all(families()), "every family says what it is"
    for words in ([], ["--help"], ["-h"]):
        came = typed(capsys, *words)
        assert (came.code, came.errors) == (0, [])
        assert all(name in came.out for name in [*lit_pfl.methods.__all__, "lit-pfl fit --model", "lit-pfl test "])
    assert typed(capsys, "--version").out.strip() == f"lit-pfl {version('lit-pfl')}"


def test_methods_are_listed_by_family_and_found_by_a_word(capsys):
    came = typed(capsys, "methods")
    assert (came.code, came.errors) == (0, [])
    assert all(f"\n  {name} " in came.out for name in lit_pfl.methods.__all__)
    found = typed(capsys, "methods", "Hypernetwork").out
    assert "PFedHN" in found
    assert "FedAvg" not in found
    [error] = typed(capsys, "methods", "nonsense").errors
    assert error == "lit-pfl: error: methods: no method's name or line has 'nonsense'; `lit-pfl methods` lists all."


def test_a_list_may_be_cut_by_whoever_reads_it():
    command = f"{sys.executable} -m lit_pfl methods | head -1"
    came = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (came.returncode, came.stderr, len(came.stdout.splitlines())) == (0, "", 1)


@pytest.mark.parametrize("word", ["--help", "methods"])
def test_nothing_need_be_read(word):
    command = [sys.executable, "-m", "lit_pfl", word]
    answer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    answer.stdout.close()
    assert (answer.stderr.read(), answer.wait()) == ("", 0)


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_and_version_come_without_the_libraries_that_take_seconds(word):
    """Counted in modules, since seconds depend on who else is at work on this machine."""
    program = (
        f"import sys; from lit_pfl.cli import main; main([{word!r}]); "
        "print(sorted({'torch', 'lightning', 'numpy', 'jsonargparse'} & sys.modules.keys()))"
    )
    began = time.monotonic()
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert ast.literal_eval(out.splitlines()[-1]) == []
    assert time.monotonic() - began < 30


def test_the_package_gives_its_classes_when_they_are_asked_for():
    from lit_pfl.core import Client

    assert lit_pfl.Client is Client
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = lit_pfl.Nothing


def test_fedrep_alone_trains_head_and_body(capsys):
    words = ["--model", "FedRep", "--model.backbone", "MLP", "--data.num_clients", "3", "--trainer.max_epochs", "1"]
    assert typed(capsys, "fit", *words).code == 0
    from lit_pfl.federation import Federation
    from lit_pfl.methods import FedAvg, FedRep

    assert Federation(FedRep()).local_epochs == 2
    assert Federation(FedRep(body_epochs=3)).local_epochs == 4
    assert Federation(FedRep(mode="joint")).local_epochs == Federation(FedAvg()).local_epochs == 1
    assert Federation(FedRep(), local_epochs=11).local_epochs == 11


@pytest.mark.seconds
def test_one_callback_needs_no_list(capsys):
    assert (
        typed(
            capsys, "fit", *TINY, "--trainer.callbacks", "lit_pfl_callbacks.Similarity", "--trainer.max_epochs", "1"
        ).code
        == 0
    )


@pytest.mark.seconds
def test_a_progress_bar_that_is_given_takes_the_place_of_the_own_one(capsys):
    bar = ["--trainer.enable_progress_bar", "true", "--trainer.callbacks", "RichProgressBar"]
    assert typed(capsys, "fit", *TINY, *bar, "--trainer.max_epochs", "1").code == 0


@pytest.mark.seconds
def test_without_a_logger_no_other_run_s_checkpoint_is_overwritten(capsys):
    words = [*TINY, "--trainer.max_epochs", "1", "--trainer.logger", "false"]
    assert typed(capsys, "fit", *words).code in (0, None)
    before = Path("checkpoints/last.ckpt").read_bytes()
    came = typed(capsys, "fit", *words, "--model", "StandAlone")
    [error] = came.errors
    assert (came.code, Path("checkpoints/last.ckpt").read_bytes()) == (2, before)
    assert error.startswith("lit-pfl: error: trainer.default_root_dir: ")


@pytest.mark.seconds
def test_rounds_without_end_are_not_doubled(capsys):
    came = typed(capsys, "fit", *TINY, "--trainer.max_epochs", "-1", "--trainer.max_steps", "1")
    assert (came.code, came.errors) == (0, [])
    assert "Next, " not in came.out
