"""Compare methods: run each with each seed, as many at once as there are cores, and end with a table and a report.

Finished runs are not repeated, and interrupted ones continue: after a Ctrl-C, or with a further seed or method, give
the same command. A method is a name, or a configuration file with its own options.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from lit_pfl.cli.config_files import ENDING, find, hint, located, with_fragments
from lit_pfl.cli.folders import root_of_runs
from lit_pfl.cli.overview import methods as names_of_methods
from lit_pfl.cli.report import read, require_charts, write_report
from lit_pfl.cli.runner import OUTPUT, Job, Outcome, run_jobs
from lit_pfl.cli.trial import SEEDS
from lit_pfl.errors import ConfigError
from lit_pfl.report import grouped, main_metric, paired_by_state, summary, validated


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--methods",
        nargs="+",
        required=True,
        metavar="METHOD",
        help="Names such as SimFed, class paths, or configuration files or their names, such as simfed.",
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="SEED", help="Seeds of every method. Default: 1 2 3."
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        help="Options that all runs share, as for fit: a configuration file, or YAML such as "
        "'{trainer: {max_epochs: 5}}'. They override a method's own file. May be given several times.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="By default runs/compare, or compare in the trainer.default_root_dir that all have in common.",
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="Number of runs at once. Default: one per core.")


def run(options: argparse.Namespace) -> None:
    """Run what is missing, and show what came."""
    require_charts()
    if options.jobs is not None and options.jobs < 1:
        raise ConfigError(f"--jobs={options.jobs}: give 1 or more.")
    if options.output is None:
        options.output = Path(root_of_runs(_root(options.config))) / "compare"
    jobs = make_jobs(options.methods, options.seeds, options.config, options.output)
    told = 0

    def tell(outcome: Outcome) -> None:
        nonlocal told
        told += 1
        place = outcome.job.folder.relative_to(options.output)
        print(f"[{told}/{len(jobs)}] {place}: {outcome.state}, {outcome.seconds:.0f} s {outcome.message}", flush=True)

    print(f"{len(jobs)} runs in {options.output}; what each prints is in its {OUTPUT}.", flush=True)
    try:
        outcomes = run_jobs(jobs, options.jobs, tell=tell)
    except KeyboardInterrupt:
        print("Stopped. The same command continues.")
        raise
    failed = [outcome.job.folder for outcome in outcomes if outcome.state == "failed"]
    runs = [read(job.folder) for job in jobs if job.folder not in failed]
    if runs:
        page = write_report(runs, options.output / "report.html")
        groups, metric = grouped(runs), main_metric(runs)
        if metric is not None:
            tables = (summary(groups, metric), *paired_by_state(groups, metric), validated(groups, metric))
            for table in filter(None, tables):
                print(f"\n{table.title}\n\n{table.markdown()}", end="")
        print(f"\nReport: {page}")
    if failed:
        raise ConfigError(
            f"{len(failed)} of {len(jobs)} runs failed, the first in {failed[0]}: see its {OUTPUT}. Where it holds a "
            "run of other options, remove it or choose another --output."
        )


def make_jobs(methods: list[str], seeds: list[int], configs: list[str], output: Path) -> list[Job]:
    """Return the runs of a comparison, all methods with the first seed first.

    Args:
        methods: names, class paths or configuration files.
        seeds: the seeds.
        configs: configuration files, or YAML, that all have in common.
        output: the folder of all; a run's own is ``METHOD/seed_N`` in it.

    Raises:
        ConfigError: when a method is not there, or there twice, when a seed is below 0 or too large, or when a file in
            common chooses a method.
    """
    files = {method: None if method in names_of_methods() else find(method) for method in methods}
    own = {method: _arguments(method, file, configs) for method, file in files.items()}
    names = [file.stem if (file := files[method]) else method.rpartition(".")[2] for method in methods]
    if wrong := [seed for seed in seeds if not 0 <= seed < SEEDS]:
        raise ConfigError(f"--seeds: {wrong[0]}; give whole numbers from 0 to {SEEDS - 1}.")
    for what, given in (("methods", names), ("seeds", seeds)):
        if twice := [one for one, count in Counter(given).items() if count > 1]:
            raise ConfigError(f"--{what}: {twice[0]} is there twice.")
    return [
        Job(output / name / f"seed_{seed}", (*own[method], f"--seed_everything={seed}"))
        for seed in seeds
        for method, name in zip(methods, names, strict=True)
    ]


def _arguments(method: str, file: Path | None, configs: list[str]) -> list[str]:
    shared = [word for config in configs for word in ("--config", str(located(config) or config))]
    if file is not None:
        for config in configs:
            if _chooses_method(config):
                raise ConfigError(
                    f"--config={config}: it chooses a method itself, and would replace that of {method}; leave "
                    "model.class_path out of what all have in common."
                )
        return ["--config", str(file), *shared, *QUIET]
    if method.endswith((ENDING, ".yml")):
        raise ConfigError(f"--methods: there is no file {method}. {hint(method)}")
    if "." not in method and method not in names_of_methods():
        raise ConfigError(
            f"--methods: there is no {method!r}; choose of {', '.join(names_of_methods())}, or give a class path or a "
            "configuration file."
        )
    # first, so that its options in what all share are understood; last, so that nothing there replaces it
    return ["--model", method, *shared, "--model", method, *QUIET]


#: nobody watches
QUIET = ("--trainer.enable_progress_bar=false",)


def _chooses_method(config: str) -> bool:
    models = [content.get("model") for content in _contents(config)]
    return any(isinstance(model, str) or (isinstance(model, dict) and "class_path" in model) for model in models)


def _root(configs: list[str]) -> str | None:
    """Return the ``trainer.default_root_dir`` that all have in common: the last that a configuration gives."""
    trainers = [content.get("trainer") for config in configs for content in _contents(config)]
    roots = [
        one["default_root_dir"] for one in trainers if isinstance(one, dict) and one.get("default_root_dir") is not None
    ]
    return roots[-1] if roots else None


def _contents(config: str) -> list[dict[str, Any]]:
    """Return the options of a configuration file and of its fragments, or of YAML."""
    files = with_fragments(config) if located(config) else []
    texts = [Path(file).read_text(encoding="utf-8") for file in files] or [config]
    try:
        return [content for text in texts if isinstance(content := yaml.safe_load(text), dict)]
    except yaml.YAMLError as error:
        raise ConfigError(f"--config: {config} is not YAML: {error}") from None
