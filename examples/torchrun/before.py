"""Every process trains a site's model on that site's patients alone.

torchrun --nproc-per-node 4 examples/torchrun/before.py
"""

import os

import lightning as L
from project import QUIET, MyModule, my_data


def main():
    site = int(os.environ["RANK"])
    L.seed_everything(1, verbose=False)
    train, test = my_data(site)
    module = MyModule()
    trainer = L.Trainer(max_epochs=40, accelerator="cpu", **QUIET)
    trainer.fit(module, train)
    [scores] = trainer.test(module, test, verbose=False)
    print(f"site {site}: R2 {scores['r2']:.3f}")


if __name__ == "__main__":
    main()
