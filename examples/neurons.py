"""Pictures of what neurons have learnt, from the features.csv that FeatureAlignment leaves in run folders.

lit-pfl fit --config ... --trainer.callbacks+=FeatureAlignment
python examples/neurons.py neurons.png FedAvg=runs/FedAvg-CIFAR10/version_0 Psi-Net=runs/PsiNet-CIFAR10/version_0
python examples/neurons.py variance.png --variance --depth 4 VGG-9=runs/depth/version_0

Neurons are coloured by the class that they prefer most: a line of cells a node, so that what is averaged stands one
below the other. It needs matplotlib: pip install 'lit-pfl[docs]'.
"""

import argparse
import csv
from collections import defaultdict
from itertools import combinations, cycle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

#: Petroff's ten colours, which people with any colour vision tell apart
COLOURS = ["#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"]
NONE, ABSENT = 10, 11  # beside the classes: a neuron that prefers nothing, and one that a node does not have
CMAP = ListedColormap([*COLOURS, "#e4e4e4", "white"])
Rows = list[dict[str, str]]


def read(run: Path) -> Rows:
    """Return the latest measurement of a run."""
    with (run / "features.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["epoch"] == rows[-1]["epoch"]]


def top_classes(rows: Rows, num_classes: int) -> dict[str, np.ndarray]:
    """Return (nodes, neurons) top classes of every layer by name, NONE and ABSENT included.

    In a layer that is divided into a group a class, a node without some classes lacks their groups; the others are
    moved to where they belong.
    """
    layers: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for row in rows:
        layers[row["layer"]][row["client"]] = np.array([int(c) for c in row["top_classes"].split()])
    own = {client: sorted(set(tops.tolist()) - {-1}) for client, tops in layers[rows[-1]["layer"]].items()}
    found = {}
    for layer, nodes in layers.items():
        if all(_is_divided(tops, own[client]) for client, tops in nodes.items()):
            lines = []
            for client, tops in nodes.items():
                line = np.full((num_classes, len(tops) // len(own[client])), ABSENT)
                line[own[client]] = tops.reshape(len(own[client]), -1)
                lines.append(line.ravel())
            nodes = dict(zip(nodes, lines, strict=True))
        grid = np.stack(list(nodes.values()))
        found[layer] = np.where(grid == -1, NONE, grid)
    return found


def _is_divided(tops: np.ndarray, own: list[int]) -> bool:
    """Say whether the equal parts of a node's layer prefer one of its classes each, or nothing."""
    if not own or len(tops) % len(own):
        return False
    parts = tops.reshape(len(own), -1)
    return all(set(part.tolist()) <= {c, -1} for part, c in zip(parts, own, strict=True))


def agreement(grid: np.ndarray) -> float:
    """Return how often two nodes' neurons in the same place prefer the same class, among those that both have."""
    same = [(a[both] == b[both]) for a, b in combinations(grid, 2) if (both := (a < NONE) & (b < NONE)).any()]
    return float(np.concatenate(same).mean()) if same else float("nan")


def draw_neurons(runs: dict[str, Rows], names: list[str], title: str) -> Any:
    """Return a figure: a column a run, a block a layer, a line a node."""
    grids = {label: top_classes(rows, len(names)) for label, rows in runs.items()}
    depth = max(len(layers) for layers in grids.values())
    figure, axes = plt.subplots(depth, len(runs), figsize=(6.2 * len(runs), 1.05 * depth + 1.4), squeeze=False)
    for column, (label, layers) in enumerate(grids.items()):
        axes[0][column].set_title(label, fontsize=13, pad=18)
        for row, grid in enumerate(layers.values()):
            axis = axes[row][column]
            axis.imshow(grid, cmap=CMAP, vmin=-0.5, vmax=11.5, aspect="auto", interpolation="nearest")
            axis.set_yticks([0, len(grid) - 1], ["1", str(len(grid))], fontsize=7)
            axis.set_xticks([])
            axis.set_ylabel(f"layer {row + 1}", fontsize=9)
            axis.text(1, 1.03, f"{grid.shape[1]} neurons, {agreement(grid):.0%} alike", fontsize=8,
                      transform=axis.transAxes, ha="right", va="bottom")  # fmt: skip
            for line in range(1, len(grid)):
                axis.axhline(line - 0.5, color="white", linewidth=0.6)
    handles = [Patch(facecolor=colour, label=name) for colour, name in zip(COLOURS, names, strict=False)]
    handles.append(Patch(facecolor=CMAP(NONE), label="none"))
    if any((grid == ABSENT).any() for layers in grids.values() for grid in layers.values()):
        handles.append(Patch(facecolor="white", edgecolor="black", linewidth=0.5, label="not at this node"))
    figure.legend(handles=handles, ncols=6, loc="lower center", fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.55 / figure.get_figheight(), 1, 1), h_pad=0.4)
    return figure


def draw_variance(runs: dict[str, Rows], depth: int | None, title: str) -> Any:
    """Return a figure: every layer's total variance, the mean over nodes."""
    figure, axis = plt.subplots(figsize=(6.2, 3.6))
    colours = [COLOURS[0], COLOURS[2], COLOURS[1], *COLOURS[3:]]
    for (label, rows), colour, marker in zip(runs.items(), cycle(colours), cycle("osD"), strict=False):
        values = defaultdict(list)
        for row in rows:
            values[int(row["position"])].append(float(row["total_variance"]))
        axis.plot(list(values), [np.mean(v) for v in values.values()], color=colour, marker=marker, label=label)
    if depth is not None:
        axis.axvline(depth + 0.5, color="black", linestyle="--", linewidth=1)
        axis.text(depth + 0.55, 0.02, "groups from here on", fontsize=8)
    axis.set(xlabel="layer", ylabel="total variance", ylim=(0, 1), title=title)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False)
    figure.tight_layout()
    return figure


CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"


def main(out: str, runs: list[str], variance: bool = False, depth: int | None = None, title: str = "",
         classes: str = CIFAR10) -> None:  # fmt: skip
    """Draw the runs, given as LABEL=FOLDER, into a file."""
    rows = {label: read(Path(folder)) for label, folder in (run.split("=", 1) for run in runs)}
    figure = draw_variance(rows, depth, title) if variance else draw_neurons(rows, classes.split(), title)
    figure.savefig(out, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN")
    parser.add_argument("--variance", action="store_true", help="total variance by layer in place of neurons")
    parser.add_argument("--depth", type=int, help="where groups begin, for --variance")
    parser.add_argument("--title", default="")
    parser.add_argument("--classes", default=CIFAR10, help="their names, up to ten")
    main(**vars(parser.parse_args()))
