"""Another run to hold one's own against, client by client."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_pfl_callbacks.protocols import Row
from lit_pfl_callbacks.run_folder import read_rows


class Baseline:
    """The scores that another run ended with.

    Args:
        folder: its run folder.

    Raises:
        MisconfigurationException: when there are none.
    """

    def __init__(self, folder: Path) -> None:
        lines = read_rows(folder / "clients.csv")
        if not lines:
            raise MisconfigurationException(
                f"ClientsTable(baseline={str(folder)!r}): there are no scores; give the folder of a finished run, "
                "which holds a clients.csv."
            )
        self._scores: dict[str, dict[int, dict[str, Any]]] = {}
        for split in {line["split"] for line in lines}:
            own = [line for line in lines if line["split"] == split]
            last = max(int(line["round"]) for line in own)
            own = of_own_models([line for line in own if int(line["round"]) == last], lambda line: line["model"])
            # a client's first line is of the run's own evaluation; a later test may have scored another state, below it
            self._scores[split] = {int(line["client"]): line for line in reversed(own)}

    def gains(self, rows: Sequence[Row], higher_is_better: Mapping[str, bool]) -> dict[str, dict[int, float]]:
        """Return by how much clients are better, by metric and client.

        Args:
            rows: their scores now.
            higher_is_better: the directions of those metrics that have one.

        Returns:
            For metrics that both runs have, and clients that are in both, by the last scores there on the same split.
        """
        gains: dict[str, dict[int, float]] = {}
        for row in rows:
            before = self._scores.get(row.split, {}).get(row.client, {})
            for name, value in row.scores.items():
                if name in higher_is_better and before.get(name, "") != "":
                    gain = value - float(before[name])
                    gains.setdefault(name, {})[row.client] = gain if higher_is_better[name] else -gain
        return gains


def of_own_models(rows: Sequence[Any], model_of: Any = lambda row: row.model) -> list[Any]:
    """Return the scores of every client's own model, the first kind that there is; methods may have further ones."""
    kinds = [model_of(row).partition(":")[0] for row in rows]
    return [row for row, kind in zip(rows, kinds, strict=True) if kind == kinds[0]]
