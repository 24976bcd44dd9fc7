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
#: how the model's name ends of a client that has never trained
UNTRAINED = ":untrained"


def with_states(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lines of ``clients.csv`` with the column ``state``; where it is lacking, the model's name says it."""
    return [
        row if row.get("state") else {**row, "state": BY_OPTION.get(row["model"].rpartition(":")[2], "")}
        for row in rows
    ]
