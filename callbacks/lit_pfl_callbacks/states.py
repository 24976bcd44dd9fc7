"""The states in which a model is scored, as ``clients.csv`` names them."""

from collections.abc import Sequence
from typing import Any

#: as clients trained them; as the server averaged them, which is what the next round starts from; the server's own
TRAINED, AGGREGATED, GLOBAL = "trained", "aggregated", "global"
#: the same for people
WORDS = {TRAINED: "as trained", AGGREGATED: "as aggregated", GLOBAL: "global model"}
#: what the first two are of a client that has been held out of the training, in the order of time
JOINING = {AGGREGATED: "as they join", TRAINED: "after a round of training"}
#: by the value of ``federation.evaluate``, which is also how the models' names in ``clients.csv`` end
BY_OPTION = {"before": TRAINED, "after": AGGREGATED, "global": GLOBAL}
#: how the model's name ends of a client that has never trained; the second is that of former versions
UNTRAINED = (":untrained", ":joining")


def with_states(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lines of ``clients.csv`` with the column ``state``, which former versions did not write."""
    return [row if row.get("state") else _with_state(row) for row in rows]


def _with_state(row: dict[str, Any]) -> dict[str, Any]:
    model, _, when = row["model"].rpartition(":")
    if when == "joining":
        return {**row, "model": f"{model}:untrained", "state": TRAINED}
    return {**row, "state": BY_OPTION.get(when, "")}
