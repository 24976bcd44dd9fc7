"""A script: two sites by every method, each of one process, and then of two; it writes what they differ by.

Every process has a batch of half the size, so that both of a step's batches are that of one process.
"""

import json
import logging
import os
import sys

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from callbacks.test_sites_of_every_method import CLASSES, EPOCHS, METHODS, OTHERS, Classifier
from lit_pfl import Client
from lit_pfl.links import LocalHub
from lit_pfl_callbacks import FederatedLoop

RANK = int(os.environ["LOCAL_RANK"])
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def fit(link, method, site, devices):
    torch.manual_seed(0)
    module = method(learner=Classifier("table"), head="^head", encoder="body")
    torch.manual_seed(RANK if devices > 1 else 0)  # nobody needs to give all processes the same
    # an even sample is the first process's, and an odd one the second's: those have no sample of class 2
    labels = torch.tensor([2, 0, 1, 1] * 4 if site else [0, 0, 2, 1] * 4)
    data = TensorDataset(torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(site)), labels % CLASSES)
    sampler = DistributedSampler(data, devices, RANK if devices > 1 else 0, shuffle=False)
    trainer = L.Trainer(
        max_epochs=2 * EPOCHS, accelerator="cpu", devices=devices, callbacks=[FederatedLoop(link, EPOCHS)],
        strategy="ddp_find_unused_parameters_true" if devices > 1 else "auto",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(data, 8 // devices, sampler=sampler)
    trainer.fit(module, loader, loader)
    return torch.cat([tensor.detach().double().flatten() for tensor in module.state_dict().values()])


def run(method, devices):
    hub, states = LocalHub(), []
    for site in range(2):
        hub.add(site, lambda site=site: states.append(fit(hub.link, method, site, devices)))
    hub.run()
    return torch.cat(states)


class Own(Client):
    """A method of one's own, whose steps depend on the batch by more than gradients."""

    shares = frozenset({"body", "head"})

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            self.learner.head.bias.add_(batch[0].mean())


saw = {}
for name, method in {**METHODS, "Own": Own}.items():
    if not issubclass(method, OTHERS):
        try:
            several = run(method, 2)
            saw[name] = float((several - run(method, 1)).abs().max())
        except Exception as error:
            saw[name] = str(error)
with open(f"{sys.argv[1]}/{RANK}.json", "w") as file:  # noqa: PTH123
    json.dump(saw, file)
# Lightning does this for NCCL alone; a process that ends among gloo's threads is aborted now and then.
torch.distributed.destroy_process_group()
