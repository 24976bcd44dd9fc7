"""What a team looks at on W&B, as code: accuracy over rounds and over bytes, clients side by side, maps and times.

    pip install wandb-workspaces
    python examples/wandb/workspace.py ENTITY [PROJECT]

makes a saved view of the runs that ``configs/logger/wandb.yaml`` logs to a project, and prints its address.
"""

import argparse

import wandb_workspaces.reports.v2 as panels
import wandb_workspaces.workspaces as ws

#: by section, by the title of a plot: what it shows over rounds
LINES: dict[str, dict[str, list[str]]] = {
    "Accuracy": {
        "Mean of clients": ["val/acc"],
        "Worst tenth of clients": ["val/acc_worst10"],
        "Deviation between clients": ["val/acc_std"],
        "Test accuracy": ["test/acc"],
        "Training loss": ["train/loss"],
    },
    "Communication, in bytes": {
        "Up, a round": ["comm/up_bytes"],
        "Down, a round": ["comm/down_bytes"],
        "In all": ["comm/total_bytes"],
    },
    "Seconds a round": {
        "Training": ["time/train"],
        "Evaluation": ["time/evaluate"],
        "Aggregation": ["time/aggregate"],
        "Transport": ["time/link"],
    },
    "Sparsity": {
        "Share that is not zero": ["sparsity/density"],
        "Parameters that count": ["sparsity/parameters"],
    },
}
#: by section: pictures, tables and histograms, round by round; a run has those of its method
MEDIA: dict[str, list[str]] = {
    "Clients": ["clients/test", "clients/val/acc", "clients/test/acc"],
    "Who is alike": [
        *(f"similarity/{group}" for group in ("u", "v", "parameters", "embedding", "update")),
        "matching",
    ],
}
EMBEDDINGS = "embeddings_table"  # of W&B's own scatter plot, where EmbeddingMap shows who stands where


def workspace(entity: str, project: str) -> ws.Workspace:
    """Return the view, which is not saved yet."""
    sections = [
        ws.Section(name=name, is_open=True, panels=[_over("round", title, y) for title, y in plots.items()])
        for name, plots in LINES.items()
    ]
    sections[1].panels.insert(0, _over("comm/total_bytes", "Accuracy over bytes", ["val/acc"]))
    sections += [
        ws.Section(name=name, panels=[panels.MediaBrowser(title=key, media_keys=[key]) for key in keys])
        for name, keys in MEDIA.items()
    ]
    places = panels.CustomChart.from_table(EMBEDDINGS, {"x": "x", "y": "y"}, {"title": "Embeddings"})
    places.chart_name = "wandb/scatter/v0"
    sections[-1].panels.append(places)
    sections.append(ws.Section(name="What differs", panels=[panels.RunComparer(diff_only="split")]))
    return ws.Workspace(
        entity=entity,
        project=project,
        name="Federations",
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis="round"),
    )


def _over(x: str, title: str, y: list[str]) -> panels.LinePlot:
    return panels.LinePlot(title=title, x=x, y=[*y], title_x=x)


def main() -> None:
    """Save the view."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entity", help="the user or team that owns the project")
    parser.add_argument("project", nargs="?", default="lit-pfl")
    given = parser.parse_args()
    print(workspace(given.entity, given.project).save().url)


if __name__ == "__main__":
    main()
