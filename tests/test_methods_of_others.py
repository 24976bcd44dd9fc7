"""Methods as others write them: what they may rely on, and what is refused in a line."""

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lit_pfl import EVERYTHING, Classifying, Client, Federation, MixingServer, Payload, Server
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.methods import FedAvg
from lit_pfl.testing.method_tester import MethodTester, PlainNet
from lit_pfl.testing.methods import a_bad_upload_is_refused_and_the_round_goes_on
from tiny import assert_equal, client, digits, run, spec, trainer


class Weighted(Server):
    """Weighs uploads by what is in them."""

    def averaging_weights(self, round, uploads):
        norms = torch.stack([upload["backbone.head.bias"].double().norm() for upload in uploads.values()])
        return (norms / norms.sum()).tolist()


class Declared(Weighted):
    means_only = True


class Own(FedAvg):
    server: type[Server] = Server

    def configure_server(self):
        return self.server()


class Uniform(Own):
    weighting = "uniform"


@pytest.mark.seconds
def test_weights_that_are_made_of_uploads_are_not_private():
    """The noise is for a mean whose weights tell nothing."""
    method = client(Own)
    method.server = Weighted
    data = digits(permute_labels=False)
    with pytest.raises(ConfigError, match=r"federation.privacy.where=central: Weighted uses single uploads"):
        run(method, data, privacy=ClientPrivacy(noise_multiplier=0.0))
    method.server = Declared
    run(method, data, privacy=ClientPrivacy(noise_multiplier=0.0))


@pytest.mark.seconds
def test_a_server_of_ones_own_weighs_as_its_method_says():
    data = digits(permute_labels=False)
    uploads = {0: Payload({"w": torch.ones(1)}), 1: Payload({"w": torch.ones(1)})}
    for method, equal in ((Uniform, True), (Own, False)):
        server = run(client(method), data, rounds=1).coordinator.server
        server.num_samples = {0: 1, 1: 3}
        assert (server.averaging_weights(1, uploads) == [0.5, 0.5]) == equal


class Mixture(nn.Module):
    """Adds the logits of a received head."""

    def __init__(self, weight, bias):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, features, logits):
        return logits + 4 * nn.functional.linear(features, self.weight, self.bias)


class Remembering(Classifying):
    """Is scored with a head that it keeps from its latest download."""

    shares = EVERYTHING
    needs_labels = ""
    kind = "attribute"

    def configure_state(self):
        if self.kind != "attribute":
            head = self.head_module
            for name in ("weight", "bias"):
                buffer = torch.zeros_like(getattr(head, name))
                self.register_buffer(f"kept_{name}", buffer, persistent=self.kind == "persistent")

    def download(self, reply):
        super().download(reply)
        for name in ("weight", "bias"):
            received = reply[f"backbone.head.{name}"].clone()
            if self.kind == "assigned":
                setattr(self, f"kept_{name}", received)
            elif self.kind == "attribute":
                self.__dict__[f"kept_{name}"] = received
            else:
                getattr(self, f"kept_{name}").copy_(received)

    @contextmanager
    def personalized(self):
        if not hasattr(self, "kept_weight"):
            yield self.scored
            return
        with self.at_head(logits=Mixture(self.kept_weight, self.kept_bias)):
            yield self.scored


@pytest.mark.seconds
def test_what_a_download_sets_is_put_back_after_scoring_as_aggregated():
    scores = {}
    for kind in ("persistent", "not persistent", "attribute", "assigned"):
        method = client(Remembering)
        method.kind = kind
        federation = run(method, digits(permute_labels=False), rounds=3)
        scores[kind] = [row.scores for row in (*federation.rows, *federation.other_rows)]
    assert len(scores["persistent"]) > 4
    assert all(one == scores["persistent"] for one in scores.values())


class Gated(FedAvg):
    """Sends a module with running statistics."""

    shared_extras = frozenset({"gate"})

    def configure_state(self):
        self.extra = nn.ModuleDict({"gate": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))})


@pytest.mark.parametrize("norm_stats", ["local", "averaged"])
def test_of_further_modules_statistics_are_sent_as_the_option_says(norm_stats):
    member = client(Gated, norm_stats=norm_stats).build(spec())
    sent = {name.removeprefix("extra.gate.") for name in member.upload() if name.startswith("extra.")}
    statistics = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert sent == {"0.weight", "0.bias", "1.weight", "1.bias"} | (statistics if norm_stats == "averaged" else set())


def test_a_global_model_without_statistics_of_further_modules_is_refused():
    method = client(Gated, backbone=PlainNet)
    with pytest.raises(ConfigError, match=r"'extra\.gate\.1\.running_mean' of its own; set model.norm_stats=averaged"):
        run(method, digits(permute_labels=False), evaluate="global")


class Drifting(FedAvg):
    """Sends a tensor of its own next to the weights, which comes back averaged."""

    def configure_state(self):
        self.register_buffer("drift", torch.zeros(3))

    def upload(self):
        return super().upload().with_({"drift": self.drift + 1})

    def download(self, reply):
        self.drift.copy_(reply["drift"])
        super().download({name: tensor for name, tensor in reply.items() if name != "drift"})


@pytest.mark.seconds
def test_a_global_model_is_scored_without_what_else_is_sent():
    federation = run(client(Drifting, backbone=PlainNet), digits(permute_labels=False))
    assert "global" in {row.model for row in federation.other_rows}


class Adapting(Classifying):
    """Takes a step of entropy minimization on every batch that it is scored on."""

    shares = EVERYTHING
    needs_labels = ""

    @contextmanager
    def personalized(self):
        def adapted(features, logits):
            with torch.enable_grad():
                shift = torch.zeros(logits.shape[1], requires_grad=True)
                shares = (logits + shift).softmax(1)
                (-(shares * shares.log()).sum(1).mean()).backward()
            return logits - shift.grad

        with self.at_head(logits=adapted):
            yield self.scored


@pytest.mark.seconds
def test_what_is_scored_may_need_gradients_in_every_command():
    data = digits(permute_labels=False)
    federation, fitting = Federation(client(Adapting), seed=3, threads=1), trainer(2)
    fitting.fit(federation, datamodule=data)
    ended = float(fitting.callback_metrics["test/acc"])
    fitting.test(federation, datamodule=data)
    assert float(fitting.callback_metrics["test/acc"]) == pytest.approx(ended)
    fitting.validate(federation, datamodule=data)
    assert fitting.predict(federation, datamodule=data)


@pytest.mark.parametrize("step", ["validation_step", "test_step", "predict_step"])
def test_steps_that_nobody_would_call_are_refused(step):
    method: type[Client] = type("Mine", (FedAvg,), {step: lambda self, batch, batch_idx: None})
    with pytest.raises(ConfigError, match=rf"^Mine\.{step} would never be called, .* in personalized\(\)\.$"):
        run(client(method))


class Signs(FedAvg):
    """Sends signs only."""

    def upload(self):
        return Payload({name: tensor.sign().to(torch.int8) for name, tensor in super().upload().items()})

    def download(self, reply):
        pass


@pytest.mark.seconds
def test_uploads_of_whole_numbers_pass_the_check_of_bad_uploads():
    a_bad_upload_is_refused_and_the_round_goes_on(MethodTester(Signs))


def own_weights(member):
    return dict(member.learner.named_parameters())


@pytest.mark.seconds
def test_what_clients_answer_as_they_are_scored_can_be_copied_and_shown():
    federation = run(client(FedAvg), evaluate="after")
    for answer in federation.ask(own_weights, as_scored=True).values():
        assert answer
        assert not any(tensor.requires_grad for tensor in answer.values())


class Sends(FedAvg):
    """Sends something next to the weights, which nobody takes out of the reply."""

    reserved = ("counts",)
    counts = torch.ones(3)

    def upload(self):
        return {**super().upload(), "counts": self.counts}


class SendsNoTensor(Sends):
    counts = 3.0


class SendsMoreLater(Sends):
    def initial(self):
        return Payload(self.shared_parameters())


class ReturnsNothing(FedAvg):
    def objective(self, batch, batch_idx):
        super().objective(batch, batch_idx)


class Remembers(FedAvg):
    """It stays near what it does not keep."""

    def objective(self, batch, batch_idx):
        return (
            super().objective(batch, batch_idx)
            + (self.learner.get_parameter("backbone.head.weight") - self.received["backbone.head.weight"]).norm()
        )


class StartsAlone(Server):
    def start(self, clients):
        self.started = True


class Mixes(MixingServer):
    def __init__(self, matrix):
        self.matrix = matrix

    def mixing_matrix(self, round, latest):
        return self.matrix


@pytest.mark.seconds
def test_a_mixing_matrix_may_be_of_numpy():
    found = [run(served_by(partial(Mixes, matrix)), digits()) for matrix in (torch.eye(4), np.eye(4))]
    assert_equal(*(federation.clients[1].state_dict() for federation in found), "weights")


def served_by(server):
    method = client(Own)
    method.server = server
    return method


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        (
            client(Sends),
            MisconfigurationException,
            r"holds '\S*counts', which \w+ does not have; a method's download\(\) ta",
        ),
        (client(SendsNoTensor), TypeError, "^'counts' is a float; what is sent must be tensors"),
        (
            client(SendsMoreLater),
            UploadError,
            "nobody asked for tensor 'counts': an upload holds what the client joined",
        ),
        (client(ReturnsNothing), ConfigError, r"^ReturnsNothing\.objective returns None; it must return the loss"),
        (
            client(Remembers),
            ConfigError,
            "^received has no 'backbone.head.weight': in a round it holds the shared weights, where the me",
        ),
        (served_by(lambda: Server), ConfigError, "^Own.configure_server returns the class Server; it must return a S"),
        (served_by(lambda: None), ConfigError, "^Own.configure_server returns a NoneType; it must return a Server"),
        (served_by(StartsAlone), ConfigError, r"^StartsAlone has no model; its start\(clients\) must call"),
        *(
            (
                served_by(partial(Mixes, matrix)),
                ConfigError,
                r"^Mixes\.mixing_matrix returns a matrix of shape .* in round 1; for 4 clients it must be \(4, 4\)",
            )
            for matrix in (None, torch.eye(2), torch.ones(4, 4), torch.full((4, 4), torch.nan))
        ),
    ],
    ids=lambda value: getattr(type(value), "__name__", ""),
)
def test_what_a_method_does_wrong_is_said_in_a_line(method, error, message):
    with pytest.raises(error, match=message) as caught:
        run(method, digits(permute_labels=False))
    assert "\n" not in str(caught.value)
