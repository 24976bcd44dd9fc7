"""Attacks on a federation, to test defenses against: callbacks of a federation's Trainer.

Some clients are attackers. They train as all others do, and what they upload is changed before the server looks at it;
or they train on wrong labels. Checks of uploads and counts of bytes see what the attackers send.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor

from lit_pfl.core.classifying import Classifying
from lit_pfl.core.client import Client
from lit_pfl.core.payload import Payload, Upload
from lit_pfl.core.updates import update_of, updated
from lit_pfl.errors import ConfigError, check_options_of
from lit_pfl.federation.federation import Federation
from lit_pfl.ops.robust import alie_deviation
from lit_pfl.randomness import Draws, check_share
from lit_pfl_callbacks.batches import LABELS

Updates = Mapping[int, Mapping[str, Tensor]]


class Attack(L.Callback, ABC):
    """Lets some clients attack, see the subclasses.

    Args:
        clients: ids of the attackers. Default: as many as ``share`` says, drawn from the seed.
        share: share of the clients that attack or, above 1, their number.
        seed: seed by which attackers are drawn; the federation's seed does not count, so that attackers are the same
            in runs with several seeds.

    Attributes:
        attackers: ids of the attackers, once a fit has begun.

    Raises:
        ConfigError: when there are no such clients, or the module is not a federation.
    """

    def __init__(
        self, clients: Sequence[int] | None = None, share: PositiveFloat = 0.3, seed: NonNegativeInt = 0
    ) -> None:
        check_share("share", share)
        self.clients, self.share, self.seed = clients, share, int(seed)
        self.attackers: list[int] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Choose the attackers, and begin."""
        name = type(self).__name__
        if not isinstance(pl_module, Federation):
            raise ConfigError(f"trainer.callbacks: {name} attacks a Federation, not a {type(pl_module).__name__}.")
        check_options_of(self, f"trainer.callbacks: {name}")
        ids = pl_module.data.clients
        check_share(f"trainer.callbacks: {name}.share", self.share, None if self.clients else len(ids))
        if self.clients is not None and (unknown := set(self.clients) - set(ids)):
            raise ConfigError(f"trainer.callbacks: {name}(clients={list(self.clients)}): no client {min(unknown)}.")
        chosen = Draws(self.seed).choose(ids, self.share, "attackers") if self.clients is None else self.clients
        self.attackers = sorted(chosen)
        self.begin(pl_module)

    @abstractmethod
    def begin(self, federation: Federation) -> None:
        """Make the attackers attack from now on."""

    @abstractmethod
    def end(self, federation: Federation) -> None:
        """Make them stop."""

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the attack."""
        assert isinstance(pl_module, Federation)
        self.end(pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """End the attack."""
        if self.attackers and isinstance(pl_module, Federation):
            self.end(pl_module)


class LabelFlip(Attack):
    """Attackers train on wrong labels: of C classes, c becomes ``C - 1 - c``.

    For learners whose batches are ``(inputs, labels)``, and methods that read labels in training steps only. What a
    method makes of the training data besides, such as the losses by which a client of IFCA chooses, is honest.

    Args:
        clients: see :class:`Attack`.
        share: see :class:`Attack`.
        seed: see :class:`Attack`.

    Source:
        Fang et al. 2020, Section 5.1; Tolpegin et al. 2020.
    """

    def begin(self, federation: Federation) -> None:
        stacked = federation.engine.stacked(len(federation.client_ids)) > 1
        if stacked or not federation.clients.keys() >= set(federation.client_ids):  # some live elsewhere, or sleep
            raise ConfigError(
                "trainer.callbacks: LabelFlip changes single clients; give federation.engine=Local, with all clients "
                "in memory."
            )
        for client in self.attackers:
            module = federation.clients[client]
            if isinstance(module, Classifying) and module.needs_labels and not module.labels_in_steps_only:
                raise ConfigError(
                    f"trainer.callbacks: LabelFlip flips labels in training steps only, but {type(module).__name__} "
                    "reads labels elsewhere too; take another attack or method."
                )
            module.__dict__["training_step"] = _with_flipped_labels(module, client)

    def end(self, federation: Federation) -> None:
        for client in self.attackers:
            if client in federation.clients:
                federation.clients[client].__dict__.pop("training_step", None)


def _with_flipped_labels(module: Client, client: int) -> Any:
    num_classes = None if module.data is None else module.data.num_classes

    def training_step(batch: Any, batch_idx: int) -> Any:
        place: Any = 1 if isinstance(batch, tuple | list) and len(batch) == 2 else None
        if isinstance(batch, Mapping):
            place = next((name for name in LABELS if name in batch), None)
        labels = None if place is None else batch[place]
        if num_classes is None or not isinstance(labels, Tensor) or labels.is_floating_point():
            raise ConfigError(
                f"trainer.callbacks: LabelFlip: batches of client {client} are neither (inputs, labels) nor dicts "
                f"with class labels under {', '.join(LABELS)}."
            )
        flipped = num_classes - 1 - labels
        batch = {**batch, place: flipped} if isinstance(batch, Mapping) else (batch[0], flipped)
        return type(module).training_step(module, batch, batch_idx)

    return training_step


class Forgery(Attack):
    """Attackers change what they upload: an update u becomes another one. Whole numbers stay as they are.

    An update is what an upload differs from what its client trained from, over all floating-point tensors.
    """

    def begin(self, federation: Federation) -> None:
        self._coordinator = federation.coordinator
        if self._forge not in federation.coordinator.changes:
            federation.coordinator.changes.append(self._forge)

    def end(self, federation: Federation) -> None:
        if self._forge in federation.coordinator.changes:
            federation.coordinator.changes.remove(self._forge)

    def _forge(self, round: int, uploads: Mapping[int, Upload]) -> dict[int, Upload]:
        sent = {client: upload for client, upload in uploads.items() if isinstance(upload, Payload)}
        attackers = [client for client in self.attackers if client in sent]
        if not attackers:
            return dict(uploads)
        centers = {client: self._coordinator.center(client, upload) for client, upload in sent.items()}
        updates = {client: update_of(upload, centers[client]) for client, upload in sent.items()}
        forged: dict[int, Upload] = dict(uploads)
        for client, update in self.forge(attackers, updates).items():
            forged[client] = updated(sent[client], centers[client], update)
        return forged

    @abstractmethod
    def forge(self, attackers: Sequence[int], updates: Updates) -> Updates:
        """Return the updates that the attackers send.

        Args:
            attackers: ids of those that take part in this round.
            updates: the updates of all participants as they trained them, by id: tensors of double precision.
        """


class SignFlip(Forgery):
    """Attackers go the other way: u becomes ``-scale u``.

    Args:
        scale: how far they go.
        kwargs: see :class:`Attack`.

    Source:
        Li et al. 2019 (RSA), Section 5.
    """

    sign = -1

    def __init__(self, scale: PositiveFloat = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = scale

    def forge(self, attackers: Sequence[int], updates: Updates) -> Updates:
        factor = self.sign * self.scale
        return {client: {name: factor * t for name, t in updates[client].items()} for client in attackers}


class ScaledUpdate(SignFlip):
    """Attackers go too far: u becomes ``scale u``, which replaces the model if scale is the number of clients.

    Args:
        scale: how far they go.
        kwargs: see :class:`Attack`.

    Source:
        Bagdasaryan et al. 2020, Eq. 3.
    """

    sign = 1

    def __init__(self, scale: PositiveFloat = 10.0, **kwargs: Any) -> None:
        super().__init__(scale, **kwargs)


class ALIE(Forgery):
    """A little is enough: attackers send the mean update less some standard deviations, in every coordinate.

    They hide within the spread of honest updates. Without ``deviations`` they choose as many as leave enough honest
    clients farther away from the mean than they are; with 3 of 10 clients that is 0.18.

    Args:
        deviations: number of standard deviations, the paper's z. Default: its ``z_max``.
        knows: whose updates the mean and the deviations are of: the attackers' ``own``, as in the paper, or ``all``
            honest clients'.
        kwargs: see :class:`Attack`.

    Source:
        Baruch et al. 2019, Algorithm 3.
    """

    def __init__(
        self,
        deviations: NonNegativeFloat | None = None,
        knows: Literal["own", "all"] = "own",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.deviations, self.knows = deviations, knows

    def forge(self, attackers: Sequence[int], updates: Updates) -> Updates:
        known = [u for client, u in updates.items() if (client in attackers) == (self.knows == "own")]
        z = self.deviations
        z = alie_deviation(len(updates), len(attackers)) if z is None else z
        sent = {}
        for name in known[0] if known else ():
            values = torch.stack([update[name] for update in known if name in update])
            sent[name] = values.mean(0) - z * values.std(0, correction=0)
        return {client: {name: t for name, t in sent.items() if name in updates[client]} for client in attackers}


class InnerProduct(Forgery):
    """Attackers send the mean of the honest updates times a negative number, so that the mean points the other way.

    Args:
        epsilon: the number. A small one is hard to see: the paper has 0.1 against Krum, and larger ones against means.
        kwargs: see :class:`Attack`.

    Source:
        Xie et al. 2020 (Fall of Empires), Section 4.
    """

    def __init__(self, epsilon: PositiveFloat = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def forge(self, attackers: Sequence[int], updates: Updates) -> Updates:
        honest = [update for client, update in updates.items() if client not in attackers]
        sent = {
            name: -self.epsilon * torch.stack([update[name] for update in honest if name in update]).mean(0)
            for name in (honest[0] if honest else ())
        }
        return {client: {name: t for name, t in sent.items() if name in updates[client]} for client in attackers}
