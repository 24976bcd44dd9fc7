"""The same sites with a model of their own each, by any of the methods: here Ditto.

torchrun --nproc-per-node 4 examples/torchrun/personalized.py
"""

import os

import lightning as L
from project import QUIET, MyModule, my_data

from lit_pfl.links import ProcessGroupLink
from lit_pfl.methods import Ditto
from lit_pfl_callbacks import FederatedLoop


def main():
    site = int(os.environ["RANK"])
    L.seed_everything(1, verbose=False)
    train, test = my_data(site)
    module = Ditto(learner=MyModule())
    loop = FederatedLoop(ProcessGroupLink(), every_n_epochs=2)
    trainer = L.Trainer(max_epochs=40, accelerator="cpu", callbacks=[loop], **QUIET)
    trainer.fit(module, train)
    [scores] = trainer.test(module, test, verbose=False)
    print(f"site {site}: R2 {scores['r2']:.3f}")


if __name__ == "__main__":
    main()
