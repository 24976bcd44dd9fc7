"""What methods have in common that look at features, logits and class labels of a learner that classifies."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lit_pfl.core.client import Client
from lit_pfl.core.payload import Payload
from lit_pfl.core.sharing import needs_head
from lit_pfl.data.batches import labels_in
from lit_pfl.data.loaders import in_order, needed
from lit_pfl.errors import ConfigError
from lit_pfl.learners import (
    HeadCall,
    SkipBatch,
    Step,
    at_head,
    call_with,
    find_head,
    sizes_of_head,
    takes_features,
    training_loss,
    unseen,
    without_trace,
)
from lit_pfl.learners.scoring import transferred
from lit_pfl.learners.trying import try_step
from lit_pfl_callbacks.random_state import torch_state_kept
from lit_pfl_callbacks.tensors import evaluating, tensors_of

#: what means over the samples of a class may be of
MeansOf = Literal["features", "logits", "probabilities"]


class Classifying(Client):
    """A client whose learner has a head module, from features to logits, and whose data may have class labels.

    The loss stays the one of the learner's own ``training_step``, so any LightningModule serves that calls its head
    once a step. A learner without such a head is refused before any training, as are data without class labels where
    ``needs_labels``.
    """

    #: what the method does with class labels; empty: it needs none
    needs_labels: ClassVar[str] = "reads class labels"
    #: whether labels are read in training steps only
    labels_in_steps_only: ClassVar[bool] = False
    #: what the method trains heads on, other than features of samples: batch norm is unfit for it; empty: nothing
    trains_head_on: ClassVar[str] = ""
    #: whether the method gives heads (B, d) features itself, beside the learner's own steps
    calls_heads: ClassVar[bool] = False

    def configure_learner(self) -> None:
        super().configure_learner()
        name = type(self).__name__
        needs_head(self.learner, self.head_names, name)
        head = self.head_module  # which refuses one that is no module
        if self.trains_head_on and any(isinstance(part, _BatchNorm) for part in head.modules()):
            raise ConfigError(
                f"model.head: {name} trains heads on {self.trains_head_on}, for which batch norm is unfit."
            )

    @cached_property
    def head_module(self) -> nn.Module:
        """The learner's head."""
        return find_head(self.learner, self.head_names, self.head is not None, type(self).__name__)

    @property
    def num_features(self) -> int:
        """How many features d go into the head."""
        return sizes_of_head(self.head_module, type(self).__name__)[0]

    @property
    def num_logits(self) -> int:
        """How many logits C come out of the head."""
        return sizes_of_head(self.head_module, type(self).__name__)[1]

    @property
    def head_dtype(self) -> torch.dtype:
        """What the head computes in."""
        return next(x.dtype for x in self.head_module.parameters() if x.is_floating_point())

    @property
    def head_leaves(self) -> dict[str, str]:
        """Names of the head's tensors in the head module itself, by their names in the learner."""
        leaves = {id(x): leaf for leaf, x in self.head_module.state_dict(keep_vars=True).items()}
        named = self.learner.state_dict(keep_vars=True).items()
        return {name: leaves[id(x)] for name, x in named if id(x) in leaves}

    def shared_head_leaves(self, why: str) -> dict[str, str]:
        """Return :attr:`head_leaves` of a head that is shared as a whole, except for what is frozen.

        Args:
            why: what the method does with the head.

        Raises:
            ConfigError: when a tensor of it is not shared.
        """
        leaves = self.head_leaves
        if missing := leaves.keys() - self.shared_parameters().keys() - self.frozen.keys():
            raise ConfigError(f"model.share_head: {type(self).__name__} {why}, and {min(missing)!r} is not shared.")
        return leaves

    def at_head(
        self,
        features: Callable[[Tensor], Tensor] | None = None,
        logits: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> AbstractContextManager[HeadCall]:
        """See what the head maps to what, and replace either; see :func:`~lit_pfl.learners.at_head`."""
        return at_head(self.head_module, features, logits)

    def targets(self, batch: Any) -> Tensor:
        """Return the (B,) int64 class labels of a batch; by default what :func:`labels_in` finds."""
        return labels_in(batch)

    @cached_property
    def class_counts(self) -> Tensor:
        """(C,) int64 how many training samples of every class this client has."""
        # Not kept in checkpoints: the data are the same in a resumed run.
        labels = torch.cat([self.targets(batch).cpu() for batch in in_order(self.training_data())])
        if labels.numel() and labels.min() < 0:
            raise ConfigError(
                f"a training sample has the class label {labels.min()}; classes are numbered from 0, so leave samples "
                "without a class out of the data."
            )
        counts = torch.bincount(labels, minlength=self.num_logits)
        if len(counts) > self.num_logits:
            raise ConfigError(
                f"model.head: the training data has a class label {len(counts) - 1}, and the head only "
                f"{self.num_logits} logits; {type(self).__name__} needs one for every class."
            )
        return counts

    @torch.no_grad()
    def embedded(self, batches: Any = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield (B, d) features, (B, C) logits and (B,) labels of every batch, in evaluation mode.

        The learner is left as it was, and no random number is drawn. Without ``needs_labels``, labels are empty.

        Args:
            batches: by default all training data, in order and without augmentation.
        """
        with without_trace(self.learner):
            for index, batch in enumerate(in_order(self.training_data()) if batches is None else batches):
                batch = transferred(self.learner, batch)
                with suppress(SkipBatch), self.at_head() as seen:
                    training_loss(self.learner, batch, index)
                    yield seen.features, seen.logits, self.targets(batch) if self.needs_labels else torch.empty(0)

    def all_embedded(self) -> tuple[Tensor, Tensor]:
        """Return (n, d) features and (n,) labels of all training data; see :meth:`embedded`.

        Raises:
            ConfigError: when the learner skips all of them.
        """
        batches = list(self.embedded())
        if not batches:
            raise ConfigError(
                f"Client {self.spec.client_id}: {type(self).__name__} takes features of its training samples, and "
                f"training_step of {type(self.learner).__name__} skips every batch."
            )
        features, _, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return features, labels

    def network_tensors(self) -> dict[str, Tensor]:
        """Return the learner's tensors that may change, by name: its own memory."""
        return {name: tensor for name, tensor in tensors_of(self.learner).items() if name not in self.frozen}

    @torch.no_grad()
    def call_frozen(
        self, network: Mapping[str, Tensor], batch: Any, batch_idx: int, in_evaluation: bool = True
    ) -> HeadCall:
        """Return what another network of this kind makes of a batch, without gradients.

        It draws the random numbers that the learner will draw next, and what it logs is not shown.

        Args:
            network: its tensors, by the learner's names; they stay as they are.
            batch: the batch.
            batch_idx: the batch's index.
            in_evaluation: whether in evaluation mode; otherwise in the learner's own.
        """
        if not in_evaluation:  # batch norm would step its running statistics
            network = {**network, **{n: network[n].clone() for n, _ in self.learner.named_buffers() if n in network}}
        mode = evaluating(self.learner) if in_evaluation else nullcontext()
        draws = torch_state_kept()
        with draws, mode, unseen(self.learner), self.at_head() as seen:
            call_with({f"learner.{name}": x for name, x in network.items()}, Step(self.learner), batch, batch_idx)
        return seen

    def class_means(self, of: MeansOf = "features") -> tuple[Tensor, Tensor]:
        """Return (C, d) mean features, or (C, C) logits or probabilities, of every class over the training data, and
        class counts.

        Classes without samples have a mean of zeros. The counts are (C,) int64.
        """
        means, _, counts = self.class_moments(of)
        return means.float(), counts

    def class_moments(self, of: MeansOf = "features") -> tuple[Tensor, Tensor, Tensor]:
        """Return (C, d) means, (C,) mean squared norms, both in double precision, and (C,) counts; see above."""
        counts = torch.zeros(self.num_logits, dtype=torch.int64, device=self.device)
        width = self.num_features if of == "features" else self.num_logits
        sums = torch.zeros(self.num_logits, width + 1, dtype=torch.float64, device=self.device)
        for features, logits, labels in self.embedded():
            values = (features if of == "features" else logits).double()
            values = values.softmax(1) if of == "probabilities" else values
            sums.index_add_(0, labels, torch.cat([values, values.square().sum(1, keepdim=True)], 1))
            counts += torch.bincount(labels, minlength=len(counts))
        means = sums / counts.clamp_min(1)[:, None]
        return means[:, :-1], means[:, -1], counts

    def initial(self) -> Payload:
        """Return what is sent on joining, if the learner and its data have what the method needs."""
        self.configure_model()
        if self.data is not None and self.spec.example is not None:
            with self.at_head() as seen:
                try_step(self.learner, self.data.to_try())
            features = seen.features  # refuses a step that does not call the head once
            if self.calls_heads or self.trains_head_on:
                takes_features(self.head_module, features, type(self).__name__)
            if self.needs_labels:
                with needed(f"Client {self.spec.client_id}", f"{type(self).__name__} {self.needs_labels}"):
                    self.class_counts  # noqa: B018
        return super().initial()
