"""Who trains in which round, and for how long in simulated time."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from lightning.fabric.utilities.data import sized_len

from lit_pfl.core.asynchronous import Asynchronous, Schedule
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.core.deadline import Deadline, Plan
from lit_pfl.core.participation import Participation, participants
from lit_pfl.data import ClientData
from lit_pfl.engines import Work
from lit_pfl.errors import ConfigError
from lit_pfl.randomness import Draws


class Timetable:
    """Says who trains in a round, and lets the server begin it.

    Args:
        work: the clients' data, and what a round is.
        draws: source of all randomness.
        participation: who trains; with ``asynchronous``, how many at the same time.
        deadline: when a round ends without the clients that are too slow; None: it waits for all.
        asynchronous: when the server takes its steps; None: when all have uploaded.
    """

    def __init__(
        self,
        work: Work,
        draws: Draws,
        participation: float | Participation,
        deadline: Deadline | None,
        asynchronous: Asynchronous | None,
    ) -> None:
        self.work, self.draws, self.participation = work, draws, participation
        self.deadline, self.asynchronous = deadline, asynchronous
        if deadline is not None:
            deadline.speeds.check(work.data.clients)

    def participants(self, completed: int) -> list[int]:
        """Return the ids of the clients that train in the round after ``completed`` rounds."""
        if self.asynchronous is not None:
            return sorted(self._schedule.step(completed).staleness)
        return participants(self.participation, completed, self._samples, self.draws)

    def begin_round(self, coordinator: Coordinator, completed: int, left: Collection[int]) -> Plan:
        """Let the server begin a round.

        Args:
            coordinator: the server's side.
            completed: number of rounds before this one, also of those that nobody has uploaded in.
            left: ids of the clients that do not train any more.

        Returns:
            What the deadline makes of the round.
        """
        plan = Plan()
        if self.deadline is not None:
            clients = set(self.participants(completed)) - set(left)
            plan = self.deadline.plan(completed + 1, {client: self.batches[client] for client in clients}, self.draws)
        if self.asynchronous is not None:
            step = self._schedule.step(completed)
            coordinator.begin_round(step.clock - coordinator.clock)
            coordinator.send_out([client for client in step.starts if client not in left], step.staleness)
        else:
            coordinator.begin_round(plan.seconds, coordinator.privacy is not None and self._nobody_drawn(completed))
        return plan

    def _nobody_drawn(self, completed: int) -> bool:
        chooses = self.participation
        return isinstance(chooses, Participation) and chooses.nobody_drawn(completed, self._samples, self.draws)

    def draw_again(self, seed: int) -> None:
        """Draw by another seed from now on."""
        self.draws.seed = seed
        self.__dict__.pop("_schedule", None)

    @cached_property
    def _samples(self) -> dict[int, int]:
        """Numbers of training samples of all clients, by id."""
        return {client: self.work.data.client(client).num_samples for client in self.work.data.clients}

    @cached_property
    def batches(self) -> dict[int, int]:
        """Numbers of batches that clients train in a whole round, by id."""
        work, data = self.work, self.work.data
        return {k: batches_of_round(k, data.client(k), work.local_epochs, work.options) for k in data.clients}

    @cached_property
    def _schedule(self) -> Schedule:
        assert self.asynchronous is not None
        assert not isinstance(self.participation, Participation)
        return Schedule(self.asynchronous, self.batches, self.participation, self.draws)


def batches_of_round(client: int, data: ClientData, local_epochs: int, options: Mapping[str, Any]) -> int:
    """Return how many batches of training data a client has in a round.

    A method that trains on a part of them, such as PerFedAvg and FedFOMO, takes less; that is not counted.
    ``options`` are ``federation.client_trainer``, which may limit the batches of an epoch.

    Raises:
        ConfigError: when its loader has no length.
    """
    batches = sized_len(data.train)
    limit = options.get("limit_train_batches")
    if isinstance(limit, int):
        batches = limit if batches is None else min(batches, limit)
    if batches is None:
        raise ConfigError(
            f"federation.deadline, or asynchronous: client {client}'s training loader has no length, so nobody knows "
            "how long a round takes; set federation.client_trainer.limit_train_batches to a number of batches."
        )
    if isinstance(limit, float):
        batches = int(batches * limit)
    return batches * local_epochs
