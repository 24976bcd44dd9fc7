"""What a reader may expect of every method: measured by this file as a program, shown on the method's page.

    python docs/extensions/expected.py
    python docs/extensions/expected.py --methods Ditto FedAvg --jobs 2

types each method's command with each seed and writes ``docs/expected.csv``, one row per run. A run that has a row is
not repeated: delete the rows of a method that has changed.
"""

import argparse
import csv
import importlib
import io
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import lit_pfl.methods
from lit_pfl.cli import main as lit_pfl_command
from lit_pfl_callbacks.run_folder import read_rows

ROOT = Path(__file__).parent.parent.parent
FILE = ROOT / "docs/expected.csv"
SEEDS = (1, 2, 3)
#: options that make a run quicker and no other: test scores do not depend on them
QUICKER = (
    "--trainer.enable_progress_bar=false",
    "--trainer.check_val_every_n_epoch=100",
    "--trainer.num_sanity_val_steps=0",
)
#: the states of the models that every test scores, by their column, and how the pages call them
STATES = {"trained": "as trained", "aggregated": "as aggregated"}
#: the part of a method's page
SHOWN = """\
{about}:

```
{command}
```

**Expected:** {scores} (mean and standard deviation over seeds {seeds}; {megabytes:.3g} MB sent, both ways; about \
{seconds:.0f} s of one core after the start).{more}"""
SHORT = "On the bundled digits, five clients with uneven shares of the classes, eight rounds"
ADAPTERS = (
    "On synthetic reviews of six shops, with a small BERT, in the folder that contains `examples/` "
    "(`pip install 'lit-pfl[third-party]'`)"
)
MORE = """ {baselines}So short a run checks an installation and does not rank methods: see [Results](../results.md).

Longer, with the method's own configuration:

```
lit-pfl fit --config {config}
```

In Python: `trainer.fit(Federation({method}(...)), datamodule=Digits())`."""
#: what a method is to be compared with
BASELINES = ("StandAlone", "FedAvg")
COLUMNS = ("method", "seed", *STATES, "megabytes", "seconds")


def arguments(method: str) -> list[str]:
    """Return what follows ``lit-pfl`` in a method's command.

    Methods for adapters have a text model and texts of their own (``examples/adapters.py``); all others share a split.
    """
    adapters = issubclass(getattr(lit_pfl.methods, method), lit_pfl.methods.FedIT)
    return ["fit", "--config", method.lower(), *([] if adapters else ["--config", "short"])]


def measure(method: str, seed: int) -> dict[str, str]:
    """Run one method with one seed, and return its row.

    Raises:
        RuntimeError: when the command fails, which has printed why.
    """
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--seed_everything={seed}", f"--trainer.default_root_dir={folder}", *QUICKER]
        try:
            with redirect_stdout(io.StringIO()):
                lit_pfl_command([*arguments(method), *options])
        except SystemExit as exit:
            raise RuntimeError(f"{method}, seed {seed}: its command failed.") from exit
        [path] = Path(folder).rglob("metrics.csv")
        row = read_rows(path)[-1]
    # the state that the method's own file has evaluated is in the columns without a state
    scores = {state: row.get(f"test/{state}/acc") or row["test/acc"] for state in STATES}
    return {
        "method": method,
        "seed": str(seed),
        **{state: f"{100 * float(score):.2f}" for state, score in scores.items()},
        "megabytes": f"{float(row['comm/total_bytes']) / 1e6:.4g}",
        "seconds": f"{time.process_time() - begun:.0f}",
    }


def shown(method: str) -> str:
    """Return what a method's page says of its command and of what to expect.

    Raises:
        KeyError: when it has not been measured.
    """
    measured = by_method()
    mine = measured[method]
    short = "short" in arguments(method)
    baselines = [f"{name} has {scores(measured[name])}" for name in BASELINES if name != method]
    more = MORE.format(
        baselines=f"With the same options, {'; '.join(baselines)}. ", config=method.lower(), method=method
    )
    return SHOWN.format(
        about=SHORT if short else ADAPTERS,
        command=" ".join(["lit-pfl", *arguments(method), "--seed_everything 1"]),
        scores=scores(mine),
        seeds=", ".join(row["seed"] for row in mine),
        megabytes=statistics.mean(float(row["megabytes"]) for row in mine),
        seconds=statistics.mean(float(row["seconds"]) for row in mine),
        more=more if short else "",
    )


def scores(measured: Sequence[dict[str, str]]) -> str:
    """Return a method's scores in every state, with their spread over seeds."""
    of = {name: [float(row[state]) for row in measured] for state, name in STATES.items()}
    texts = [f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} %" for values in of.values()]
    if len(set(texts)) == 1:
        return f"{texts[0]} {' and '.join(of)}"
    return ", ".join(f"{text} {name}" for text, name in zip(texts, of, strict=True))


def by_method() -> dict[str, list[dict[str, str]]]:
    """Return what has been measured, by method."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows():
        found.setdefault(row["method"], []).append(row)
    return found


def rows() -> list[dict[str, str]]:
    """Return what has been measured."""
    if not FILE.exists():
        return []
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))


def write(measured: Sequence[dict[str, str]]) -> None:
    """Write the file, in the order of the methods' names and seeds."""
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(measured, key=lambda row: (row["method"].lower(), int(row["seed"]))))


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=lit_pfl.methods.__all__, choices=lit_pfl.methods.__all__)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once. Default: 1")
    options = parser.parse_args()
    measured = rows()
    there = {(row["method"], int(row["seed"])) for row in measured}
    left = [(method, seed) for seed in SEEDS for method in options.methods if (method, seed) not in there]
    os.chdir(ROOT)  # the configurations of adapters name a module of examples/
    failed = []
    # a fork a run: none begins with what another has left behind, and none imports these again
    for module in ("lit_pfl.cli.run", "lit_pfl.engines.local", "sklearn.datasets"):
        importlib.import_module(module)
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:
        for run, result in [(run, pool.apply_async(measure, run)) for run in left]:
            try:
                measured.append(result.get())
            except RuntimeError as error:
                failed.append(str(error))
            else:
                write(measured)
                print(*run, measured[-1], flush=True)
    sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
