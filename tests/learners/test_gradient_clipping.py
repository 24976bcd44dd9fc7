"""A learner that clips its gradients in a way of its own does so under every method, each of two by itself."""

import pytest
import torch

from foreign import PROJECTS, Regression
from lit_pfl import Federation
from lit_pfl.methods import APFL, Ditto, FedAvg, FedSLR, StandAlone
from tiny import assert_equal, trainer, weights


class Clips(Regression):
    """Clips to a norm that it chooses, and more strictly in its head."""

    def __init__(self) -> None:
        super().__init__("SGD")

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm) -> None:
        norms = torch.stack([weight.grad.norm() for weight in self.parameters()])
        self.log("clip", norms.max())
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        self.net[3].weight.grad.clamp_(-0.01, 0.01)


def run(method, learner=Clips, **options):
    torch.manual_seed(0)
    federation = Federation(method(learner=learner()), seed=1, threads=1, local_epochs=2, **options)
    trainer(2).fit(federation, datamodule=PROJECTS["Regression"].data())
    return weights(federation)


def part(states, prefix):
    return {
        client: {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        for client, state in states.items()
    }


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["interleaved", "separate"])
def test_both_of_ditto_s_models_are_clipped_as_if_alone(schedule):
    """With lam = 0 they are FedAvg's and Stand-Alone's."""
    both = run(lambda **options: Ditto(lam=0.0, schedule=schedule, **options))
    if schedule == "separate":  # each trains half of the epochs; here it is enough that nothing else fails
        assert not torch.equal(both[0]["personal.net.3.weight"], both[0]["net.3.weight"])
        return
    assert_equal(part(both, "net."), part(run(FedAvg), "net."))
    assert_equal(part(both, "personal.net."), part(run(StandAlone), "net."))
    assert not torch.equal(both[0]["net.3.weight"], run(FedAvg, lambda: Regression("SGD"))[0]["net.3.weight"])


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_model_that_does_not_train_at_present_has_nothing_to_clip(algorithm):
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    clipped = run(FedSLR, lambda: Regression("SGD"), client_trainer=options)
    assert not torch.equal(clipped[0]["net.3.weight"], run(FedSLR, lambda: Regression("SGD"))[0]["net.3.weight"])


@pytest.mark.seconds
@pytest.mark.few(1)
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_both_of_apfl_s_models_are_clipped_as_if_alone(alpha):
    both = run(lambda **options: APFL(alpha=alpha, **options))
    assert_equal(part(both, "net."), part(run(FedAvg), "net."))
    if alpha == 1:
        assert_equal(part(both, "personal.net."), part(run(StandAlone), "net."))
