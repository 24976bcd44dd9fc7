"""Accuracy with 3 of 10 clients under each attack, by the mean that the server takes.

    python tests/benchmarks/robustness.py --rounds 10 --seeds 1

It prints one table for each method, in Markdown. Scores are mean test accuracies of the honest clients after the last
round: of FedAvg's one model, and of Ditto's personalized models.
"""

import argparse
import logging
import time
import warnings
from collections.abc import Callable

import lightning as L
import torch

from lit_pfl import Client, Federation
from lit_pfl.core.robust import (
    CoordinateMedian,
    FLTrust,
    GeometricMedian,
    Krum,
    MultiKrum,
    NormClipping,
    RobustMean,
    TrimmedMean,
)
from lit_pfl.data import Digits, Dirichlet
from lit_pfl.federation import ALIE, Attack, InnerProduct, LabelFlip, ScaledUpdate, SignFlip
from lit_pfl.methods import Ditto, FedAvg
from lit_pfl.models import MLP

ATTACKERS = [2, 5, 8]
METHODS: dict[str, tuple[type[Client], str]] = {"FedAvg": (FedAvg, "after"), "Ditto": (Ditto, "before")}
MEANS: dict[str, Callable[[], RobustMean | None]] = {
    "weighted mean": lambda: None,
    "CoordinateMedian": CoordinateMedian,
    "TrimmedMean(0.3)": lambda: TrimmedMean(0.3),
    "GeometricMedian": GeometricMedian,
    "GeometricMedian(30)": lambda: GeometricMedian(iterations=30),
    "Krum(3)": lambda: Krum(3),
    "MultiKrum(3)": lambda: MultiKrum(3),
    "NormClipping(1)": lambda: NormClipping(1.0),
    "FLTrust(0)": lambda: FLTrust(0),
}
ATTACKS: dict[str, Callable[[], Attack | None]] = {
    "none": lambda: None,
    "label flip": lambda: LabelFlip(clients=ATTACKERS),
    "sign flip x3": lambda: SignFlip(3.0, clients=ATTACKERS),
    "scaled x30": lambda: ScaledUpdate(30.0, clients=ATTACKERS),
    "ALIE (1.5)": lambda: ALIE(1.5, clients=ATTACKERS),
    "inner product 2": lambda: InnerProduct(2.0, clients=ATTACKERS),
}


def accuracy(method: str, mean: RobustMean | None, attack: Attack | None, rounds: int, seed: int) -> float:
    """Return the mean test accuracy of the honest clients, in percent."""
    kind, evaluate = METHODS[method]
    prototype = kind(
        backbone=lambda channels, classes: MLP(channels, classes, hidden=64),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        mean=mean,
    )
    federation = Federation(prototype, local_epochs=2, evaluate=evaluate, seed=seed, threads=1)  # type: ignore[arg-type]
    trainer = L.Trainer(
        max_epochs=rounds, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", limit_val_batches=0, num_sanity_val_steps=0,
        callbacks=[] if attack is None else [attack],
    )  # fmt: skip
    data = Digits(num_clients=10, partition=Dirichlet(1.0), image_size=8, batch_size=16, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(federation, datamodule=data)
    honest = [row.scores["acc"] for row in federation.rows if row.client not in ATTACKERS]
    return 100 * sum(honest) / len(honest)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from 1; scores are means over them")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments = parser.parse_args()
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.ERROR)
    began = time.perf_counter()
    for method in arguments.methods:
        print(f"\n| {method} | {' | '.join(ATTACKS)} |\n|---|{'---|' * len(ATTACKS)}")
        for name, mean in MEANS.items():
            cells = []
            for attack in ATTACKS.values():
                scores = [
                    accuracy(method, mean(), attack(), arguments.rounds, seed) for seed in range(1, arguments.seeds + 1)
                ]
                cells.append(f"{sum(scores) / len(scores):.1f}")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
