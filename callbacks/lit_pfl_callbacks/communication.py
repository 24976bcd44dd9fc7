"""What is sent, by client, direction and kind of tensor, and how good a model that many bytes have made."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import lightning as L

from lit_pfl_callbacks.dashboard import Dashboard
from lit_pfl_callbacks.listening import Listening, is_told
from lit_pfl_callbacks.protocols import HasClients, HasRoles, Transfer
from lit_pfl_callbacks.rounds import RoundTable, ends_round
from lit_pfl_callbacks.tensors import check_patterns
from lit_pfl_callbacks.waiting import waits

COLUMNS = ["round", "client", "direction", "group", "bytes"]
ALL, HEADER = "all", "header"
Key = tuple[int, int | str, str, str]


class CommunicationLedger(Listening):
    """Writes the bytes of every round, client, direction and group of tensors into ``communication.csv``.

    It works with every module that has ``traffic`` (:class:`~lit_pfl_callbacks.protocols.HasTraffic`), and with
    any module at all under a Trainer that has a :class:`~lit_pfl_callbacks.FederatedLoop`; elsewhere nothing is sent,
    which a warning says. Loggers get the bytes of every group, and at the end the monitored metric over the bytes sent
    up to then.

    The file has a line for both directions and every group a round, whatever the number of clients: they are added up
    as client ``all``. With ``per_client`` it has as many for every client, about 40 bytes each.

    Args:
        groups: regular expressions by the name of a group; a tensor is of the first that is found in its name. By
            default a client says itself (``roles()``); a tensor of which nobody says anything is of the group that
            its name begins with, up to the first dot.
        per_client: whether every client has lines of its own.
        monitor: the metric to hold against bytes. By default ``val/acc``, or else the first ``val...`` that there is.

    Raises:
        MisconfigurationException: for a pattern that is not a regular expression.

    Attributes:
        total: bytes sent so far, both ways.
        curve: ``(bytes sent so far, metric)`` of every round that was scored.

    Names, types and shapes, which are sent next to the tensors, are the group ``header``.
    """

    def __init__(
        self, groups: dict[str, str] | None = None, per_client: bool = False, monitor: str | None = None
    ) -> None:
        check_patterns("CommunicationLedger(groups=...)", *(groups or {}).values())
        self.groups = {name: re.compile(pattern) for name, pattern in (groups or {}).items()}
        self.per_client = per_client
        self.monitor = monitor
        self.total = 0
        self.curve: list[tuple[int, float]] = []
        self._table = RoundTable("communication.csv", COLUMNS)
        self._dashboard = Dashboard()
        self._bytes: Counter[Key] = Counter()  # of what is not written yet
        self._roles: Mapping[str, str] = {}
        self._names: dict[str, str] = {}
        self._scored = False
        self._shown = monitor or "val/acc"

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Listen, before anything is sent."""
        self._table.check(trainer)
        if isinstance(pl_module, HasClients):
            self._roles = next(iter(pl_module.ask(_roles, pl_module.client_ids[:1]).values()), {})
        else:
            self._roles = _roles(pl_module)
        self._names = {}
        if not is_told(trainer, pl_module):
            name = type(pl_module).__name__
            waits(trainer, self, f"a federation, or a FederatedLoop in this Trainer; {name} on its own sends nothing")
        super().on_fit_start(trainer, pl_module)

    def _note(self, sent: Transfer) -> None:
        client: int | str = ALL if not self.per_client else "" if sent.client is None else sent.client
        inside = 0
        for name, size in sent.sizes.items():
            group = self._names.get(name) or self._named(name)
            self._bytes[sent.round, client, sent.direction, group] += size
            inside += size
        if sent.nbytes > inside:
            self._bytes[sent.round, client, sent.direction, HEADER] += sent.nbytes - inside
        self.total += sent.nbytes

    def _named(self, name: str) -> str:
        """Return a tensor's group; ``3/body.weight`` is client 3's ``body.weight``."""
        plain = name.partition("/")[2] or name
        found = next((group for group, pattern in self.groups.items() if pattern.search(name)), None)
        self._names[name] = found or self._roles.get(plain) or plain.partition(".")[0]
        return self._names[name]

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take note that the round is scored."""
        self._scored = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the rounds that are over: those of which anything has come up."""
        if ends_round(trainer):
            self._write(trainer, max((round for round, _, way, _ in self._bytes if way == "up"), default=0))
        name = self._monitored(trainer) if self._scored else None
        if name is not None:
            self._shown = name
            value = float(trainer.callback_metrics[name])
            self.curve.append((self.total, value))
            self._dashboard.point(trainer, f"{name} over bytes", self.total, value)
        self._scored = False

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what is left, such as a last reply, and show the curve."""
        self._write(trainer, max((round for round, *_ in self._bytes), default=0))
        if self.curve:
            points = [{"bytes": sent, self._shown: value} for sent, value in self.curve]
            self._dashboard.curve(trainer, f"{self._shown} over bytes", points)

    def _monitored(self, trainer: L.Trainer) -> str | None:
        names = list(trainer.callback_metrics)
        if self.monitor is not None:
            return self.monitor if self.monitor in names else None
        if not is_told(trainer, trainer.lightning_module):
            return None
        return "val/acc" if "val/acc" in names else next((name for name in names if name.startswith("val")), None)

    def _write(self, trainer: L.Trainer, last: int) -> None:
        keys = [key for key in self._bytes if key[0] <= last]
        for round in sorted({key[0] for key in keys}):
            sizes = {key: self._bytes.pop(key) for key in keys if key[0] == round}
            self._table.add(trainer, [dict(zip(COLUMNS, (*key, size), strict=True)) for key, size in sizes.items()])
            sums: Counter[str] = Counter()
            for (_, _, way, group), size in sizes.items():
                sums[f"comm/{way}/{group}"] += size
            self._dashboard.scalars(trainer, round, sums)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "total": self.total,
            "curve": list(self.curve),
            "shown": self._shown,
            "bytes": [[*key, size] for key, size in self._bytes.items()],
            "table": self._table.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over counts."""
        self.total = state_dict["total"]
        self.curve = [(sent, value) for sent, value in state_dict["curve"]]
        self._shown = state_dict["shown"]
        self._bytes = Counter({tuple(key): size for *key, size in state_dict["bytes"]})
        self._table.load_state_dict(state_dict["table"])


def _roles(module: Any) -> Mapping[str, str]:
    """Return which group every tensor that a client sends belongs to, as far as it says so."""
    return module.roles() if isinstance(module, HasRoles) else {}
