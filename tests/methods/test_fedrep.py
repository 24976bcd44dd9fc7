"""FedRep: what trains when."""

import lightning as L
import pytest
import torch
from two_layers import BODY, HEAD, SGD, Recorded, assert_close, gradient

from lit_pfl.errors import ConfigError
from lit_pfl.methods import FedRep
from tiny import Parts, client, digits, run, spec


@pytest.mark.parametrize(("local_epochs", "body_epochs"), [(2, 1), (3, 1), (3, 2)])
def test_two_rounds_equal_the_formulas(local_epochs, body_epochs):
    """Algorithm 1: the head's epochs, then the body's. Momentum and weight decay leave the other alone."""
    recorded = Recorded(FedRep, local_epochs=local_epochs, body_epochs=body_epochs)
    optimizers = [SGD() for _ in recorded.members]

    def train(k, epoch, w, batches):
        names = HEAD if epoch < local_epochs - body_epochs else BODY
        for batch in batches:
            g = gradient(w, batch)
            optimizers[k].step(w, {name: g[name] for name in names})

    expected = recorded.averaged(train, BODY)
    for k, member in recorded.members.items():
        assert_close(member.backbone, expected[k])


class Watch(L.Callback):
    """Notes a client's weights at the start of every local epoch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.seen.append({name: tensor.clone() for name, tensor in pl_module.learner.state_dict().items()})


@pytest.mark.parametrize("client_trainer", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 3}])
def test_what_is_frozen_does_not_move(client_trainer):
    options = {**client_trainer, "callbacks": [Watch()]}
    federation = run(client(FedRep), digits(1), rounds=3, local_epochs=2, client_trainer=options)
    watch, *_ = federation.clients[0].trainer.callbacks
    assert len(watch.seen) == 6
    for epoch, (before, after) in enumerate(zip(watch.seen, watch.seen[1:], strict=False)):
        for name in before:
            if name == "backbone.body.0.bias":  # batch norm takes it out again, so that its gradient is about 0
                continue
            follows = name.endswith(("running_mean", "running_var", "num_batches_tracked"))
            trains = name.startswith("backbone.body") if epoch % 2 else name.startswith("backbone.head")
            assert torch.equal(before[name], after[name]) is not (trains or follows), (epoch, name)


def test_nothing_is_frozen_between_rounds():
    federation = run(client(FedRep), rounds=2, local_epochs=2)
    for member in federation.clients.values():
        assert all(weight.requires_grad for weight in member.parameters())
        assert all(weight.grad is None for weight in member.parameters())


def test_errors():
    task = spec(channels=1, image_size=8)
    with pytest.raises(ConfigError, match=r"model\.body_epochs=1 leaves none of federation\.local_epochs=1"):
        client(FedRep).build(task)
    client(FedRep, mode="joint").build(task)
    linear = client(FedRep, backbone=lambda *_: Parts(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
    with pytest.raises(ConfigError, match=r"model\.backbone: FedRep trains the body alone"):
        linear.build(spec(channels=1, image_size=8, local_epochs=2))
    tied = Parts(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64)), torch.nn.Linear(64, 64))
    tied.head.weight, tied.head.bias = tied.body[1].weight, tied.body[1].bias
    with pytest.raises(ConfigError, match=r"model\.head: .* \(tied weights\)"):
        client(FedRep, backbone=lambda *_: tied).build(spec(channels=1, image_size=8, local_epochs=2))
