"""LightningModules of other libraries as these make them, each with the loaders that it is used with."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # no library looks for news of itself

import lightning as L
import numpy as np
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lit_pfl import Client
from lit_pfl.data import PerClient

CLIENTS, TRAIN, HELD_OUT, BATCH, SIZE = 2, 8, 4, 4, 32


@dataclass(frozen=True)
class Module:
    """A module that nobody here wrote.

    Attributes:
        library: which library it is of, as it is imported.
        make: makes it.
        data: makes one client's data module from the client's id.
        parts: the options of a Client that say where its head and its encoder are.
        scores: metrics that it logs itself in validation.
        weights_only: whether its checkpoints hold nothing but tensors and plain values. Otherwise a Trainer has to be
            told ``weights_only=False`` to go on from one, as without a federation.
    """

    library: str
    make: Callable[[], L.LightningModule]
    data: Callable[[int], L.LightningDataModule]
    parts: dict[str, str] = field(default_factory=dict)
    scores: frozenset[str] = frozenset({"loss"})
    weights_only: bool = True

    def method(self, kind: type[Client], **options: Any) -> Client:
        """Return a method around the module, always with the same first weights."""
        torch.manual_seed(0)
        return kind(learner=self.make(), **{**self.parts, **options})

    def per_client(self) -> PerClient:
        """Return every client's own data module."""
        return PerClient([self.data(client) for client in range(CLIENTS)])


class Loaders(L.LightningDataModule):
    """A data module as most projects have one."""

    def __init__(self, make: Callable[[str, int], Dataset], client: int) -> None:
        super().__init__()
        self.make, self.client = make, client

    def _loader(self, split: str) -> DataLoader:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(10 * self.client + len(split))
            samples = self.make(split, self.client)
        return DataLoader(samples, BATCH, shuffle=split == "train")

    def train_dataloader(self) -> DataLoader:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        return self._loader("test")


def loaders(make: Callable[[str, int], Dataset]) -> Callable[[int], L.LightningDataModule]:
    """Return what makes a client's data module from what makes the samples of a split."""
    return lambda client: Loaders(make, client)


def size_of(split: str) -> int:
    return TRAIN if split == "train" else HELD_OUT


# ------------------------------------------------------------------------------------------------------------ torchgeo


def torchgeo_data(**targets: Callable[[int], Tensor]) -> Callable[[int], L.LightningDataModule]:
    """Return what makes a data module of torchgeo, with its augmentation on the device, around images in memory."""
    from torchgeo.datamodules import NonGeoDataModule
    from torchgeo.datasets import NonGeoDataset

    class Images(NonGeoDataset):
        def __init__(self, split: str, client: int) -> None:
            n = size_of(split)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(10 * client + len(split))
                self.columns = {"image": torch.rand(n, 3, SIZE, SIZE) * 255}
                self.columns |= {name: make(n) for name, make in targets.items()}

        def __len__(self) -> int:
            return len(self.columns["image"])

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {name: column[index] for name, column in self.columns.items()}

    class ImagesDataModule(NonGeoDataModule):
        def __init__(self, client: int) -> None:
            super().__init__(Images, batch_size=BATCH, client=client)

    return ImagesDataModule


def classification_task() -> L.LightningModule:
    from torchgeo.trainers import ClassificationTask

    return ClassificationTask(model="test_resnet", num_classes=3)


def segmentation_task() -> L.LightningModule:
    from torchgeo.trainers import SemanticSegmentationTask

    return SemanticSegmentationTask(model="unet", backbone="tu-test_resnet", num_classes=3)


def regression_task() -> L.LightningModule:
    from torchgeo.trainers import RegressionTask

    return RegressionTask(model="test_resnet")


def moco_task() -> L.LightningModule:
    from torchgeo.trainers import MoCoTask

    return MoCoTask(model="test_resnet", hidden_dim=32, output_dim=16, size=SIZE)


def byol_task() -> L.LightningModule:
    from torchgeo.trainers import BYOLTask
    from torchgeo.trainers.byol import SimCLRAugmentation

    task = BYOLTask(model="test_resnet")
    task.model.augment = SimCLRAugmentation((SIZE, SIZE))  # it enlarges images to 224 x 224 by itself
    return task


def of_torchgeo(make: Callable[[], L.LightningModule], **options: Any) -> Module:
    targets = options.pop("targets", {})
    return Module("torchgeo", make, lambda client: torchgeo_data(**targets)(client), **options)


TORCHGEO = {
    "ClassificationTask": of_torchgeo(
        classification_task,
        targets={"label": lambda n: torch.randint(3, (n,))},
        parts={"head": r"^model\.fc\.", "encoder": "model.layer4"},
        scores=frozenset({"loss", "OverallAccuracy", "F1Score"}),
    ),
    "SemanticSegmentationTask": of_torchgeo(
        segmentation_task,
        targets={"mask": lambda n: torch.randint(3, (n, SIZE, SIZE))},
        parts={"head": r"^model\.segmentation_head\.", "encoder": "model.encoder"},
        scores=frozenset({"loss", "MulticlassJaccardIndex"}),
    ),
    "RegressionTask": of_torchgeo(
        regression_task,
        targets={"label": lambda n: torch.rand(n)},
        parts={"head": r"^model\.fc\.", "encoder": "model.layer4"},
        scores=frozenset({"loss", "RMSE"}),
    ),
    "MoCoTask": of_torchgeo(
        moco_task, parts={"head": r"^prediction_head\.", "encoder": "backbone"}, scores=frozenset()
    ),
    "BYOLTask": of_torchgeo(
        byol_task, parts={"head": r"^model\.predictor\.", "encoder": "model.backbone"}, scores=frozenset()
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- pytorch-forecasting


class Series(L.LightningDataModule):
    """Loaders of pytorch-forecasting, made by its own ``to_dataloader``."""

    def __init__(self, client: int, **options: Any) -> None:
        super().__init__()
        self.client, self.options = client, options

    @staticmethod
    def dataset(client: int, **options: Any) -> Any:
        import pandas as pd
        from pytorch_forecasting import TimeSeriesDataSet

        rng, length = np.random.default_rng(client), 15
        time = np.tile(np.arange(length), 2)
        value = np.sin(time / 3 + client) + 0.1 * rng.normal(size=2 * length)
        frame = pd.DataFrame({"value": value, "time": time, "group": np.repeat(["a", "b"], length)})
        given = {"time_varying_unknown_reals": ["value"], **options}
        return TimeSeriesDataSet(
            frame, time_idx="time", target="value", group_ids=["group"], max_encoder_length=8, min_encoder_length=8,
            max_prediction_length=2, **given,
        )  # fmt: skip

    def _loader(self, train: bool) -> DataLoader:
        return self.dataset(self.client, **self.options).to_dataloader(train=train, batch_size=BATCH, num_workers=0)

    def train_dataloader(self) -> DataLoader:
        return self._loader(True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(False)

    test_dataloader = val_dataloader


def nbeats() -> L.LightningModule:
    from pytorch_forecasting import NBeats

    return NBeats.from_dataset(Series.dataset(0), widths=[16, 16])


def temporal_fusion_transformer() -> L.LightningModule:
    from pytorch_forecasting import TemporalFusionTransformer

    return TemporalFusionTransformer.from_dataset(
        Series.dataset(0, **TFT), hidden_size=8, attention_head_size=2, hidden_continuous_size=4
    )


def deep_ar() -> L.LightningModule:
    from pytorch_forecasting import DeepAR

    return DeepAR.from_dataset(Series.dataset(0), hidden_size=8)


TFT = {"time_varying_known_reals": ["time"], "static_categoricals": ["group"]}
FORECASTING = {
    "NBeats": Module(
        "pytorch_forecasting", nbeats, Series,
        {"head": r"theta_", "encoder": "net_blocks.0.fc"}, frozenset({"loss", "MAE", "SMAPE"}),
        weights_only=False,
    ),
    "TemporalFusionTransformer": Module(
        "pytorch_forecasting", temporal_fusion_transformer, lambda client: Series(client, **TFT),
        {"head": r"^output_layer\.", "encoder": "lstm_encoder"}, frozenset({"loss", "MAE", "SMAPE"}),
        weights_only=False,
    ),
    "DeepAR": Module(
        "pytorch_forecasting", deep_ar, Series,
        {"head": r"^distribution_projector\.", "encoder": "rnn"}, frozenset({"loss", "MAE", "SMAPE"}),
        weights_only=False,
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- lightly


def views(split: str, client: int) -> Dataset:
    """Return what lightly's transforms make of images: a list of views, a label and a name."""
    first, second = torch.rand(2, size_of(split), 3, SIZE, SIZE)

    class Views(Dataset):
        def __len__(self) -> int:
            return len(first)

        def __getitem__(self, index: int) -> Any:
            return [first[index], second[index]], 0, f"image{index}.png"

    return Views()


def small_backbone() -> nn.Module:
    """Return a backbone as in lightly's examples, the layers of a ResNet but the last, of a small one."""
    import timm

    return nn.Sequential(*list(timm.create_model("test_resnet").children())[:-1])


def sim_clr() -> L.LightningModule:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    class SimCLR(L.LightningModule):
        """As in lightly's examples."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone = small_backbone()
            self.projection_head = SimCLRProjectionHead(96, 32, 16)
            self.criterion = NTXentLoss()

        def forward(self, x: Tensor) -> Tensor:
            return self.projection_head(self.backbone(x).flatten(start_dim=1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (x0, x1), _, _ = batch
            return self.criterion(self.forward(x0), self.forward(x1))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    return SimCLR()


def byol() -> L.LightningModule:
    import copy

    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.utils.scheduler import cosine_schedule

    class BYOL(L.LightningModule):
        """As in lightly's examples."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone = small_backbone()
            self.projection_head = BYOLProjectionHead(96, 32, 16)
            self.prediction_head = BYOLPredictionHead(16, 32, 16)
            self.backbone_momentum = copy.deepcopy(self.backbone)
            self.projection_head_momentum = copy.deepcopy(self.projection_head)
            deactivate_requires_grad(self.backbone_momentum)
            deactivate_requires_grad(self.projection_head_momentum)
            self.criterion = NegativeCosineSimilarity()

        def forward(self, x: Tensor) -> Tensor:
            return self.prediction_head(self.projection_head(self.backbone(x).flatten(start_dim=1)))

        def forward_momentum(self, x: Tensor) -> Tensor:
            z = self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1))
            return z.detach()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
            update_momentum(self.backbone, self.backbone_momentum, m=momentum)
            update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
            (x0, x1) = batch[0]
            p0, z0 = self.forward(x0), self.forward_momentum(x0)
            p1, z1 = self.forward(x1), self.forward_momentum(x1)
            return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.06)

    return BYOL()


LIGHTLY = {
    "SimCLR": Module(
        "lightly", sim_clr, loaders(views), {"head": r"^projection_head\.", "encoder": "backbone"}
    ),
    "BYOL": Module(
        "lightly", byol, loaders(views), {"head": r"^prediction_head\.", "encoder": "backbone"}
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------- transformers with peft


class Sentences(Dataset):
    """Sentences as a tokenizer of transformers gives them, with a label."""

    def __init__(self, split: str, client: int) -> None:
        n = size_of(split)
        self.ids, self.labels = torch.randint(5, 40, (n, 10)), torch.randint(2, (n,))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": self.labels[index]}


def lora_classifier() -> L.LightningModule:
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    class LoraClassifier(L.LightningModule):
        """A classifier of transformers with adapters of peft, in a LightningModule as tutorials have it."""

        def __init__(self) -> None:
            super().__init__()
            size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
            config = BertConfig(vocab_size=40, max_position_embeddings=16, **size)
            lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
            self.model = get_peft_model(BertForSequenceClassification(config), lora)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = self.model(**batch).loss
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            outputs = self.model(**batch)
            self.log("val_loss", outputs.loss, prog_bar=True)
            accuracy = (outputs.logits.argmax(-1) == batch["labels"]).float().mean()
            self.log("val_accuracy", accuracy)

        def configure_optimizers(self) -> Any:
            from transformers import get_linear_schedule_with_warmup

            optimizer = torch.optim.AdamW(self.parameters(), lr=5e-4)
            steps = self.trainer.estimated_stepping_batches
            schedule = get_linear_schedule_with_warmup(optimizer, 0, int(steps))
            return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 1}]

    return LoraClassifier()


TRANSFORMERS = {
    "BertForSequenceClassification with LoRA": Module(
        "peft", lora_classifier, loaders(Sentences),
        {"head": r"\.classifier\.", "encoder": "model.base_model.model.bert"}, frozenset({"loss", "accuracy"}),
    )
}  # fmt: skip


# --------------------------------------------------------------------------------------------------- PyTorch Geometric


class Graphs(L.LightningDataModule):
    """Random graphs of PyTorch Geometric, with a class each, in its own loaders."""

    def __init__(self, client: int) -> None:
        super().__init__()
        self.client = client

    def _loader(self, split: str) -> DataLoader:
        from torch_geometric.data import Data
        from torch_geometric.loader import DataLoader as GraphLoader

        draw = torch.Generator().manual_seed(10 * self.client + len(split))
        graphs = []
        for index in range(size_of(split)):
            nodes = 4 + index % 3
            edges = torch.randint(nodes, (2, 10), generator=draw)
            graphs.append(Data(torch.randn(nodes, 5, generator=draw), edges, y=torch.tensor([index % 3])))
        return GraphLoader(graphs, BATCH, shuffle=split == "train")

    def train_dataloader(self) -> DataLoader:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        return self._loader("test")


def graph_classifier() -> L.LightningModule:
    from torch_geometric.nn import GIN, global_mean_pool
    from torchmetrics import Accuracy

    class GraphClassifier(L.LightningModule):
        """A model of PyTorch Geometric in a LightningModule, as its examples have it."""

        def __init__(self) -> None:
            super().__init__()
            self.gnn = GIN(5, 16, 2, norm="batch_norm")
            self.classifier = nn.Linear(16, 3)
            self.accuracy = Accuracy(task="multiclass", num_classes=3)

        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            return self.classifier(global_mean_pool(self.gnn(x, edge_index), batch))

        def training_step(self, data: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self(data.x, data.edge_index, data.batch), data.y)

        def validation_step(self, data: Any, batch_idx: int) -> None:
            self.accuracy(self(data.x, data.edge_index, data.batch), data.y)
            self.log("val_acc", self.accuracy, batch_size=data.num_graphs)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return GraphClassifier()


GEOMETRIC = {
    "GIN": Module(
        "torch_geometric", graph_classifier, Graphs, {"head": "^classifier", "encoder": "gnn"}, frozenset({"acc"})
    )
}


# ----------------------------------------------------------------------------------------------------------- Lightning


def words(split: str, client: int) -> Dataset:
    codes = torch.randint(20, (2, size_of(split), 6))
    return TensorDataset(*codes)


def lightning_transformer() -> L.LightningModule:
    module = LightningTransformer(vocab_size=20)
    module.model = Transformer(20, ninp=8, nhead=2, nhid=8, nlayers=1)
    return module


class GAN(L.LightningModule):
    """Two networks against each other by manual optimization, as in Lightning's documentation."""

    def __init__(self, latent: int = 4) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.generator = nn.Sequential(nn.Linear(latent, 16), nn.ReLU(), nn.Linear(16, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def adversarial_loss(self, logits: Tensor, real: float) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (points,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(len(points), self.latent, device=self.device)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), 1.0)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real = self.adversarial_loss(self.discriminator(points), 1.0)
        fake = self.adversarial_loss(self.discriminator(self(z).detach()), 0.0)
        d_loss = (real + fake) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (points,) = batch
        self.log("val_d_real", self.adversarial_loss(self.discriminator(points), 1.0))

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999))
            for part in (self.generator, self.discriminator)
        ]
        return optimizers, []


LIGHTNING = {
    "BoringModel": Module(
        "lightning", BoringModel, loaders(lambda split, client: RandomDataset(32, size_of(split))),
        {"head": "^layer", "encoder": "layer"}, frozenset(),
    ),
    "LightningTransformer": Module(
        "lightning", lightning_transformer, loaders(words),
        {"head": r"^model\.decoder", "encoder": "model.transformer"},
    ),
    "GAN": Module(
        "lightning", GAN, loaders(lambda split, client: TensorDataset(torch.randn(size_of(split), 2))),
        {"head": r"^discriminator\.2\.", "encoder": "discriminator.0"}, frozenset({"d_real"}),
    ),
}  # fmt: skip


MODULES: dict[str, Module] = {**TORCHGEO, **FORECASTING, **LIGHTLY, **TRANSFORMERS, **GEOMETRIC, **LIGHTNING}
