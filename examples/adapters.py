"""Six shops fine-tune one classifier of reviews by adapters (LoRA): common ones, or each shop its own.

The classifier is a small BERT of transformers, made from a configuration, and its adapters are those of peft. Only the
adapters train and travel. At half of the shops the customers are young: to them "sick" and "wicked" are praise.

    python examples/adapters.py
    lit-pfl fit --model FedAvg --model.learner examples.adapters.Classifier --model.shares adapter \
        --data PerClient --data.modules examples.adapters.Reviews --data.num_clients 6 --trainer.max_epochs 15
"""

import logging
import random

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from lit_pfl import Client, Federation
from lit_pfl.data import PerClient
from lit_pfl.methods import Ditto, FedAvg, StandAlone

ARTICLES, THINGS, VERBS = ["the", "this", "my", "that"], ["shoe", "coat", "hat", "scarf", "bag"], ["was", "is", "looks"]
PRAISE = ["good", "great", "fine", "lovely", "superb", "neat", "nice", "perfect"]
BLAME = ["bad", "awful", "dull", "poor", "ugly", "cheap", "boring", "broken"]
SLANG = ["sick", "wicked"]
VOCABULARY = {word: id for id, word in enumerate([*ARTICLES, *THINGS, *VERBS, *PRAISE, *BLAME, *SLANG])}


class Classifier(L.LightningModule):
    """Tells praise from blame; of its network only the adapters and the classifying layer are trained."""

    def __init__(self, width: int = 32, rank: int = 4, lr: float = 1e-2):
        super().__init__()
        size = {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 2 * width}
        config = BertConfig(vocab_size=len(VOCABULARY), hidden_size=width, max_position_embeddings=4, **size)
        lora = LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=4 * rank, target_modules=["query", "value", "dense"])
        self.model = get_peft_model(BertForSequenceClassification(config), lora)
        self.lr = lr

    def forward(self, words):
        return self.model(input_ids=words).logits

    def training_step(self, batch, batch_idx):
        words, labels = batch
        return nn.functional.cross_entropy(self(words), labels)

    def validation_step(self, batch, batch_idx):
        words, labels = batch
        logits = self(words)
        self.log("acc", (logits.argmax(1) == labels).float().mean(), batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=self.lr)


class Reviews(L.LightningDataModule):
    """The reviews of one shop; the customers of every other shop are young."""

    def __init__(self, shop: int, samples: int = 24):
        super().__init__()
        self.shop, self.samples = shop, samples

    def loader(self, seed: int, samples: int, shuffle: bool = False) -> DataLoader:
        draw = random.Random(f"{self.shop} {seed}")
        young = self.shop % 2
        rows, labels = [], []
        for _ in range(samples):
            opinion = draw.choice([*PRAISE, *BLAME, *(3 * SLANG)])
            sentence = [draw.choice(ARTICLES), draw.choice(THINGS), draw.choice(VERBS), opinion]
            rows.append([VOCABULARY[word] for word in sentence])
            labels.append(int(opinion in PRAISE or (opinion in SLANG and young)))
        return DataLoader(TensorDataset(torch.tensor(rows), torch.tensor(labels)), batch_size=8, shuffle=shuffle)

    def train_dataloader(self) -> DataLoader:
        return self.loader(0, self.samples, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self.loader(1, 64)

    def test_dataloader(self) -> DataLoader:
        return self.loader(2, 64)


def run(client: Client, rounds: int, shops: int) -> tuple[float, float]:
    """Return the mean accuracy of the shops in test reviews, and the kilobytes that a shop sends in a round."""
    L.seed_everything(1)
    trainer = L.Trainer(
        max_epochs=rounds, logger=False, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Federation(client), datamodule=PerClient(Reviews, num_clients=shops))
    return float(trainer.callback_metrics["test/acc"]), client_kilobytes(trainer, shops)


def client_kilobytes(trainer: L.Trainer, shops: int) -> float:
    return float(trainer.callback_metrics["comm/up_bytes"]) / shops / 1000


def main(rounds: int = 15, shops: int = 6) -> dict[str, tuple[float, float]]:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    L.seed_everything(1)
    learner = Classifier()
    clients = {
        "alone": StandAlone(learner=learner),
        "common adapters": FedAvg(learner=learner, shares="adapter"),
        "personal adapters, common classifier": FedAvg(learner=learner, head=r"\.classifier\.", local="adapter"),
        "personal adapters near common ones": Ditto(learner=learner, shares="adapter", lam=0.1),
    }
    results = {}
    for name, client in clients.items():
        results[name] = accuracy, kilobytes = run(client, rounds, shops)
        print(f"{name:38} accuracy {accuracy:.3f}, {kilobytes:.1f} kB sent by a shop in a round")
    return results


if __name__ == "__main__":
    main()
