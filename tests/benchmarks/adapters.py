"""What adapters of a transformer cost: bytes that a client sends in a round, and memory.

    python tests/benchmarks/adapters.py [--clients 50] [--methods FedAvg Ditto]

A BERT of transformers with 20 million weights, made from a configuration, has a LoRA of rank 4 of peft; a classifying
layer is trained too. Every client trains two rounds of one batch. Each method runs in a process of its own. Its memory
is the most that the process has held beyond what it held before the clients were made, network included.
"""

import argparse
import json
import logging
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

import lit_pfl.methods
from lit_pfl import Federation
from lit_pfl.data import PerClient

HEAD, ENCODER = r"\.classifier\.", "model.base_model.model.bert"
#: a name for the table, the method, and what it is told
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("FedAvg", {"shares": "adapter"}),
    "FedAvg, personal adapters": ("FedAvg", {"head": HEAD, "local": "adapter"}),
    "Ditto": ("Ditto", {"shares": "adapter"}),
    "FedPer": ("FedPer", {"head": HEAD}),
    "FedSLR": ("FedSLR", {"head": HEAD}),
    "SimFed": ("SimFed", {"encoder": ENCODER, "factorization": None}),
}


class Classifier(L.LightningModule):
    def __init__(self, layers: int = 6, width: int = 512) -> None:
        super().__init__()
        size = {"num_hidden_layers": layers, "num_attention_heads": 8, "intermediate_size": 4 * width}
        config = BertConfig(vocab_size=2000, hidden_size=width, max_position_embeddings=16, **size)
        lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
        self.model = get_peft_model(BertForSequenceClassification(config), lora)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        words, labels = batch
        return nn.functional.cross_entropy(self.model(input_ids=words).logits, labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3)


class Words(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randint(2000, (2, 8)), torch.tensor([0, 1])), batch_size=2)


def peak() -> float:
    """Return the most that this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def megabytes(tensors: Iterator[torch.Tensor]) -> float:
    return sum(tensor.nbytes for tensor in tensors) / 1e6


def measure(name: str, clients: int) -> dict[str, float]:
    """Return what one run costs."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    method, options = RUNS[name]
    torch.manual_seed(0)
    learner = Classifier()
    learner.training_step(next(iter(Words().train_dataloader())), 0).backward()  # what any training needs
    learner.zero_grad()
    before = peak()
    client = getattr(lit_pfl.methods, method)(learner=learner, **options)
    trainer = L.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", num_sanity_val_steps=0, limit_val_batches=0, limit_test_batches=0,
    )  # fmt: skip
    federation = Federation(client, threads=1, seed=0)
    trainer.fit(federation, datamodule=PerClient([Words() for _ in range(clients)]))
    up = float(trainer.callback_metrics["comm/up_bytes"])
    return {
        "network": megabytes(p for p in learner.parameters()),
        "trained": megabytes(p for p in learner.parameters() if p.requires_grad),
        "sent": up / clients / 1e6,
        "memory": peak() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--methods", nargs="*", default=list(RUNS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.clients)))
        return
    print("| method | sent by a client in a round, MB | memory of all clients, MB |\n|---|---|---|")
    for name in given.methods:
        command = [sys.executable, str(Path(__file__)), "--one", name, "--clients", str(given.clients)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"| {name} | {done.stderr.strip().splitlines()[-1]} | |", flush=True)
            continue
        cost = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"| {name} | {cost['sent']:.3f} | {cost['memory']:.0f} |", flush=True)
    if not done.returncode:
        print(f"\nThe network has {cost['network']:.0f} MB of weights, of which {cost['trained']:.3f} MB train.")


if __name__ == "__main__":
    main()
