"""docs/errors.md: every message that the page explains comes, in these words, from what its reader may have typed."""

import re
import subprocess
import sys
import zipfile

import pytest

from cli.typed import ROOT, TINY, typed

#: by the page's words for it, a command that is refused; behind a configuration where it begins with an option
COMMANDS = {
    "there is no 'FedAvgg'; choose one of": "--model FedAvgg",
    "there is no command 'trian'": "trian --config simfed",
    "config=...: there is no such file, and no configuration of this name": "fit --config nowhere",
    "model: give --model NAME": "fit",
    "unrecognized arguments: --rounds 3 Did you mean": "--rounds 3",
    "Option 'alpha' is not accepted. It has": "--data.alpha 0.5",
    "expected a whole number": "--trainer.max_epochs many",
    "CIFAR10 is not in '/nowhere'": "--data CIFAR10 --data.root /nowhere",
    "data.num_clients=5000 is more than the 1438 training samples": "--data.num_clients 5000",
    "federation.participation=1000 is more than the 20 clients": "fit --config simfed --federation.participation 1000",
    "trainer.gradient_clip_val=1": "--trainer.gradient_clip_val 1",
    "trainer.limit_train_batches=0.5": "--trainer.limit_train_batches 0.5",
    "trainer.limit_val_batches": "--trainer.limit_val_batches 3",
    "trainer.limit_test_batches": "--trainer.limit_test_batches 3",
    "trainer.devices=2: one process runs a federation": "--trainer.devices 2",
    "trainer.val_check_interval": "--trainer.val_check_interval 0.5",
    "federation.client_trainer.check_val_every_n_epoch: the federation decides this":
        "--federation.client_trainer.check_val_every_n_epoch 2",
    "model.body_epochs=1 leaves none of federation.local_epochs=1 for the head":
        "--model FedRep --model.body_epochs 1 --federation.local_epochs 1",
    "labels differ from client to client": "--model FedProto --data.permute_labels true",
    "model.optimizer: Scaffold": "--model Scaffold --model.optimizer Adam",
    "has no batch norm, so FedBN would be FedAvg": "--model FedBN --model.backbone CNN",
    "federation.evaluate=global: with FedAvg every client has":
        "--model FedAvg --model.backbone ResNet9 --federation.evaluate global",
    "steps its optimizers itself (automatic_optimization=False)": "--model Ditto --model.learner own.Manual",
    "model.head": "--model FedPer --model.learner own.Headless",
    "the run that wrote the checkpoint has seed_everything=1":
        "--seed_everything 2 --folder other --ckpt_path run/checkpoints/last.ckpt",
    "is damaged: the checksum of": "--seed_everything 1 --folder other --ckpt_path damaged.ckpt",
    "There is no client 30": "export run --client 30",
    "nor a folder in it holds a metrics.csv": "report empty",
}  # fmt: skip
#: those that come of a program, or of files that have changed
OTHERS = {"is not a method; pass one around it", "is made with pytorch_lightning", "data: client 3 had other samples",
          "federation.keep_trained=False: client 3 needs its own"}  # fmt: skip
OWN = """
import lightning as L, torch
class Headless(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.one, self.other = torch.nn.Linear(256, 10), torch.nn.Linear(256, 10)
    def training_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        return torch.nn.functional.cross_entropy(self.one(x) + self.other(x), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
class Manual(Headless):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
"""


def explained() -> set[str]:
    """Return the page's words of messages: the first cells of its tables, but the last one's."""
    tables = (ROOT / "docs/errors.md").read_text().partition("## While a run trains")[0]
    first = [line.split(" | ")[0].removeprefix("| ") for line in tables.splitlines() if line.startswith("| `")]
    return {words for cell in first for words in re.findall("`([^`]+)`", cell)}


def test_every_message_of_the_page_has_a_command_that_it_answers():
    assert explained() - OTHERS == set(COMMANDS)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a folder with a run, a copy of its checkpoint with one bit changed, and two modules."""
    here = tmp_path_factory.mktemp("run")
    words = [*TINY, "--data.permute_labels=false", "--seed_everything=1", "--folder=run"]
    subprocess.run([sys.executable, "-m", "lit_pfl", "fit", *words], cwd=here, check=True, capture_output=True)
    path = here / "run/checkpoints/last.ckpt"
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as file:  # a bit of a tensor, as what lies between two of them has no checksum
        place = whole.index(max((file.read(name) for name in file.namelist()), key=len))
    (here / "damaged.ckpt").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    (here / "own.py").write_text(OWN)
    (here / "empty").mkdir()
    return here


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS)
def test_a_message_is_as_the_page_has_it(words, run, capsys, monkeypatch):
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend(str(run))
    command = COMMANDS[words]
    permuted = [] if "permute" in command else ["--data.permute_labels", "false"]
    came = typed(capsys, *(["fit", *TINY, *permuted] if command.startswith("-") else []), *command.split())
    assert came.code == 2
    [error] = came.errors
    assert re.search(re.escape(words).replace(r"\.\.\.", ".*"), error), error
