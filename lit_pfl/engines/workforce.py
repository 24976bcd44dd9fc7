"""Worker processes of Ray: how they start, are called, and are missed."""

import gc
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_pfl.engines.answers import Warned, opened
from lit_pfl.engines.worker import Worker
from lit_pfl.errors import ConfigError

#: seconds to wait for further workers at the start, once there is one
GATHERING = 60.0


class Handle:
    """A worker process, as the process that commands it sees it.

    Args:
        actor: Ray's handle.
        ready: a reference to the names of its machine and of its node of Ray, there once it is at work.
    """

    where = node = "a machine"

    def __init__(self, actor: Any, ready: Any) -> None:
        self.actor, self.ready = actor, ready


class Workforce:
    """Starts worker processes and calls them.

    Args:
        ray: the module ``ray``, connected.
        resources: what a worker takes, by Ray's names.
        job: references to the arguments of :class:`~lit_pfl.engines.worker.Worker`.
        prepare: has a new worker do what it must before it is called by others; returns a reference to the answer.
        lost: called with a worker that is lost, and with the error that tells it.

    Attributes:
        at_work: workers that can be called.
        coming: workers that are being started, or wait for resources.
    """

    def __init__(
        self,
        ray: Any,
        resources: Mapping[str, float],
        job: tuple[Any, ...],
        prepare: Callable[[Handle], Any],
        lost: Callable[[Handle, Exception], None],
    ) -> None:
        self.ray, self.resources, self._job, self._prepare, self._lost = ray, resources, job, prepare, lost
        options = {key: value for key, value in resources.items() if key in ("num_cpus", "num_gpus", "memory")}
        more = {key: value for key, value in resources.items() if key not in options}
        self._kind = ray.remote(Worker).options(**options, resources=more, max_restarts=0)
        self._told: set[Warned] = set()  # warnings that have been given
        self.at_work: list[Handle] = []
        self.coming: list[Handle] = []

    # -------------------------------------------------------------------------------------------------------- starting

    def gather(self, number: int | None, most: int) -> None:
        """Start the first workers, and wait until they have come; for long only where none has.

        Raises:
            ConfigError: when none can be started.
        """
        gc.collect()  # workers of an earlier federation end with it, and it has cycles
        self.call_up(number, most)
        self._wait()
        if not self.at_work:
            raise ConfigError("federation.engine=Ray: no worker could be started; its logs say why.")
        if self.coming:
            self.ray.wait([worker.ready for worker in self.coming], num_returns=len(self.coming), timeout=GATHERING)
            self.welcome()

    def call_up(self, number: int | None, most: int) -> None:
        """Start workers that are missing.

        Args:
            number: how many there are to be; None for as many as there are resources now.
            most: how many there may be.
        """
        wanted = min(self._fitting() if number is None else number, most)
        for _ in range(wanted - len(self.at_work) - len(self.coming)):
            actor = self._start()
            self.coming.append(Handle(actor, actor.ready.remote()))

    def _start(self) -> Any:
        return self._kind.remote(*self._job)

    def _fitting(self) -> int:
        """Return how many workers there are resources for."""
        there, names = self.ray.cluster_resources(), {"num_cpus": "CPU", "num_gpus": "GPU"}
        return max(1, min((int(there.get(names.get(k, k), 0) // v) for k, v in self.resources.items() if v), default=1))

    def welcome(self) -> None:
        """Put those workers to work that have come."""
        for worker in list(self.coming):
            if not self.ray.wait([worker.ready], timeout=0)[0]:
                continue
            self.coming.remove(worker)
            try:
                worker.where, worker.node = self.ray.get(worker.ready)
                opened(self.ray.get(self._prepare(worker)), True, self._told)
            except self.ray.exceptions.RayError as error:
                rank_zero_warn(f"A worker could not be started: {str(error).strip().splitlines()[-1]}")
                continue
            self.at_work.append(worker)

    def wait_for_one(self, number: int | None, most: int) -> None:
        """Wait for a worker where none is left.

        Raises:
            RuntimeError: when none can be started.
        """
        self.call_up(number, most)
        self._wait()
        if not self.at_work:
            raise RuntimeError("federation.engine=Ray: all workers are lost, and no other can be started.")

    def _wait(self) -> None:
        """Wait for the first worker, unless none is coming."""
        told = False
        while self.coming and not self.at_work:
            come, _ = self.ray.wait([worker.ready for worker in self.coming], timeout=GATHERING)
            if not come and not told:
                free, told = self.ray.available_resources(), True
                rank_zero_warn(
                    f"federation.engine=Ray: no worker has started in {GATHERING:.0f} s, and the run waits. Each takes "
                    f"{self.resources}; of {self.ray.cluster_resources().get('CPU', 0):g} cores "
                    f"{free.get('CPU', 0):g} are free. Another program may have them, or an earlier federation of this "
                    "process, whose federation.engine.abort() ends its workers."
                )
            self.welcome()

    def end(self) -> None:
        """End all workers at once."""
        for worker in [*self.at_work, *self.coming]:
            self.ray.kill(worker.actor)
        self.at_work, self.coming = [], []

    # --------------------------------------------------------------------------------------------------------- calling

    def all(self, call: Callable[[Handle], Any]) -> dict[Handle, Any]:
        """Call all workers; return their answers."""
        return self.answers({worker: call(worker) for worker in self.at_work})

    def answers(self, references: Mapping[Handle, Any], copy: bool = True) -> dict[Handle, Any]:
        """Return the answers that have come, without those of workers that are lost.

        Args:
            references: by worker, to its answer.
            copy: whether the answers' tensors may be written to.

        Raises:
            Exception: what went wrong in a worker.
        """
        if references:
            self.ray.wait(list(references.values()), num_returns=len(references))
        answers = {}
        for worker, reference in references.items():
            try:
                answers[worker] = opened(self.ray.get(reference), copy, self._told)
            except self.ray.exceptions.RayError as error:
                self._lose(worker, error)
        return answers

    def kept(self, worker: Handle, reference: Any) -> Any:
        """Return a reference to what is in the memory of this process's own node, or else will be lost with a worker's.

        Args:
            worker: who has answered with it.
            reference: to the answer.

        Returns:
            The reference; None where the worker has been lost, and the answer with it.
        """
        if worker.node == self.ray.get_runtime_context().get_node_id():
            return reference
        content = self.fetched(worker, reference)
        return None if content is None else self.ray.put(content)

    def fetched(self, worker: Handle, reference: Any) -> Any:
        """Return what a worker has answered with; None where the worker has been lost, and the answer with it."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            self._lose(worker, error)
            return None

    def _lose(self, worker: Handle, error: Exception) -> None:
        self.at_work.remove(worker)
        self.ray.kill(worker.actor)  # it may be only its answer that is lost, and it would keep its cores
        self._lost(worker, error)
