"""A script: one site of two processes, in a federation of two sites that are started one by one."""

import os
import sys

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from callbacks.plain import Line
from lit_pfl.links import ProcessGroupLink
from lit_pfl.methods import Ditto
from lit_pfl_callbacks import FederatedLoop

SAMPLES, BATCH = 16, 8


def site_module(site):
    """Return a site's module: the personal part of each begins elsewhere."""
    torch.manual_seed(site)
    return Ditto(learner=Line(), head="bias")


def fit_site(link, module, site, processes=1, rank=0):
    """Fit it to its data, of which every process has a batch's share."""
    x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(site))
    data = TensorDataset(x, x[:, :2] * (site + 1))
    trainer = L.Trainer(
        max_epochs=4, accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto",
        callbacks=[FederatedLoop(link, every_n_epochs=2)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    sampler = DistributedSampler(data, processes, rank, shuffle=False)
    trainer.fit(module, DataLoader(data, BATCH // processes, sampler=sampler))


if __name__ == "__main__":
    address, folder, site = sys.argv[1:]
    module, rank = site_module(int(site)), int(os.environ.get("LOCAL_RANK", "0"))
    link = ProcessGroupLink(rank=int(site), size=2, address=address, timeout=300)
    fit_site(link, module, int(site), 2, rank)
    torch.save(module.state_dict(), f"{folder}/{site}_{rank}.pt")
    # Lightning does this for NCCL alone; a process that ends among gloo's threads is aborted now and then.
    torch.distributed.destroy_process_group()
