"""Options of a script are checked as those of the command line are."""

from typing import Any, Literal

import numpy as np
import pytest
from jsonargparse.typing import PositiveFloat, PositiveInt

from lit_pfl import Federation
from lit_pfl.core import ServerAdam
from lit_pfl.data import ClientDirichlet, Digits
from lit_pfl.errors import ConfigError, check_options_of
from lit_pfl.methods import FedAvg, FedBABU, SimFed
from lit_pfl.nn.factorization import Factorization


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "Official"}, "data.split='Official': choose pooled, official."),
        ({"evaluate_on": "All"}, "data.evaluate_on='All': choose own, all, alike."),
        ({"num_clients": 0}, "data.num_clients=0: give a whole number above 0."),
        ({"num_clients": "4"}, "data.num_clients='4': give a whole number above 0."),
        ({"seed": -1}, "data.seed=-1: give a whole number from 0."),
        ({"partition": "Dirichlet"}, "data.partition='Dirichlet': give a partition, such as Dirichlet(alpha=0.5)."),
        (
            {"partition": ClientDirichlet(exhausted="Reuse")},
            "data.partition.exhausted='Reuse': choose redraw, reuse.",
        ),
    ],
)
def test_data(options, message):
    with pytest.raises(ConfigError) as error:
        Digits(**options).setup()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda: SimFed(match="Best"), "model.match='Best': choose best, random, worst."),
        (lambda: FedAvg(norm_stats="Averaged"), "model.norm_stats='Averaged': choose local, averaged."),
        (lambda: FedBABU(finetune_lr=0.0), "model.finetune_lr=0.0: give a number above 0."),
        (lambda: FedBABU(finetune_momentum=2), "model.finetune_momentum=2: give a number from 0 and up to 1."),
        (
            lambda: FedAvg(server_optimizer=ServerAdam(beta1=1.5)),
            "model.server_optimizer.beta1=1.5: give a number from 0 and up to 1.",
        ),
        (
            lambda: FedAvg(factorization=Factorization(l1_mode="none")),
            "model.factorization.l1_mode='none': choose subgradient, proximal, inert.",
        ),
    ],
)
def test_methods(method, message):
    with pytest.raises(ConfigError) as error:
        method().configure_model()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_epochs": 0}, "federation.local_epochs=0: give a whole number above 0."),
        ({"local_epochs": 2.5}, "federation.local_epochs=2.5: give a whole number above 0."),
        ({"seed": 1.5}, "federation.seed=1.5: give a whole number from 0."),
        ({"quorum": None}, "federation.quorum=None: give a share from 0 to 1."),
        ({"quorum": 2}, "federation.quorum=2: give a share from 0 to 1."),
        (
            {"participation": "all"},
            "federation.participation='all': give a share above 0 and up to 1, or a whole number of clients.",
        ),
        (
            {"participation": float("nan")},
            "federation.participation=nan: give a share above 0 and up to 1, or a whole number of clients.",
        ),
        ({"evaluate": "Before"}, "federation.evaluate='Before': choose before, after, global."),
    ],
)
def test_federations(options, message):
    with pytest.raises(ConfigError) as error:
        Federation(FedAvg(), **options)
    assert str(error.value) == message


def test_an_attribute_may_be_what_the_constructor_has_made_of_an_option():
    class Timed(FedAvg):
        def __init__(
            self,
            rule: Literal["slow", "quick"] = "quick",
            later: "Unknown" = None,  # type: ignore[name-defined]  # noqa: F821
            **kwargs: Any,
        ) -> None:
            super().__init__(**kwargs)
            self.rule = [rule]

    check_options_of(Timed(), "model")


def test_a_default_of_none_is_right_whatever_the_annotation_says():
    class Loose(FedAvg):
        def __init__(self, factor: PositiveFloat = None, steps: PositiveInt = 3, **kwargs: Any) -> None:  # type: ignore[assignment]
            super().__init__(**kwargs)
            self.factor, self.steps = factor, steps

    check_options_of(Loose(), "model")
    for steps in (None, 2.5, "3", 0):
        with pytest.raises(ConfigError, match=f"model.steps={steps!r}: give a whole number above 0.$"):
            check_options_of(Loose(steps=steps), "model")


def test_numbers_of_numpy_are_numbers():
    Digits(num_clients=np.int64(4)).setup()
    check_options_of(FedBABU(finetune_lr=np.float32(0.1)), "model")
