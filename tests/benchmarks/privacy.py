"""Accuracy against epsilon: FedAvg on Digits under central differential privacy of clients.

    python tests/benchmarks/privacy.py --rounds 10 --seeds 2 --figure docs/privacy.svg

It prints a table in Markdown, and draws it. Scores are test accuracies of the last round's global model, means over
seeds; all clients train in every round. It needs the extra ``privacy``, for the figure also ``report``.
"""

import argparse
import logging
import statistics
import warnings
from pathlib import Path
from typing import NamedTuple

import lightning as L
import torch

from lit_pfl import Federation
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.data import Digits
from lit_pfl.methods import FedAvg
from lit_pfl.models import MLP

NOISE = (None, 0.5, 1.0, 2.0, 4.0, 8.0)
CLIENTS = (20, 100)
DELTA = 1e-3


class Point(NamedTuple):
    """What came of one noise multiplier.

    Args:
        clients: number of clients.
        noise: the noise multiplier; None without privacy.
        epsilon: the epsilon spent.
        accuracies: test accuracies in percent, one a seed.
    """

    clients: int
    noise: float | None
    epsilon: float
    accuracies: list[float]

    @property
    def accuracy(self) -> float:
        """Mean over seeds."""
        return statistics.mean(self.accuracies)


def run(clients: int, noise: float | None, rounds: int, seed: int) -> tuple[float, float]:
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
    fitting.fit(federation, datamodule=Digits(num_clients=clients, image_size=8, batch_size=16))
    metrics = fitting.callback_metrics
    return float(metrics.get("privacy/epsilon", float("inf"))), 100 * float(metrics["test/acc"])


def measured(rounds: int, seeds: int) -> list[Point]:
    """Return all points."""
    points = []
    for clients in CLIENTS:
        for noise in NOISE:
            found = [run(clients, noise, rounds, seed) for seed in range(seeds)]
            points.append(Point(clients, noise, found[0][0], [accuracy for _, accuracy in found]))
    return points


def table(points: list[Point]) -> str:
    """Return them in Markdown."""
    lines = ["| clients | noise multiplier | epsilon | test accuracy (%) |", "|---|---|---|---|"]
    for p in points:
        noise, epsilon = ("none", "infinite") if p.noise is None else (f"{p.noise:g}", f"{p.epsilon:.2f}")
        spread = f" ± {statistics.stdev(p.accuracies):.1f}" if len(p.accuracies) > 1 else ""
        lines.append(f"| {p.clients} | {noise} | {epsilon} | {p.accuracy:.1f}{spread} |")
    return "\n".join(lines)


def draw(points: list[Point], path: Path) -> None:
    """Draw accuracy against epsilon, a line for each number of clients; dashed without privacy."""
    import altair as alt

    rows = [
        {"epsilon": p.epsilon, "accuracy": p.accuracy, "clients": f"{p.clients} clients"} for p in points if p.noise
    ]
    plain = [{"accuracy": p.accuracy, "clients": f"{p.clients} clients"} for p in points if p.noise is None]
    color = alt.Color("clients:N", title=None)
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
    parser.add_argument("--figure", type=Path, help="SVG file to write. Default: none")
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    points = measured(given.rounds, given.seeds)
    print(table(points))
    if given.figure:
        draw(points, given.figure)


if __name__ == "__main__":
    main()
