"""Run folders of any size, with every file that a report can show, made of random numbers."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

LAYERS = [f"body.layer{i}.{j}.conv{k}" for i in range(1, 4) for j in range(2) for k in range(1, 3)]
#: by method: how good it gets, megabytes a client and round up and down, and whether its weights are factors
METHODS = {
    "SimFed": (0.82, 0.4, True),
    "FedAvg": (0.78, 0.3, False),
    "FactorizedFL": (0.75, 0.02, True),
    "StandAlone": (0.7, 0.0, False),
}


def write(path: Path, columns: str, rows: Iterable[Iterable[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns.split(), *rows])


def make_run(folder: Path, method: str, seed: int, clients: int = 5, rounds: int = 6, every: int = 2) -> Path:
    """Make one run; the same arguments make the same run."""
    rng = np.random.default_rng([seed, len(method)])
    best, megabytes, factors = METHODS[method]
    ids = range(clients)
    own = rng.normal(0, 0.04, clients)
    scores = np.array(
        [best * (1 - np.exp(-r / (rounds / 4))) + own + rng.normal(0, 0.01, clients) for r in range(1, rounds + 1)]
    )
    up = int(megabytes * 1e6) * clients
    config = {
        "seed_everything": seed,
        "model": {"class_path": f"lit_pfl.methods.{method}", "init_args": {"tau": 0.5} if method == "SimFed" else {}},
        "data": {"class_path": "lit_pfl.data.Digits", "init_args": {"num_clients": clients, "permute_labels": True}},
        "federation": {"local_epochs": 1},
        "trainer": {"max_epochs": rounds, "logger": {"class_path": "x.RunLogger", "init_args": {"version": seed}}},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    head = "round train/loss val/acc val/acc_std val/acc_worst10 comm/up_bytes comm/down_bytes comm/total_bytes"
    head += " test/acc test/acc_std test/acc_worst10"
    lines = [
        [
            r + 1,
            2.3 * np.exp(-r / rounds * 3) + 0.1,
            s.mean(),
            s.std(),
            np.sort(s)[: -(-clients // 10)].mean(),
            up,
            up,
            2 * up * (r + 1),
            "",
            "",
            "",
        ]
        for r, s in enumerate(scores)
    ]
    test = scores[-1] - 0.01
    lines[-1][-3:] = [test.mean(), test.std(), np.sort(test)[: -(-clients // 10)].mean()]
    write(folder / "metrics.csv", head, lines)
    write(folder / "clients.csv", "client round split model n acc loss", [
        *([k, r + 1, "val", "personalized:before", 9, scores[r, k], 1.0] for r in range(rounds) for k in ids),
        *([k, rounds, "test", "personalized:before", 18, test[k], 1.0] for k in ids),
    ])  # fmt: skip
    counts = np.random.default_rng(clients).multinomial(72, np.random.default_rng(7).dirichlet([0.4] * 10, clients))
    write(folder / "partition.csv", "client class split count", [
        [k, c, "train", counts[k, c]] for k in ids for c in range(10) if counts[k, c]
    ])  # fmt: skip
    measured = sorted({*range(1, rounds + 1, every), rounds})
    kinds = ["u", "v"] if factors else ["body", "norm"]
    write(folder / "communication.csv", "round client direction group bytes", [
        [r, "all", way, kind, up // 2] for r in range(1, rounds + 1) for way in ("up", "down") for kind in kinds if up
    ])  # fmt: skip
    write(folder / "times.csv", "round phase seconds", [
        [r, phase, s * rng.uniform(0.8, 1.2)]
        for r in range(1, rounds + 1)
        for phase, s in (("train", 3.0), ("evaluate", 0.8), ("aggregate", 0.2), ("link", 0.1))
    ])  # fmt: skip
    if factors:
        write(folder / "sparsity.csv", "round client layer nonzeros elements rank", [
            [r, "mean", layer, 1000 * (1 - 0.8 * r / rounds) * rng.uniform(0.8, 1), 1000, 8 + i]
            for r in measured for i, layer in enumerate(LAYERS)
        ])  # fmt: skip
    compared = list(ids)[:32]
    place = rng.normal(0, 1, (clients, 2))
    write(folder / "similarity.csv", "round group client other cosine", [
        [r, kind, a, b, round(float(np.exp(-np.abs(place[a] - place[b]).sum() * r / rounds)), 6)]
        for r in measured for kind in kinds for a in compared for b in compared if a < b
    ])  # fmt: skip
    if method == "SimFed":
        write(folder / "matching.csv", "round client other frequency", [
            [r, a, b, round(float(rng.random()), 6)] for r in measured for a in compared for b in compared if a != b
        ])  # fmt: skip
        write(folder / "embeddings.csv", "round client x y", [
            [r, k, *(place[k] * r / rounds).round(5)] for r in measured for k in ids
        ])  # fmt: skip
    write(folder / "feature_map.csv", "client label predicted x y", [
        [k, c, rng.integers(10), *(rng.normal(5 * np.array([c % 3, c // 3]), 1.5).round(4))]
        for k in list(ids)[:4] for c in range(10) for _ in range(12)
    ])  # fmt: skip
    return folder


def make_runs(
    folder: Path, methods: Iterable[str] = METHODS, seeds: Iterable[int] = (1, 2, 3), **size: int
) -> list[Path]:
    return [make_run(folder / m / f"seed_{s}", m, s, **size) for m in methods for s in seeds]
