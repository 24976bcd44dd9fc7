"""Accuracy against epsilon: FedAvg on Digits, and a part of CIFAR-10, under central differential privacy of clients.

    python tests/benchmarks/privacy.py --rounds 10 --seeds 2 --root data --figure docs/privacy.svg

It prints a table in Markdown, and draws it. Scores are test accuracies of the last round's global model, means over
seeds; all clients train in every round. It needs the extra ``privacy``, for the figure also ``report``.
"""

import argparse
import logging
import statistics
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch

from lit_pfl import Federation
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.data import CIFAR10, Digits
from lit_pfl.methods import FedAvg
from lit_pfl.models import MLP

NOISE = (None, 0.5, 1.0, 2.0, 4.0, 8.0)
DELTA = 1e-3


class Setting(NamedTuple):
    """What is learnt.

    Args:
        name: how the figure calls it.
        clients: number of clients.
        data: the data.
        noise: noise multipliers; None without privacy.
    """

    name: str
    clients: int
    data: Any
    noise: tuple[float | None, ...] = NOISE


def settings(root: str) -> list[Setting]:
    """Return all settings.

    Args:
        root: folder with CIFAR-10; empty: without it.
    """
    found = [
        Setting(f"Digits, {clients} clients", clients, Digits(num_clients=clients, image_size=8, batch_size=16))
        for clients in (20, 100)
    ]
    if root:  # 5,000 images to train on and 1,000 to test, of 8 x 8 pixels
        few = {"train_fraction": 1 / 12, "test_fraction": 1 / 60, "image_size": 8, "batch_size": 16}
        data = CIFAR10(root=root, verify=False, num_clients=100, **few)
        found.append(Setting("CIFAR-10, 100 clients", 100, data, (None, 0.5, 2.0, 8.0)))
    return found


class Point(NamedTuple):
    """What came of one noise multiplier.

    Args:
        setting: what is learnt, by how many clients.
        noise: the noise multiplier; None without privacy.
        epsilon: the epsilon spent.
        accuracies: test accuracies in percent, one a seed.
    """

    setting: str
    noise: float | None
    epsilon: float
    accuracies: list[float]

    @property
    def accuracy(self) -> float:
        """Mean over seeds."""
        return statistics.mean(self.accuracies)


def run(data: Any, noise: float | None, rounds: int, seed: int) -> tuple[float, float]:
    """Return epsilon and test accuracy of a run."""
    prototype = FedAvg(
        backbone=lambda channels, classes: MLP(channels, classes, hidden=64),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
    privacy = None if noise is None else ClientPrivacy(noise, clip=0.5, delta=DELTA)
    federation = Federation(
        prototype,
        local_epochs=2,
        evaluate="global",
        privacy=privacy,
        seed=seed,
        threads=1,
    )
    fitting = L.Trainer(
        max_epochs=rounds, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0,
    )  # fmt: skip
    fitting.fit(federation, datamodule=data)
    metrics = fitting.callback_metrics
    return float(metrics.get("privacy/epsilon", float("inf"))), 100 * float(metrics["test/acc"])


def measured(setting: Setting, rounds: int, seeds: int) -> list[Point]:
    """Return a setting's points."""
    points = []
    for noise in setting.noise:
        found = [run(setting.data, noise, rounds, seed) for seed in range(seeds)]
        points.append(Point(setting.name, noise, found[0][0], [accuracy for _, accuracy in found]))
    return points


def table(points: list[Point]) -> str:
    """Return them in Markdown."""
    lines = ["| data | noise multiplier | epsilon | test accuracy (%) |", "|---|---|---|---|"]
    for p in points:
        noise, epsilon = ("none", "infinite") if p.noise is None else (f"{p.noise:g}", f"{p.epsilon:.2f}")
        spread = f" ± {statistics.stdev(p.accuracies):.1f}" if len(p.accuracies) > 1 else ""
        lines.append(f"| {p.setting} | {noise} | {epsilon} | {p.accuracy:.1f}{spread} |")
    return "\n".join(lines)


def draw(points: list[Point], path: Path) -> None:
    """Draw accuracy against epsilon, a line for each setting; dashed without privacy."""
    import altair as alt

    rows = [{"epsilon": p.epsilon, "accuracy": p.accuracy, "setting": p.setting} for p in points if p.noise]
    plain = [{"accuracy": p.accuracy, "setting": p.setting} for p in points if p.noise is None]
    color = alt.Color("setting:N", title=None)
    y = alt.Y("accuracy:Q", title="test accuracy (%)", scale=alt.Scale(domain=[0, 100]))
    lines = alt.Chart(alt.Data(values=rows)).mark_line(point=True)
    lines = lines.encode(
        alt.X("epsilon:Q", title=f"epsilon (delta = {DELTA:g})", scale=alt.Scale(type="log")), y, color
    )
    rules = alt.Chart(alt.Data(values=plain)).mark_rule(strokeDash=[4, 4]).encode(y, color)
    (lines + rules).properties(width=420, height=240).save(path)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--root", default="", help="folder with CIFAR-10. Default: Digits alone")
    parser.add_argument("--figure", type=Path, help="SVG file to write. Default: none")
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    points = [p for setting in settings(given.root) for p in measured(setting, given.rounds, given.seeds)]
    print(table(points))
    if given.figure:
        draw(points, given.figure)


if __name__ == "__main__":
    main()
