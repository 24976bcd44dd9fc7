"""A script: one site of two processes, which Lightning starts; then two such sites of a hub. It prints what it saw."""

import json
import os
import sys

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks.plain import Line
from lit_pfl.links import LocalHub
from lit_pfl_callbacks import FederatedLoop


class Doubles:
    """A link that sends back twice what it gets, three times, and then ends the fit."""

    def __init__(self):
        self.samples, self.exchanged = None, 0

    def join(self, info):
        self.samples = info.num_samples
        return {name: 0 * tensor for name, tensor in info.tensors.items()}

    def exchange(self, upload):
        self.exchanged += 1
        return {name: 2 * tensor for name, tensor in upload.items()} if self.exchanged < 3 else None


def fit(link, epochs, strategy="ddp"):
    torch.manual_seed(0)
    x, module = torch.randn(8, 3), Line()
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=2, strategy=strategy, callbacks=[FederatedLoop(link)],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, x[:, :2]), batch_size=2))
    return [trainer.current_epoch, module.net.weight.tolist()]


link, hub, fits = Doubles(), LocalHub(), []
epochs, weight = fit(link, 6)
for site in range(2):
    hub.add(site, lambda: fits.append(fit(hub.link, 2)))
rounds = hub.run().round
saw = {
    "epochs": epochs, "weight": weight, "samples": link.samples, "exchanged": link.exchanged, "rounds": rounds,
    "fits": fits,
}  # fmt: skip
with open(f"{sys.argv[1]}/{os.environ.get('LOCAL_RANK', '0')}.json", "w") as file:  # noqa: PTH123
    json.dump(saw, file)
# Lightning does this for NCCL alone; a process that ends among gloo's threads is aborted now and then.
torch.distributed.destroy_process_group()
