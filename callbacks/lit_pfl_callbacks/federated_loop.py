"""The callback that joins a Lightning training run to a federation."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeGuard, runtime_checkable

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.data import SubsetRandomSampler

from lit_pfl_callbacks.frozen import FROZEN, frozen_weights, table_of
from lit_pfl_callbacks.processes import check_alike, check_strategy
from lit_pfl_callbacks.protocols import Direction, Watcher, transfer
from lit_pfl_callbacks.rank_zero import be_rank_zero
from lit_pfl_callbacks.resumed_draws import ResumedDraws
from lit_pfl_callbacks.tensors import check_patterns, copied, load_tensors, tensors_of

# Running statistics of normalization layers describe one client's data, so they stay with the client.
NOT_RUNNING_STATISTICS = r"^(?!.*(running_mean|running_var|num_batches_tracked)$)"

Reply = Mapping[str, Tensor] | None


@dataclass(frozen=True)
class JoinInfo:
    """What a client reports to the server once, before its first round.

    Args:
        num_samples: number of training samples; the client's weight in an average.
        tensors: the tensors that the client shares, by name, as they are before training.
        method: name of the method, for a module that decides itself what is sent; empty for any other.
        local_epochs: number of its epochs in a round.
        completed: number of rounds that its Trainer has completed before, if it was resumed from a checkpoint.
        processes: number of processes of its Trainer, which train one model (``strategy="ddp"``).
    """

    num_samples: int
    tensors: Mapping[str, Tensor]
    method: str = ""
    local_epochs: int = 1
    completed: int = 0
    processes: int = 1


class Link(Protocol):
    """How a client's uploads are sent to the server and the replies back.

    The callback is the same in a simulation, in a cluster and between hospitals; only the link differs. Of a client
    whose Trainer has several processes, that of global rank 0 alone uses its link, unless the link has an attribute
    ``in_every_process`` that is true: then each uses it on its own, as each has the whole federation or is a client. If
    it has a method ``no_batches``, that is called when a fit ends without a batch to train on. If it has a method
    ``take_server``, that is called before a fit with a module that has ``configure_server``. If it has an attribute
    ``shares_process`` that is true, fits of several clients alternate in one process.
    """

    def join(self, info: JoinInfo) -> Mapping[str, Tensor] | None:
        """Report for the federation; wait; return what to load before training starts (or continues).

        ``None`` ends the client's fit: its turn has never come.
        """

    def exchange(self, upload: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Hand over the upload of one round; wait; return the reply, or ``None`` to end the client's fit."""


@runtime_checkable
class Shares(Protocol):
    """A LightningModule that says itself what is sent, and learns where rounds begin and end.

    Any other one shares its ``state_dict()``.
    """

    def initial(self) -> Mapping[str, Tensor]:
        """Return the tensors to send once, on joining, by name."""

    def start_epoch(self, epoch: int, local_epochs: int) -> None:
        """Prepare for a local epoch, counted from 0 in every round of ``local_epochs``; the reply is loaded."""

    def end_epoch(self, epoch: int, local_epochs: int) -> None:
        """Finish a local epoch; after the last of a round :meth:`upload` comes next."""

    def upload(self) -> Mapping[str, Tensor]:
        """Return the tensors to send, by name."""

    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Load a reply of the server."""


class FederatedLoop(L.Callback):
    """Make any ``Trainer`` and ``LightningModule`` one client of a federation.

    Every ``every_n_epochs`` epochs the callback hands over what the module shares, waits for the server, and loads the
    reply. The module need not know: by default its ``state_dict()`` is shared, less the running statistics of
    normalization layers, and less what never trains (``requires_grad=False``). A module with the methods of
    :class:`Shares`, such as a ``lit_pfl`` method around a learner, decides for itself.

    A Trainer of several processes (``strategy="ddp"``) is one client: its processes load what the first one is sent.

    A checkpoint that is saved at the end of a round contains the process's random state. A fit of one process that
    resumes from it draws the same random numbers as without the interruption, unless its loader has persistent workers;
    also from a generator of the loader's own, as ``DataLoader(generator=...)``.

    Args:
        link: how the upload is sent, for example :class:`lit_pfl.links.LocalLink`.
        every_n_epochs: number of local epochs between two exchanges, at least 1.
        share: which entries of ``state_dict()`` are shared: a regular expression searched in the name, or a
            function from name to bool. Modules that decide for themselves do not use it.
        num_samples: this client's number of training samples; by default the length of the train loader's data set,
            or of its SubsetRandomSampler.

    Attributes:
        watchers: functions that are called with every :class:`~lit_pfl_callbacks.protocols.Transfer`: of a round's
            reply, which comes before its training, and of its upload.
        seconds: ``link``: the time that this process has waited for the server so far.

    Raises:
        MisconfigurationException: when ``every_n_epochs`` is below 1, when ``share`` is not a regular expression, or
            picks nothing or what a lazy layer has not made yet, when the number of samples cannot be found out, or when
            a reply does not fit the module.

    Example::

        trainer = L.Trainer(max_epochs=50, callbacks=[FederatedLoop(link, every_n_epochs=5)])
        trainer.fit(my_own_module, my_own_loader)
    """

    def __init__(
        self,
        link: Link,
        every_n_epochs: int = 1,
        share: str | Callable[[str], bool] = NOT_RUNNING_STATISTICS,
        num_samples: int | None = None,
    ) -> None:
        if every_n_epochs < 1:
            raise MisconfigurationException(f"FederatedLoop(every_n_epochs={every_n_epochs}): must be 1 or more.")
        self.link = link
        self.every_n_epochs = every_n_epochs
        if isinstance(share, str):
            check_patterns("FederatedLoop(share=...)", share)
        self.share = re.compile(share).search if isinstance(share, str) else share
        self.num_samples = num_samples
        self.watchers: list[Watcher] = []
        self._frozen: set[str] = set()  # names of what never trains, and so is not sent
        self.seconds = {"link": 0.0}
        self._trained: dict[str, Any] = {}  # what was trained before the last reply was loaded
        self._draws = ResumedDraws()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let a client of one process write and warn, whatever its rank; let the link have the server.

        Where fits of several clients alternate in one process, they show no live progress bar.
        """
        self._draws.forget()  # those of a checkpoint that was loaded before, to be tested
        if trainer.world_size == 1:
            be_rank_zero()
        if stage != "fit":
            return
        if getattr(self.link, "shares_process", False):
            for bar in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(bar, RichProgressBar):  # of which a process can have only one at a time
                    bar.disable()
        take_server = getattr(self.link, "take_server", None)
        if take_server is not None and callable(getattr(pl_module, "configure_server", None)):
            take_server(pl_module)  # now: on another device, a module would draw other numbers

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Join. A run resumed from a checkpoint joins too and learns where the federation stands now.

        Raises:
            MisconfigurationException: when that is a checkpoint of the middle of a round, when the Trainer counts steps
                (``max_steps``), or when it has several processes which do not all hold the same.
        """
        check_strategy(trainer)
        if trainer.fit_loop.restarted_on_epoch_end:
            raise MisconfigurationException(
                f"FederatedLoop: with max_steps={trainer.max_steps}, Lightning ends the checkpoint's epoch once more, "
                "and its round would be exchanged twice; resume with max_epochs instead of max_steps."
            )
        if over := trainer.current_epoch % self.every_n_epochs:
            raise MisconfigurationException(
                f"FederatedLoop(every_n_epochs={self.every_n_epochs}): the checkpoint is of the middle of a round, "
                f"after epoch {trainer.current_epoch}, and the server's reply would undo what was trained in it. "
                f"Resume from one that was saved {over} epoch{'s' * (over > 1)} earlier."
            )
        if trainer.fit_loop.restarted_mid_epoch:  # as with every_n_train_steps, or where it was saved after validation
            raise MisconfigurationException(
                f"FederatedLoop(every_n_epochs={self.every_n_epochs}): the checkpoint was saved before its epoch had "
                "ended, and the server's reply would undo what was trained in it. Resume from one that was saved at an "
                "epoch's end: ModelCheckpoint(save_on_train_epoch_end=True)."
            )
        if trainer.world_size > 1:
            self._draws.forget()  # all processes would draw the same
        info = self._join_info(trainer, pl_module)
        with self._waiting():
            reply = self._answer(trainer, lambda: self.link.join(info))
        self._draws.before_reply(trainer.train_dataloader)
        self._load(trainer, pl_module, reply, trainer.current_epoch // self.every_n_epochs + 1)
        self._draws.after_reply(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell a module that wants to know which of a round's local epochs begins."""
        self._trained = {}
        self._draws.forget()
        if _decides(pl_module):
            pl_module.start_epoch(trainer.current_epoch % self.every_n_epochs, self.every_n_epochs)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Exchange, at the end of every ``every_n_epochs``-th epoch."""
        if _decides(pl_module):
            pl_module.end_epoch(trainer.current_epoch % self.every_n_epochs, self.every_n_epochs)
        if (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        check_alike(trainer, pl_module)
        shared = pl_module.upload() if _decides(pl_module) else self._shared(pl_module)
        round = (trainer.current_epoch + 1) // self.every_n_epochs
        self._tell(round, "up", shared)
        with self._waiting():
            reply = self._answer(trainer, lambda: self.link.exchange(shared))
        with next_epoch(trainer):
            self._load(trainer, pl_module, reply, round + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the random state at the end of a round, and the link's state, if it has one."""
        state: Callable[[], dict[str, Any]] | None = getattr(self.link, "state_dict", None)
        return {**({} if state is None else state()), **self._draws.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the random state, and hand the link its own state."""
        of_link = {**state_dict}
        self._draws.load(of_link.pop("random", {}))
        link: Any = self.link
        if of_link:
            link.load_state_dict(of_link)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save a module that decides for itself as it was trained: who resumes from that loads the reply again.

        What such a module does with a reply may depend on what it holds.
        """
        saved = checkpoint.get("current_model_state", checkpoint["state_dict"])  # the latter may be an average
        saved.update({name: value for name, value in self._trained.items() if name in saved})

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep nothing any more: what is saved from now on is the module as it is."""
        if over := trainer.current_epoch % self.every_n_epochs:
            rank_zero_warn(
                f"FederatedLoop(every_n_epochs={self.every_n_epochs}): the fit ends in the middle of a round; what was "
                f"trained in {over} epoch{'s' * (over > 1)} is not uploaded."
            )
        self._trained = {}
        self._draws.forget()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let the link refuse a fit that had no batch to train on, and so has never joined."""
        refuse = getattr(self.link, "no_batches", None)
        if refuse is not None and trainer.num_training_batches == 0:
            refuse()

    def _join_info(self, trainer: L.Trainer, pl_module: L.LightningModule) -> JoinInfo:
        method = ""
        if _decides(pl_module):
            shared = getattr(pl_module, "joining", pl_module.initial)()
            method = getattr(pl_module, "method_name", type(pl_module).__name__)
        else:
            frozen = {name: weight for name, weight in frozen_weights(pl_module).items() if self.share(name)}
            self._frozen = set(frozen)
            shared = self._shared(pl_module)
            if frozen:
                shared = {**shared, FROZEN: table_of(frozen)}
        samples, completed = self._count_samples(trainer), trainer.current_epoch // self.every_n_epochs
        return JoinInfo(samples, shared, method, self.every_n_epochs, completed, trainer.world_size)

    def _keep(self, pl_module: L.LightningModule, loader: Any) -> None:
        """Keep what a reply may change, until an epoch trains from it."""
        self._draws.keep(loader)
        if not _decides(pl_module):
            return
        fixed = frozen_weights(pl_module)
        state = pl_module.state_dict()
        self._trained = copied({name: value for name, value in state.items() if name not in fixed})

    def _answer(self, trainer: L.Trainer, ask: Callable[[], Reply]) -> Reply:
        """Return what the link says, in all processes of the client."""
        if trainer.world_size == 1 or getattr(self.link, "in_every_process", False):
            return ask()
        return trainer.strategy.broadcast(ask() if trainer.is_global_zero else None)

    def _tell(self, round: int, direction: Direction, tensors: Mapping[str, Tensor]) -> None:
        if self.watchers:
            told = transfer(round, None, direction, tensors)
            for watcher in self.watchers:
                watcher(told)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds["link"] += time.perf_counter() - began

    def _shared(self, pl_module: L.LightningModule) -> Mapping[str, Tensor]:
        # what has been unfrozen meanwhile travels from now on, also if it is frozen again
        self._frozen = {name for name in self._frozen if not pl_module.get_parameter(name).requires_grad}
        found = {name: tensor for name, tensor in tensors_of(pl_module).items() if self.share(name)}
        tensors = {name: tensor for name, tensor in found.items() if name not in self._frozen}
        if found and not tensors:
            raise MisconfigurationException(
                f"FederatedLoop: all weights of {type(pl_module).__name__} that would be sent are frozen "
                "(requires_grad=False); unfreeze some."
            )
        if not tensors:
            raise MisconfigurationException(
                f"FederatedLoop(share=...) picks no tensor of {type(pl_module).__name__}; its state_dict has "
                f"{', '.join(list(pl_module.state_dict())[:5]) or 'no entry'}, ..."
            )
        if lazy := next((name for name, tensor in tensors.items() if is_lazy(tensor)), None):
            raise MisconfigurationException(
                f"FederatedLoop: {lazy!r} of {type(pl_module).__name__} has no shape before its lazy layer has seen a "
                "batch, and cannot be sent; run one batch through the module before trainer.fit."
            )
        return tensors

    def _load(
        self, trainer: L.Trainer, pl_module: L.LightningModule, reply: Mapping[str, Tensor] | None, round: int
    ) -> None:
        if reply is None:
            trainer.should_stop = True
            # A Trainer stops no sooner than these say; the federation has ended all the same.
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
            return
        self._tell(round, "down", reply)
        self._keep(pl_module, trainer.train_dataloader)
        if _decides(pl_module):
            pl_module.download(reply)
        else:
            load_tensors(pl_module, {name: tensor for name, tensor in reply.items() if self.share(name)})
            self._frozen -= reply.keys()  # somebody has unfrozen these elsewhere

    def _count_samples(self, trainer: L.Trainer) -> int:
        if self.num_samples is not None:
            return self.num_samples
        loader: Any = trainer.train_dataloader
        sampler = getattr(loader, "sampler", None)
        sampler = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)  # within Lightning's, in DDP
        samples = sampler if isinstance(sampler, SubsetRandomSampler) else getattr(loader, "dataset", None)
        if samples is not sampler and not hasattr(samples, "__getitem__"):  # another loader: as long as it has batches
            samples = None
        try:
            return len(samples)  # type: ignore[arg-type]
        except TypeError:
            raise MisconfigurationException(
                "FederatedLoop cannot see how many training samples this client has: "
                "give FederatedLoop(num_samples=...)."
            ) from None


@contextmanager
def next_epoch(trainer: L.Trainer) -> Iterator[None]:
    """Let a Trainer at the end of an epoch be in the next one, as it is when a run continues from a checkpoint.

    A reply is of the epoch that it begins, also for a module that looks at ``current_epoch`` while it loads one.
    """
    progress = trainer.fit_loop.epoch_progress.current
    progress.completed += 1
    try:
        yield
    finally:
        progress.completed -= 1


def _decides(module: L.LightningModule) -> TypeGuard[Any]:
    return _has_shares(type(module))  # type: ignore[arg-type]  # classes have hashes


@cache  # looking a protocol up takes as long as some layers
def _has_shares(kind: type) -> bool:
    return issubclass(kind, Shares)
