"""The results of runs: a line each, in a file a paper, so that nothing is run twice."""

import csv
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tables import Run
from torch import Tensor

from lit_pfl.lightning_internals import read_checkpoint
from lit_pfl_callbacks.files import lock, opened, replacing
from lit_pfl_callbacks.run_folder import read_rows
from lit_pfl_callbacks.states import with_states


class Results:
    """The results of a paper's runs, ``PAPER.jsonl``.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, run: Run, seed: int) -> dict[str, Any] | None:
        """Return the result of a run; None where there is none of this configuration."""
        return self._all().get((run.fingerprint, seed))

    def of_all_seeds(self, run: Run) -> list[dict[str, Any]]:
        """Return the results of a run, by seed."""
        return [result for (fingerprint, _), result in sorted(self._all().items()) if fingerprint == run.fingerprint]

    def add(self, result: dict[str, Any]) -> None:
        """Add a result, in its place by scale, name and seed, so that the order of runs leaves no trace."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(self.path.parent):
            everything = {**self._all(), (result["configuration"], result["seed"]): result}
            lines = sorted(everything.values(), key=lambda r: (r["scale"], r["run"], r["configuration"], r["seed"]))
            with replacing(self.path) as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines).encode())

    def _all(self) -> dict[tuple[str, int], dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return {(result["configuration"], result["seed"]): result for result in map(json.loads, lines)}


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait for other runners that add a result."""
    handle = opened(folder)
    try:
        while not lock(handle):
            time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def collect(folder: Path, run: Run, seed: int, clients_a_domain: int | None) -> dict[str, Any]:
    """Return the result of a run that has come to its end.

    Args:
        folder: its run folder.
        run: the run.
        seed: its seed.
        clients_a_domain: where clients come in domains of so many, one domain after the other.
    """
    last = read_rows(folder / "metrics.csv")[-1]
    with (folder / "clients.csv").open(newline="") as file:
        rows = with_states([*csv.DictReader(file)])
    tested = [row for row in rows if row["split"] == "test" and row["round"] == last["round"]]
    checkpoint = read_checkpoint(folder / "checkpoints" / "last.ckpt", mmap=True)
    models: dict[str, list[float | None]] = {}
    for row in tested:  # those of the run's own state come first
        path = "" if row["state"] == tested[0]["state"] else f"{row['state']}/"
        models.setdefault(path + row["model"].partition(":")[0], []).append(_rounded(row["acc"]))
    result = {
        "run": run.name,
        "scale": run.scale,
        "configuration": run.fingerprint,
        "seed": seed,
        "rounds": int(float(last["round"])),
        "scores": {
            name: _rounded(value) for name, value in last.items() if name.startswith(("test/", "model/")) and value
        },
        "clients": models,
        "elements": checkpoint["federation"]["coordinator"]["ledger"]["elements"],
        "parameters": _parameters(checkpoint["federation"]["clients"], _threshold(folder / "config.yaml")),
        "seconds": round(checkpoint["callbacks"]["Timer"]["time_elapsed"]["train"], 1),
    }
    if best := _best(read_rows(folder / "metrics.csv")):
        result["best"] = best
    if clients_a_domain is not None and (folder / "similarity.csv").exists():
        result["similarity"] = _similarity(folder / "similarity.csv", clients_a_domain)
    return result


def _best(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the best round on test data and its accuracy, by name of the score; of those scored in several rounds."""
    names = [name for name in rows[0] if name.startswith("test/") and name.endswith("/acc")]
    scores = {name: [(float(row[name]), int(float(row["round"]))) for row in rows if row[name]] for name in names}
    best = {name: max(found, key=lambda one: (one[0], -one[1])) for name, found in scores.items() if len(found) > 1}
    return {name: [round, _rounded(str(score)) or 0.0] for name, (score, round) in best.items()}


def _rounded(value: str) -> float | None:
    return round(float(value), 6) if value else None


def _threshold(path: Path) -> float:
    """Return the size below which entries of mu count as zero in a run, given its whole configuration."""
    factorization = yaml.safe_load(path.read_text())["model"]["init_args"].get("factorization") or {}
    return factorization.get("threshold", 0.0)


def _parameters(clients: dict[int, dict[str, Any]], threshold: float) -> float:
    """Return the entries of a client's trained weights that are not zero where it is used, the mean over clients."""

    def count(name: str, tensor: Tensor) -> int:
        # A checkpoint holds mu as it is trained, with what is below the threshold.
        is_mask = name.rpartition(".")[2] == "mu"
        return int((tensor.abs() >= threshold).logical_and(tensor != 0).sum() if is_mask else tensor.count_nonzero())

    def of(state: dict[str, Any]) -> int:
        return sum(
            count(name, tensor)
            for name, tensor in state.items()
            if name.startswith(("learner.", "personal.")) and tensor.is_floating_point() and "running_" not in name
        )

    return sum(of(client["state_dict"]) for client in clients.values()) / len(clients)


def _similarity(path: Path, clients_a_domain: int) -> dict[str, dict[str, list[float]]]:
    """Return the mean cosine of pairs of one domain and of two, by group, at the first round and every quarter."""
    rows = read_rows(path)
    rounds = max(int(row["round"]) for row in rows)
    shown = dict.fromkeys([1, *(max(1, rounds * quarter // 4) for quarter in (1, 2, 3, 4))])

    def means(group: str, at: int) -> Iterator[float]:
        for same in (True, False):
            cosines = [
                float(row["cosine"])
                for row in rows
                if (row["group"], int(row["round"])) == (group, at)
                and (int(row["client"]) // clients_a_domain == int(row["other"]) // clients_a_domain) == same
            ]
            yield round(sum(cosines) / len(cosines), 4)

    groups = dict.fromkeys(row["group"] for row in rows)
    return {group: {str(at): list(means(group, at)) for at in shown} for group in groups}
