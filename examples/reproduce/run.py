"""Run the cells of a paper's table and write its page: printed numbers next to ours.

    python examples/reproduce/run.py simfed table1 --seeds 1 2 3 --root FOLDER
    python examples/reproduce/run.py simfed table1 --seeds 1 2 3 --root FOLDER --scale middle --hours 0.7
    python examples/reproduce/run.py --plan examples/reproduce/gpu.yaml --seeds 1 2 3 --root FOLDER
    python examples/reproduce/run.py simfed table3 --rows SimFed --print > cell.yaml

The most telling cells come first. What has a result is not run again, what was cut off continues; stop it at any time.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from joblib import cpu_count
from page import orderings, page
from results import Results, alone_in, collect
from tables import PAPERS, ROOT, Run, Table

from lit_pfl.cli.runner import Job, Outcome, run_jobs
from lit_pfl.errors import ConfigError
from lit_pfl_callbacks.files import replacing
from lit_pfl_callbacks.run_folder import read_rows

#: what a part of a plan may say
PARTS = {"paper", "table", "scale", "columns", "rows"}
#: options after ``--`` that may stand beside a result: they say where and how it is computed, not what
HARMLESS = {
    *("data.download", "data.eval_batch_size", "data.verify", "federation.engine", "federation.threads"),
    *("model.channels_last", "trainer.accelerator", "trainer.benchmark", "trainer.check_val_every_n_epoch"),
}
#: on a GPU, the memory that a cell is given when nothing is said, in GB
GIGABYTES = 12.0


@dataclass(frozen=True)
class Planned:
    """A run with a seed, and the tables that it is for."""

    run: Run
    seed: int
    clients_a_domain: int | None
    tables: tuple[Table, ...]


class Reproduction:
    """Runs cells, keeps their results and writes pages.

    Args:
        options: see :func:`parser`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        names = (word.partition("=")[0] for word in options.further if word.startswith("-"))
        other = next((name for name in names if name.removeprefix("--") not in HARMLESS), None)
        if other is not None and not options.estimate:
            raise ConfigError(
                f"-- {other} would make it another run; of these there are {', '.join(sorted(HARMLESS))}."
            )
        for name in ("at_once", "gigabytes"):
            if getattr(options, name) is not None and getattr(options, name) <= 0:
                raise ConfigError(f"--{name} {getattr(options, name)}: give a number above 0.")
        self.at_once = options.at_once or at_once(options.gigabytes)
        self.tables = list(self._tables())
        self.planned: dict[Path, Planned] = {}
        for table, columns, rows in self.tables:
            for run, seed in table.runs(columns, rows, [1] if options.estimate else options.seeds):
                self._plan(table, run, seed)

    def _tables(self) -> Iterator[tuple[Table, list[str], list[str]]]:
        options = self.options
        if options.plan is None:
            yield Table(options.papers / options.paper, options.table, options.scale), options.columns, options.rows
            return
        try:
            parts = yaml.safe_load(options.plan.read_text())
        except yaml.YAMLError as error:
            raise ConfigError(f"{options.plan} is not YAML: {error}") from None
        if not isinstance(parts, list):
            raise ConfigError(f"{options.plan}: give a list of tables.")
        for part in parts:
            if not isinstance(part, dict) or not {"paper", "table"} <= part.keys() <= PARTS:
                raise ConfigError(
                    f"{options.plan}: {part}: give paper, table and, if need be, scale, columns and rows."
                )
            table = Table(options.papers / part["paper"], part["table"], part.get("scale", options.scale))
            yield table, part.get("columns", []), part.get("rows", [])

    def _plan(self, table: Table, run: Run, seed: int) -> None:
        what = "estimate" if self.options.estimate else "runs"
        folder = self.options.runs / what / run.paper / run.folder / f"seed_{seed}"
        before = self.planned.get(folder)
        domains = next((int(row["clients_a_domain"]) for row in table.rows.values() if "clients_a_domain" in row), None)
        self.planned[folder] = Planned(
            run,
            seed,
            domains or (before.clients_a_domain if before else None),
            (*(before.tables if before else ()), table),
        )

    def print(self) -> None:
        """Write the one run that is chosen as a configuration file to standard output.

        Raises:
            ConfigError: when several runs are chosen.
        """
        chosen = {planned.run.fingerprint: planned for planned in self.planned.values()}
        if len(chosen) != 1:
            raise ConfigError(f"--print: these are {len(chosen)} runs; choose one cell by --columns and --rows.")
        [planned] = chosen.values()
        print(f"# {planned.tables[0].title}: {planned.run.name}\n{planned.run.text}", end="")

    def results(self, run: Run) -> Results:
        """Return the results of a run's paper."""
        return Results(self.options.results / f"{run.paper}.jsonl")

    def jobs(self) -> list[Job]:
        """Return what is not done yet."""
        jobs = []
        for folder, planned in self.planned.items():
            if not self.options.estimate and self.results(planned.run).of(planned.run, planned.seed) is not None:
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # it was cut off between the two
                continue
            scored = any(row.get("test/acc") for row in read_rows(folder / "metrics.csv"))
            if scored and not (folder / "checkpoints").exists():
                shutil.rmtree(folder)  # it had a result once, which somebody has removed
            jobs.append(Job(folder, tuple(self._arguments(planned))))
        return jobs

    def _arguments(self, planned: Planned) -> Iterator[str]:
        yield f"--config={planned.run.text}"
        yield from (f"--seed_everything={planned.seed}", "--trainer.enable_progress_bar=false")
        if self.options.root is not None:
            yield f"--data.root={self.options.root.resolve()}"
        # counts seconds of training, over interruptions; its own default is of a type that no configuration can hold
        yield from ("--trainer.callbacks+=Timer", "--trainer.callbacks.interval=step")
        if self.options.estimate:
            yield "--trainer.max_epochs=1"
        yield from self.options.further

    def keep(self, outcome: Outcome) -> None:
        """Take note of what came of a cell."""
        folder = outcome.job.folder
        planned = self.planned[folder]
        name = f"{planned.run.paper}: {planned.run.name}, seed {planned.seed}"
        if outcome.state not in ("done", "there"):
            print(f"{outcome.state}: {name} {outcome.message}", flush=True)
            return
        if not self.options.estimate and self.results(planned.run).of(planned.run, planned.seed) is not None:
            return  # another runner was faster
        result = collect(folder, planned.run, planned.seed, planned.clients_a_domain)
        if self.options.estimate:
            # what is not training: the start, the data, the test of the last round
            beside = max(0.0, outcome.seconds - result["seconds"])
            hours = (beside + planned.run.rounds * result["seconds"]) / 3600
            print(f"{name}: {result['seconds']:.1f} s a round, {beside:.0f} s beside, {hours:.2f} hours", flush=True)
            shutil.rmtree(folder)
            return
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self.results(planned.run).add({**result, "device": device, "at_once": self.at_once})
        shutil.rmtree(folder / "checkpoints")
        for table in planned.tables:
            self.write_page(table)
        print(f"{name}: {100 * result['scores']['test/acc']:.2f} in {result['seconds']:.0f} s", flush=True)

    def write_page(self, table: Table) -> None:
        """Write a table's page, if there is anything to write."""
        results = Results(self.options.results / f"{table.paper.name}.jsonl")
        if not results.path.exists():
            return
        at = "" if table.scale == "paper" else f"_{table.scale}"
        path = self.options.results / f"{table.paper.name}_{table.name}{at}.md"
        with alone_in(self.options.results), replacing(path) as file:  # other runners may write it too
            file.write(page(table, results).encode())

    def _print_orderings(self, table: Table) -> None:
        """Print in which state how many of the printed orderings hold."""
        results = Results(self.options.results / f"{table.paper.name}.jsonl")
        for order in (order for column in table.columns for order in orderings(table, column, results)):
            print(f"{table.title}: {order.summary}", flush=True)

    def run(self) -> int:
        """Run, and return the exit code: 1 where a cell failed."""
        jobs = self.jobs()
        print(
            f"{len(self.planned) - len(jobs)} of {len(self.planned)} cells have a result; {len(jobs)} to run.",
            flush=True,
        )
        seconds = None if self.options.hours is None else 3600 * self.options.hours
        outcomes = run_jobs(jobs, self.at_once, seconds, self.keep)
        if not self.options.estimate:
            for table, _, _ in self.tables:
                self.write_page(table)
                self._print_orderings(table)
        done = sum(outcome.state in ("done", "there") for outcome in outcomes)
        if done < len(jobs):
            print(f"{len(jobs) - done} cells are left; the same command continues with them.")
        return int(any(outcome.state == "failed" for outcome in outcomes))


def at_once(gigabytes: float) -> int:
    """Return how many cells run at a time: one a core, and on a GPU no more than its free memory has room for."""
    cores = cpu_count()
    if not torch.cuda.is_available():
        return cores
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(cores, int(free / 1e9 / gigabytes)))


def parser() -> argparse.ArgumentParser:
    """Return what the command takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", nargs="?", help="simfed, factorized_fl, psi_net, fedslr or pfllib")
    parser.add_argument("table", nargs="?", help="table1, ...: a name in configs/paper/PAPER/tables.yaml")
    parser.add_argument("--plan", type=Path, help="a file that lists parts of tables, in place of one table")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--root", type=Path, help="where the data are")
    parser.add_argument("--scale", default="paper", help="paper (the default), middle or reduced")
    parser.add_argument("--columns", nargs="+", default=[], help="only these columns")
    parser.add_argument("--rows", nargs="+", default=[], help="only these rows")
    parser.add_argument("--hours", type=float, help="stop after so long")
    parser.add_argument("--at_once", type=int, help="cells at a time; default: one a core, on a GPU as many as fit in")
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES, help="memory of a cell on a GPU; default: 12")
    parser.add_argument(
        "--estimate", action="store_true", help="run a round of each cell and say how long it would take"
    )
    parser.add_argument(
        "--print",
        action="store_true",
        help="run nothing; print the chosen cell as a configuration file for lit-pfl fit",
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "reproduce", help="folder of the run folders")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "reproduction", help="folder of what comes out")
    parser.add_argument("--papers", type=Path, default=PAPERS, help="folder of the papers' configurations")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: what was typed; what stands after ``--`` are further options of every run.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    command = parser()
    options: Any = command.parse_args(words[:cut])
    options.further = words[cut + 1 :]
    if (options.plan is None) == (options.table is None):
        command.error("give a paper and a table, or --plan FILE")
    for name in ("runs", "results", "papers"):
        setattr(options, name, getattr(options, name).resolve())
    try:
        reproduction = Reproduction(options)
        if options.print:
            reproduction.print()
            return 0
        return reproduction.run()
    except (ConfigError, OSError) as error:
        command.exit(2, f"error: {error}\n")
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
