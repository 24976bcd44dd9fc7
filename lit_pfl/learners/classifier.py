"""The learner that a client gets when it is given none: an image classifier."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from lit_pfl.data.batches import described, labels_in
from lit_pfl.errors import ConfigError
from lit_pfl.lightning_internals import QuickModule, own_copy
from lit_pfl.models import Backbone, ResNet9
from lit_pfl.nn import ComposedConv2d
from lit_pfl.randomness import seed_torch
from lit_pfl_callbacks.batches import INPUTS, LABELS, entry

BackboneCallable = Callable[[int, int], Backbone]
OptimizerCallable = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SchedulerCallable = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Batch = tuple[Tensor, Tensor] | Mapping[str, Any]


def images_in(batch: Any) -> Tensor | None:
    """Return a batch's (B, C, H, W) images: the first part of a tuple, the usual name of a dict; or None."""
    images = entry(batch, INPUTS, 0)
    return images if isinstance(images, Tensor) and images.dim() == 4 else None


class ImageClassifier(QuickModule):
    """Classifies images by cross entropy, and is scored by ``acc`` and ``loss``.

    Args:
        backbone: the network, body and head.
        optimizer: makes the optimizer from the parameters.
        scheduler: makes a learning rate scheduler, stepped after every local epoch.
        channels_last: whether images and weights are laid out channels last. By default where it pays, see
            :meth:`lay_out`.
    """

    def __init__(
        self,
        backbone: Backbone,
        optimizer: OptimizerCallable,
        scheduler: SchedulerCallable | None = None,
        channels_last: bool | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.channels_last = channels_last

    @classmethod
    def for_data(cls, make_backbone: BackboneCallable, example: Any, num_classes: int | None, **kwargs: Any) -> Any:
        """Return a classifier with fresh weights for batches like an example.

        Args:
            make_backbone: makes the network from the number of image channels and of classes.
            example: a batch, (B, C, H, W) images and (B,) labels: a tuple, or a dict such as of Hugging Face.
            num_classes: number of classes.
            kwargs: the other arguments.

        Raises:
            ConfigError: when batches are not of images with classes.
        """
        if isinstance(make_backbone, nn.Module):
            raise ConfigError(
                "model.backbone: give what makes a network from the numbers of channels and of classes, such as the "
                f"class {type(make_backbone).__name__}, not a network."
            )
        images = images_in(example)
        as_dict = isinstance(example, Mapping)
        if images is None or not (any(name in example for name in LABELS) if as_dict else len(example) == 2):
            raise ConfigError(
                "model.learner: without one, clients classify images, in batches of (B, C, H, W) tensors and class "
                f"labels, or dicts with images under {', '.join(INPUTS)} and labels under {', '.join(LABELS)}; this "
                f"data has batches of {described(example)}; name the labels so, or give a LightningModule of your own, "
                "--model.learner my_project.MyModule."
            )
        if num_classes is None:
            raise ConfigError(
                "model.learner: without one, clients classify images, and this data does not say into which classes; "
                "give FromDataset labels, PerClient num_classes, or model.learner, a LightningModule of your own."
            )
        try:
            backbone = make_backbone(images.shape[1], num_classes)
            backbone.eval()
            # Anew, so that what is drawn from here on is the same for clients with other numbers of classes.
            seed_torch(torch.initial_seed() + 1)
            with torch.no_grad():  # gives lazy layers their shapes
                backbone(_like_weights(torch.zeros_like(images[:1]), backbone))
        except ConfigError:
            raise
        except (RuntimeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                f"model.backbone: this network has no output for an image of shape {tuple(images.shape[1:])} and "
                f"{num_classes} classes: {error}"
            ) from error
        backbone.train()
        return cls(backbone, **kwargs)

    @property
    def body(self) -> nn.Module:
        """The part of the network that embeds images."""
        return self.backbone.body

    @property
    def head(self) -> nn.Module:
        """The part of the network that classifies embeddings."""
        return self.backbone.head

    def lay_out(self) -> None:
        """Take the memory layout that suits the device.

        Channels last where it pays: on CPU, for networks with a convolution of 64 or more channels (1.4 to 2.5 times
        faster here; narrow ones lose).
        """
        if self.channels_last is None:
            dense = [m.out_channels for m in self.modules() if isinstance(m, nn.Conv2d)]
            made = [m.weight_shape[0] for m in self.modules() if isinstance(m, ComposedConv2d)]
            self.channels_last = self.device.type == "cpu" and max([0, *dense, *made]) >= 64
        if self.channels_last:
            self.backbone.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, C, H, W) images to (B, classes) logits."""
        images = _like_weights(images, self.backbone)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return self.backbone(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the cross entropy of a batch."""
        images, labels = _images_and_labels(batch)
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``acc`` and ``loss`` of a batch."""
        images, labels = _images_and_labels(batch)
        logits = self(images)
        right = (logits.argmax(1) == labels).sum()
        # in double precision, so that the mean over batches is the share of all images to the last digit
        self.log("acc", right.double() / len(labels), batch_size=len(labels))
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        self.log("loss", loss.double() / len(labels), batch_size=len(labels))

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return (B, classes) logits."""
        return self(images_in(batch))

    def configure_optimizers(self) -> Any:
        """Make the optimizer and the scheduler."""
        optimizer = self.make_optimizer(self.backbone.parameters())
        if self.make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}


def _images_and_labels(batch: Batch) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Mapping):
        return cast(Tensor, images_in(batch)), labels_in(batch)
    images, labels = batch
    return images, labels if labels.is_floating_point() else labels.long()  # or probabilities, as CutMix makes them


def _like_weights(images: Tensor, network: nn.Module) -> Tensor:
    """Return images of 64-bit numbers, NumPy's default, as the type of a network's weights; others as they are."""
    if images.dtype != torch.float64:
        return images
    return images.to(next((weight.dtype for weight in network.parameters()), images.dtype))


def network_of(learner: L.LightningModule) -> nn.Module:
    """Return a copy of what computes a learner's ``forward``, in evaluation mode and without a Trainer.

    Of an image classifier that is its backbone, of any other learner all of it.
    """
    if isinstance(learner, ImageClassifier):
        return copy.deepcopy(learner.backbone).eval()
    network = own_copy(learner)
    network.trainer = None
    return network.eval()


class Mixture(nn.Module):
    """Two networks on the same input; what comes out is ``alpha * own + (1 - alpha) * common``.

    Args:
        own: a network.
        common: another one.
        alpha: a scalar, the weight of the first.
    """

    alpha: Tensor

    def __init__(self, own: nn.Module, common: nn.Module, alpha: Tensor) -> None:
        super().__init__()
        self.own, self.common = own, common
        self.register_buffer("alpha", alpha.detach().clone())
        self.eval()

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the mixture."""
        return torch.lerp(self.common(*inputs), self.own(*inputs), self.alpha)


def quick_backbone(channels: int, classes: int) -> ResNet9:
    """Return a ResNet-9 with which a first try is quick: an eighth of the papers' width."""
    # Not the default of an argument: on the command line, another class in its place would get its width.
    return ResNet9(channels, classes, width=8)
