"""The live line, under Trainers that know nothing of clients."""

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import R2Score

from callbacks.plain import Line, batches, trainer
from lit_pfl import Federation
from lit_pfl.data import PerClient
from lit_pfl.methods import FedAvg
from lit_pfl_callbacks import RoundProgress
from tiny import Learner, Site


class Endless(IterableDataset):
    """Samples of which nobody knows how many there are."""

    def __iter__(self):
        data = batches().dataset
        yield from (data[i] for i in range(8))


@pytest.mark.parametrize("terminal", [True, False])
def test_batches_whose_number_is_not_known(tmp_path, capsys, terminal):
    progress = RoundProgress()
    progress.console = Console(force_terminal=terminal)
    fitting = trainer(tmp_path, 2, [progress], enable_progress_bar=True)
    fitting.fit(Line(), DataLoader(Endless(), batch_size=4), batches())
    assert fitting.global_step == 4
    shown = capsys.readouterr().out
    assert terminal or "round 2/2 · accuracy" in shown


def test_a_batch_of_inputs_and_targets_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    seen = []
    progress = RoundProgress()
    progress.console = Console(force_terminal=True)
    show = RoundProgress.on_train_batch_end

    def noted(self, *args):
        show(self, *args)
        [task] = self._bar.tasks
        seen.append((task.fields["client"], task.completed, task.total))

    monkeypatch.setattr(RoundProgress, "on_train_batch_end", noted)
    data = DataLoader(batches().dataset, batch_size=2)  # batches are lists of two tensors
    trainer(tmp_path, 1, [progress], enable_progress_bar=True).fit(Line(), data)
    assert seen == [(f"{done}/4", done, 4) for done in range(1, 5)]


def test_somebody_s_own_names_and_batches(tmp_path, capsys):
    class Own(Line):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 0.25)

    data = DataLoader(batches().dataset, batch_size=2)
    trainer(tmp_path, 1, [RoundProgress()], enable_progress_bar=True).fit(Own(), data, batches())
    shown = capsys.readouterr().out
    assert "round 1/1 · 4 batches · loss 0.2500" in shown
    assert "client" not in shown


@pytest.mark.parametrize("terminal", ["xterm", "dumb", None])
@pytest.mark.parametrize(("name", "title"), [("acc", "accuracy"), ("[f1]", "[f1]")])
def test_what_validation_logs_is_its_score_whatever_its_name(tmp_path, capsys, monkeypatch, name, title, terminal):
    """On a terminal that draws its line again, on one that cannot, and in a file."""
    monkeypatch.setenv("TERM", terminal or "xterm")

    class Own(Line):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log(name, 0.5 + self.current_epoch / 4)

    progress = RoundProgress()
    progress.console = Console(force_terminal=terminal is not None, width=150)
    fitting = trainer(tmp_path, 2, [progress], enable_progress_bar=True, num_sanity_val_steps=1)
    fitting.fit(Own(), batches(), batches())
    shown = capsys.readouterr().out
    if terminal != "xterm":
        assert f"round 1/2 · 1 batches · {title} 0.5000 · " in shown
        assert f"round 2/2 · 1 batches · {title} 0.7500 · " in shown
    assert f"{title} 0.7500" in shown
    assert " B " not in shown  # nobody sends any


@pytest.mark.parametrize("score", ["rows", "r2"])
def test_a_federation_s_score_is_one_of_its_clients(tmp_path, capsys, score):
    """And not the round, which it logs as well; where a metric knows what is better, that one."""

    class Fits(Learner):
        def __init__(self):
            super().__init__(nn.Linear(4, 8), nn.Linear(8, 1))
            self.r2 = R2Score()

        def training_step(self, batch, batch_idx):
            return (self(batch[0]) - batch[1]).square().mean()

        def validation_step(self, batch, batch_idx):
            self.log("val_rows", float(len(batch[0])))
            if score == "r2":
                self.r2(self(batch[0]), batch[1])
                self.log("val_r2", self.r2)

    data = TensorDataset(torch.rand(12, 4), torch.rand(12, 1))
    fitting = trainer(tmp_path, 1, [RoundProgress()], enable_progress_bar=True)
    fitting.fit(Federation(FedAvg(learner=Fits()), seed=0), datamodule=PerClient([Site(data, 6), Site(data, 6)]))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("round 1/1")]
    assert line.split(" · ")[1:3] == ["2 clients", f"{score} {float(fitting.callback_metrics[f'val/{score}']):.4f}"]
