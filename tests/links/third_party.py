"""Somebody's own module in every process that torchrun starts, under its own Trainer.

torchrun --nproc-per-node 2 third_party.py FOLDER METHOD EPOCHS [resume]
"""

import os
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import lit_pfl.methods
from lit_pfl.links import ProcessGroupLink
from lit_pfl_callbacks import FederatedLoop

sys.path.append(str(Path(__file__).parent.parent.parent / "examples" / "torchrun"))
from project import MyModule, my_data


class Stepping(MyModule):
    """The same by plain SGD, which Scaffold needs."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main(folder: Path, method: str, epochs: int, resumes: bool) -> None:
    site = int(os.environ["RANK"])
    L.seed_everything(1, verbose=False)
    shuffled, _ = my_data(site)
    module, data = MyModule(), shuffled
    if method != "none":
        module = getattr(lit_pfl.methods, method)(learner=Stepping())
        data = DataLoader(shuffled.dataset, 16)
    link = ProcessGroupLink(timeout=120)
    saves = ModelCheckpoint(folder / str(site), filename="last", enable_version_counter=False)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=[FederatedLoop(link, every_n_epochs=2), saves], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data, ckpt_path=folder / str(site) / "last.ckpt" if resumes else None, weights_only=False)
    torch.save(module.state_dict(), folder / f"{site}.pt")
    if site == 0:
        torch.save(link.coordinator.state_dict(), folder / "coordinator.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:] == ["resume"])
