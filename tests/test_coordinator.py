"""The server's side of a round: what is refused, what is counted, and what comes out."""

import io
import itertools
import re

import numpy as np
import pytest
import torch

from lit_pfl import Payload
from lit_pfl.core.asynchronous import FedBuff, InTraining
from lit_pfl.core.averaging import weighted_mean
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.core.ledger import Ledger
from lit_pfl.core.mixing import MixingServer
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.core.updates import update_of
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.methods import APPLE, FedFOMO
from tiny import assert_equal, run
from tiny import client as made

SAMPLES = {0: 10, 3: 70, 5: 33, 8: 1}


class Neighbours(MixingServer):
    """Every client gets half of its own tensors and half of the next one's; its bias is never sent back."""

    def mixing_matrix(self, round, latest):
        own = torch.eye(len(latest), dtype=torch.float64)
        return (own + own.roll(1, dims=1)) / 2

    def is_averaged(self, name):
        return name != "b"


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(4, 3, generator=generator),
        "b": torch.randn(3, generator=generator),
        "n": torch.randint(100, (), generator=generator),
    }


def uploads(round: int = 1) -> dict[int, dict[str, torch.Tensor]]:
    return {client: tensors(100 * round + client) for client in SAMPLES}


def started(server: Server | None = None, **options) -> Coordinator:
    coordinator = Coordinator(server or Server(), **options)
    coordinator.start({client: ClientInfo(n, Payload(tensors(client))) for client, n in SAMPLES.items()})
    return coordinator


def play(coordinator: Coordinator, round: int, refuse: tuple[int, ...] = ()) -> dict[int, Payload]:
    """Play a whole round; the uploads of some are broken."""
    coordinator.begin_round()
    replies = {client: coordinator.reply(client) for client in SAMPLES}
    sent = uploads(round)
    for client in refuse:
        sent[client]["b"] = torch.full((3,), torch.nan)
    coordinator.collect(sent)
    return replies


def numpy_mean(sent: dict[int, dict[str, torch.Tensor]], name: str) -> np.ndarray:
    total = sum(SAMPLES[client] for client in sent)
    return sum(SAMPLES[client] / total * upload[name].numpy().astype(np.float64) for client, upload in sent.items())


# What is refused


def changed(name: str, change):
    return lambda upload: {**upload, name: change(upload[name].clone())}


BROKEN = {
    "NaN": (changed("w", lambda t: t.index_fill_(1, torch.tensor(2), torch.nan)), "w", "NaN or infinity"),
    "infinity": (changed("b", lambda t: t.index_fill_(0, torch.tensor(0), torch.inf)), "b", "NaN or infinity"),
    "both infinities": (changed("b", lambda t: torch.tensor([torch.inf, -torch.inf, 0])), "b", "NaN or infinity"),
    "NaN among huge ones": (changed("b", lambda t: torch.tensor([3e38, 3e38, torch.nan])), "b", "NaN or infinity"),
    "shape": (changed("w", lambda t: t.T), "w", r"float32 \(3, 4\); it must be torch.float32 \(4, 3\) \(keep .* local"),
    "scalar for one": (changed("n", lambda t: t.view(1)), "n", r"int64 \(1,\); it must be torch.int64 \(\)"),
    "type": (changed("w", torch.Tensor.double), "w", "float64 .* must be torch.float32"),
    "whole numbers": (changed("b", torch.Tensor.long), "b", "int64 .* must be torch.float32"),
    "missing": (lambda upload: {name: upload[name] for name in ("w", "n")}, "b", "lacks"),
    "extra": (lambda upload: {**upload, "more": torch.ones(2)}, "more", "nobody asked"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("as_payload", [False, True])
def test_a_broken_upload_is_refused_by_name_and_the_others_count(case, as_payload):
    breaks, name, reason = BROKEN[case]
    coordinator, sent = started(), uploads()
    sent[3] = breaks(sent[3])
    coordinator.begin_round()
    with pytest.warns(UserWarning, match=r"Round 1 continues without one upload\. Client 3: "):
        coordinator.collect({k: Payload(upload) for k, upload in sent.items()} if as_payload else sent)
    [refused] = coordinator.refused
    assert isinstance(refused, UploadError)
    assert re.search(rf"^Client 3: .*'{name}'", str(refused))
    assert re.search(reason, str(refused))
    others = {client: upload for client, upload in sent.items() if client != 3}
    np.testing.assert_allclose(coordinator.reply(0)["w"].numpy(), numpy_mean(others, "w"), atol=1e-6)
    assert set(coordinator.ledger.clients) == {0, 5, 8}
    coordinator.begin_round()
    coordinator.collect(uploads(2))
    assert coordinator.refused == []


@pytest.mark.parametrize("number", [0, -1, 1.5, 2**53 + 1, True, "9", None, float("nan"), np.float64(3)])
def test_a_number_of_samples_that_is_none_is_refused_by_client(number):
    with pytest.raises(ConfigError, match="^Client 5(: its number of training samples is| has no training sample)"):
        Coordinator(Server()).start({5: ClientInfo(number, Payload(tensors(0)))})
    Coordinator(Server()).start({5: ClientInfo(np.int64(2**53), Payload(tensors(0)))})


@pytest.mark.parametrize("case", BROKEN)
def test_a_refusal_says_client_and_tensor(case):
    breaks, name, _ = BROKEN[case]
    coordinator, sent = started(), uploads()
    sent[3] = breaks(sent[3])
    coordinator.begin_round()
    with pytest.warns(UserWarning, match="continues without one upload"):
        coordinator.collect(sent)
    [refusal] = coordinator.refusals
    assert refusal == (1, 3, name, str(coordinator.refused[0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_huge_finite_values_whose_sum_overflows_are_accepted(dtype):
    huge = torch.full((4, 3), torch.finfo(dtype).max, dtype=dtype)
    assert huge.sum().isinf()
    coordinator = Coordinator(Server())
    coordinator.start({k: ClientInfo(1, Payload({"w": torch.zeros(4, 3, dtype=dtype)})) for k in range(2)})
    coordinator.begin_round()
    coordinator.collect({k: {"w": huge.clone()} for k in range(2)})
    assert not coordinator.refused
    assert torch.equal(coordinator.reply(0)["w"], huge)


@pytest.mark.parametrize(
    ("quorum", "broken", "goes_on"),
    [
        (0.5, 2, True),
        (0.5, 3, False),
        (0.75, 1, True),
        (0.75, 2, False),
        (1.0, 0, True),
        (1.0, 1, False),
        (0.0, 4, True),
    ],
)
@pytest.mark.filterwarnings("ignore:Round 1 continues")
def test_a_round_needs_a_quorum(quorum, broken, goes_on):
    coordinator = started(quorum=quorum)
    before = coordinator.reply(0)
    if goes_on:
        play(coordinator, 1, refuse=list(SAMPLES)[:broken])
    else:
        with pytest.raises(UploadError, match=rf"Round 1: {4 - broken} of 4 .* quorum of {quorum:.0%}.*Client 0.*'b'"):
            play(coordinator, 1, refuse=list(SAMPLES)[:broken])
    assert (coordinator.reply(0) is before) == (not goes_on or broken == 4)
    assert len(coordinator.refused) == broken


@pytest.mark.parametrize("num_samples", [0, -1])
def test_a_client_without_samples_is_refused(num_samples):
    clients = {0: ClientInfo(5, Payload(tensors(0))), 7: ClientInfo(num_samples, Payload(tensors(7)))}
    with pytest.raises(ConfigError, match="Client 7"):
        Coordinator(Server()).start(clients)


def test_a_federation_of_nobody_is_refused():
    with pytest.raises(ConfigError, match="at least one client"):
        Coordinator(Server()).start({})


# What is counted


def test_the_ledger_counts_both_ways_in_all_and_by_client():
    small, large = Payload({"w": torch.ones(10)}), Payload({"w": torch.ones(1000), "mu": torch.eye(20)}, sparse=["mu"])
    up, down = small.nbytes, large.nbytes
    ledger = Ledger()
    for client in (3, 1, 3):
        ledger.sent_up(client, small)
        ledger.sent_down(client, large)
    assert (ledger.up, ledger.down, ledger.total) == (3 * up, 3 * down, 3 * (up + down))
    assert ledger.elements == 3 * (10 + 1000 + 20)
    assert ledger.clients == {3: [2 * up, 2 * down], 1: [up, down]}
    ledger.new_round()
    ledger.sent_up(1, small)
    assert (ledger.up, ledger.down, ledger.total) == (up, 0, 4 * up + 3 * down)
    assert ledger.clients == {3: [2 * up, 2 * down], 1: [2 * up, down]}
    resumed = Ledger()
    resumed.load_state_dict(ledger.state_dict())
    assert resumed.state_dict() == ledger.state_dict()
    resumed.sent_up(3, small)
    assert ledger.clients[3] == [2 * up, 2 * down]


def test_a_round_counts_encoded_bytes():
    coordinator = started()
    for round in (1, 2):
        replies = play(coordinator, round)
        sizes = {client: len(Payload(upload).to_bytes()) for client, upload in uploads(round).items()}
        ledger = coordinator.ledger
        assert ledger.up == sum(sizes.values())
        assert ledger.down == sum(len(reply.to_bytes()) for reply in replies.values())
        assert ledger.total == round * (ledger.up + ledger.down)
        assert ledger.clients == {k: [round * size, round * len(replies[k].to_bytes())] for k, size in sizes.items()}
    assert coordinator.round == 2


# What comes out


def test_the_model_is_the_mean_weighted_by_samples():
    coordinator = started()
    assert_equal(dict(coordinator.reply(5)), tensors(0))  # the first client's, before the first round
    play(coordinator, 1)
    for client in SAMPLES:
        reply = coordinator.reply(client)
        for name in ("w", "b"):
            np.testing.assert_allclose(reply[name].numpy(), numpy_mean(uploads(1), name), atol=1e-6)
        assert reply["n"] == np.rint(numpy_mean(uploads(1), "n"))
        assert reply["n"].dtype == torch.int64
    coordinator.collect({client: upload for client, upload in uploads(2).items() if client in (3, 8)})
    some = {client: uploads(2)[client] for client in (3, 8)}
    np.testing.assert_allclose(coordinator.reply(0)["w"].numpy(), numpy_mean(some, "w"), atol=1e-6)


def test_a_mixture_is_made_of_the_latest_uploads():
    coordinator = started(Neighbours())
    play(coordinator, 1)
    coordinator.collect({5: uploads(2)[5]})
    latest = {**uploads(1), 5: uploads(2)[5]}
    for client, other in zip(SAMPLES, [*SAMPLES][1:] + [*SAMPLES][:1], strict=True):
        reply = coordinator.reply(client)
        assert set(reply) == {"w", "n"}
        torch.testing.assert_close(reply["w"], (latest[client]["w"] + latest[other]["w"]) / 2)


@pytest.mark.parametrize("server", [Server, Neighbours])
def test_the_result_is_the_same_bit_for_bit_in_whatever_order_uploads_arrive(server):
    results = []
    for order in itertools.permutations(SAMPLES):
        coordinator = started(server())
        coordinator.collect({client: uploads()[client] for client in order})
        results.append({client: dict(coordinator.reply(client)) for client in SAMPLES})
    for result in results[1:]:
        assert_equal(results[0], result)


@pytest.mark.parametrize("server", [Server, Neighbours])
def test_an_upload_that_changes_after_its_round_changes_no_reply(server):
    coordinator, sent = started(server()), uploads()
    coordinator.collect(sent)
    before = coordinator.reply(3).clone()
    for upload in sent.values():
        upload["w"].fill_(7)
    assert_equal(dict(coordinator.reply(3)), dict(before))


@pytest.mark.parametrize("server", [Server, Neighbours])
@pytest.mark.parametrize("rounds", [0, 2])
def test_a_resumed_coordinator_goes_on_as_if_it_had_never_stopped(server, rounds):
    through, stopped = started(server()), started(server())
    for round in range(1, rounds + 1):
        play(through, round)
        play(stopped, round)
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    resumed = started(server())
    resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert_equal(resumed.state_dict(), through.state_dict())
    for coordinator in (through, resumed):
        coordinator.begin_round()
        coordinator.collect({client: uploads(3)[client] for client in (0, 8)})
    assert resumed.round == through.round == rounds + 1
    for client in SAMPLES:
        assert_equal(dict(resumed.reply(client)), dict(through.reply(client)))
    assert_equal(resumed.state_dict(), through.state_dict())


@pytest.mark.parametrize("server", [Server, Neighbours])
def test_a_resumed_server_still_knows_which_tensors_are_sparse(server):
    def sparse(seed):
        return Payload({"mu": torch.arange(500.0) * (torch.arange(500) % 50 == 0) + 0 * seed}, sparse=["mu"])

    first, resumed = Coordinator(server()), Coordinator(server())
    for coordinator in (first, resumed):
        coordinator.start({k: ClientInfo(1, sparse(k)) for k in range(3)})
    first.collect({k: sparse(k) for k in range(3)})
    resumed.load_state_dict(first.state_dict())
    assert resumed.reply(1).nbytes == first.reply(1).nbytes < 400


# weighted_mean


def test_weights_of_zero_leave_even_nan_out():
    bad = Payload({"w": torch.full((3,), torch.nan)})
    good = [Payload({"w": torch.tensor([1.0, 2.0, x])}) for x in (3.0, 5.0)]
    mean = weighted_mean([bad, good[0], bad, good[1]], [0.0, 0.25, 0.0, 0.75])
    assert mean["w"].tolist() == [1.0, 2.0, 4.5]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
def test_a_single_weight_of_one_returns_equal_values_of_its_own(dtype):
    payloads = [Payload({"w": (torch.randn(50) * 9).to(dtype)}) for _ in range(3)]
    mean = weighted_mean(payloads, [0.0, 1.0, 0.0])
    assert mean["w"].dtype == dtype
    assert torch.equal(mean["w"], payloads[1]["w"])
    assert mean["w"].data_ptr() != payloads[1]["w"].data_ptr()


def test_whole_numbers_are_rounded_to_the_nearest():
    payloads = [Payload({"n": torch.tensor(values)}) for values in ([0, 10, -10], [1, 11, -11])]
    assert weighted_mean(payloads, [0.4, 0.6])["n"].tolist() == [1, 11, -11]
    assert weighted_mean(payloads, [0.6, 0.4])["n"].tolist() == [0, 10, -10]


def test_only_the_tensors_asked_for_are_averaged_and_nothing_is_changed():
    payloads = [Payload(tensors(seed), sparse=["w"]) for seed in range(2)]
    mean = weighted_mean(payloads, [0.5, 0.5], names=["w"])
    assert list(mean) == ["w"]
    assert mean.sparse == {"w"}
    for seed, payload in enumerate(payloads):
        assert_equal(dict(payload), tensors(seed))


def test_a_mean_carries_no_gradient():
    payload = Payload({"w": torch.ones(2, requires_grad=True)})
    assert not weighted_mean([payload, payload], [0.5, 0.5])["w"].requires_grad


def test_every_payload_needs_a_weight():
    with pytest.raises(ValueError, match="shorter"):
        weighted_mean([Payload(tensors(0)), Payload(tensors(1))], [1.0])


def test_whole_numbers_are_averaged_exactly():
    assert weighted_mean([Payload({"n": torch.tensor([2**24 + 1])})], [1.0])["n"] == 2**24 + 1


def test_a_quorum_that_is_just_met_is_met():
    """28 of 50 are 56 %, whatever 0.56 * 50 is in floating point."""
    coordinator = Coordinator(Server(), quorum=0.56)
    info = ClientInfo(1, Payload({"w": torch.zeros(2)}))
    coordinator.start(dict.fromkeys(range(50), info))
    bad = {client: {"w": torch.full((2,), torch.nan if client >= 28 else 1.0)} for client in range(50)}
    with pytest.warns(UserWarning, match="Client 28"):
        coordinator.collect(bad)
    torch.testing.assert_close(coordinator.server.model["w"], torch.ones(2))


def test_an_upload_of_somebody_unknown_is_refused():
    coordinator = started()
    with pytest.warns(UserWarning, match="Client 9 has never joined"):
        coordinator.collect({**uploads(), 9: tensors(9)})
    assert coordinator.round == 1


class PlainDicts(Server):
    """Somebody's server, which knows nothing of payloads."""

    def aggregate(self, round, uploads):
        self.model = {name: sum(upload[name] for upload in uploads.values()) for name in self.model}

    def reply(self, client):
        return dict(self.model)


def test_a_server_may_keep_and_reply_plain_dicts():
    coordinator = started(PlainDicts())
    play(coordinator, 1)
    replies = play(coordinator, 2)
    assert_equal(dict(replies[3]), {name: sum(sent[name] for sent in uploads(1).values()) for name in tensors(0)})
    assert coordinator.ledger.down == len(SAMPLES) * Payload(tensors(0)).nbytes
    resumed = started(PlainDicts())
    resumed.load_state_dict(coordinator.state_dict())
    assert_equal(dict(resumed.reply(0)), dict(coordinator.reply(0)))


class Forgets(Server):
    def reply(self, client):
        pass


def test_a_reply_of_nothing_is_named():
    with pytest.raises(ConfigError, match=r"Forgets.reply\(0\) returns a NoneType; it must be .* tensors by name"):
        started(Forgets()).reply(0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_a_tensor_that_cannot_travel_is_named_before_the_first_round(dtype):
    initial = Payload({"w": torch.zeros(2), "phase": torch.zeros(2, dtype=dtype)})
    with pytest.raises(ConfigError, match=f"Client 4: tensor 'phase' is {dtype}, which a payload does not hold"):
        Coordinator(Server()).start({4: ClientInfo(10, initial)})


def test_a_tensor_that_no_upload_may_hold_is_named_before_the_first_round():
    mask = torch.full((3, 3), -torch.inf).triu(1)
    initial = Payload({"w": torch.zeros(2), "mask": mask})
    with pytest.raises(ConfigError, match=r"Client 4: tensor 'mask' holds NaN .* persistent=False.*share=") as error:
        Coordinator(Server()).start({4: ClientInfo(10, initial)})
    assert "\n" not in str(error.value)
    Coordinator(Neighbours()).start({4: ClientInfo(10, Payload({"w": torch.zeros(2), "b": mask}))})  # not averaged


def test_a_state_that_is_taken_over_leaves_nothing_of_the_run_before():
    one, other = started(quorum=0.0), started(quorum=0.0)
    play(one, 1)
    with pytest.warns(UserWarning, match="Client 0"):
        play(other, 1, refuse=(0,))
    other.begin_round()
    other.load_state_dict(one.state_dict())
    assert not other.refusals
    assert not other.under_way
    asynchronous = started()
    asynchronous.in_training = InTraining(FedBuff(1))
    asynchronous.load_state_dict(one.state_dict())  # of a run that waits for all, to be scored
    assert asynchronous.round == 1
    started().load_state_dict(asynchronous.state_dict())  # and the other way round


@pytest.mark.seconds
@pytest.mark.parametrize("method", [APPLE, FedFOMO])
def test_an_update_is_measured_from_the_own_model_that_is_not_sent_again(method):
    federation = run(made(method), rounds=2)
    for k, member in federation.clients.items():
        upload = member.upload()
        update = update_of(upload, federation.coordinator.center(k, upload))
        assert all(update[name].count_nonzero() == 0 for name in federation.coordinator.server.model)
