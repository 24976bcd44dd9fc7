"""What holds for every method, whoever writes it."""

import copy
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor

from lit_pfl.core import Client
from lit_pfl.core.coordinator import Coordinator
from lit_pfl.core.ledger import Ledger
from lit_pfl.core.payload import Payload
from lit_pfl.core.sharing import is_reserved
from lit_pfl.engines import Local
from lit_pfl.errors import ConfigError, UploadError
from lit_pfl.federation import Federation
from lit_pfl.lightning_internals import AtomicCheckpointIO
from lit_pfl.testing.method_tester import (
    BackToFront,
    GroupNet,
    MethodTester,
    PlainNet,
    assert_equal,
    can_build,
    trainer,
    weights,
)
from lit_pfl.testing.second_device import servers_elsewhere


def check_method(make: Callable[..., Client]) -> None:
    """See that a method keeps every rule that this library's own methods keep; it takes some seconds.

    Resumed it is the same run, whatever the order of clients; nobody who does not take part changes; uploads and
    replies change nothing, and are counted to the byte; heads are kept local where labels differ; bad uploads and
    clients that diverge do no harm; and more: :data:`METHOD_CHECKS` has them all.

    Args:
        make: the method's class, or anything else that makes its prototype from options of a
            :class:`~lit_pfl.Client`, such as ``backbone``: ``functools.partial(MyMethod, strength=0.1)``.

    Raises:
        AssertionError: at the first rule that is broken; a note says which.

    Example::

        def test_my_method():
            check_method(MyMethod)
    """
    tester = MethodTester(make)
    for check in METHOD_CHECKS:
        try:
            check(tester)
        except Exception as error:
            error.add_note(f"(in lit_pfl.testing: {check.__name__.replace('_', ' ')}) {check.__doc__}")
            raise


def two_rounds_are_logged(tester: MethodTester) -> None:
    """A round logs the loss, the scores and the traffic."""
    federation = tester.run()
    logged = federation.trainer.callback_metrics
    expected = {"round", "train/loss", "val/acc", "val/acc_std", "val/acc_worst10", "test/acc", "comm/up_bytes",
                "comm/down_bytes", "comm/total_bytes"}  # fmt: skip
    assert expected <= set(logged), f"not logged: {expected - set(logged)}"
    assert logged["round"] == 2, f"two rounds log round={logged['round']}"
    assert logged["train/loss"] > 0, f"train/loss is {logged['train/loss']}"
    assert all(0 <= logged[name] <= 1 for name in ("val/acc", "test/acc")), "an accuracy is not between 0 and 1"


def resumed_equals_uninterrupted(tester: MethodTester) -> None:
    """What a client keeps is made in ``configure_state``, and what a server keeps is named in ``kept``."""
    with tempfile.TemporaryDirectory() as folder:
        whole_folder, parts = Path(folder) / "whole", Path(folder) / "parts"
        whole = tester.run_saved(whole_folder, 4)
        tester.run_saved(parts, 2)
        resumed = tester.run_saved(parts, 4, resume=True)
        assert_equal(weights(resumed), weights(whole), "weights")
        assert_equal(resumed.traffic.state_dict(), whole.traffic.state_dict(), "traffic")
        assert resumed.rows == whole.rows, "scores differ"
        one, other = (
            AtomicCheckpointIO().load_checkpoint(path / "last.ckpt")["federation"]["coordinator"]
            for path in (whole_folder, parts)
        )
        assert_equal(other, one, "server")


def servers_work_on_the_clients_device_also_after_a_resume(tester: MethodTester) -> None:
    """There, where the CPU's tensors do not mix with the clients', everything comes out as on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        expected = weights(tester.run_saved(Path(folder) / "here", 4))
        with servers_elsewhere():
            tester.run_saved(Path(folder) / "there", 2)
            assert_equal(weights(tester.run_saved(Path(folder) / "there", 4, resume=True)), expected, "weights")


def the_order_of_clients_does_not_matter(tester: MethodTester) -> None:
    """Clients that train in the opposite order come to the same; a server clones what it keeps of an upload."""
    forwards, backwards = (tester.run(rounds=3, kind=kind) for kind in (Federation, BackToFront))
    assert_equal(weights(backwards), weights(forwards), "weights")
    assert_equal(backwards.traffic.state_dict(), forwards.traffic.state_dict(), "traffic")


def clients_that_do_not_take_part_stay_as_they_are(tester: MethodTester) -> None:
    """A round changes its participants only."""
    seen: list[dict[int, dict[str, Tensor]]] = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            seen.append(weights(pl_module))

    federation = Federation(tester.method(), seed=3, threads=1, participation=2, local_epochs=2)
    trainer(4, callbacks=[Watch()]).fit(federation, datamodule=tester.digits(4))
    for completed in range(1, 4):
        absent = federation.clients.keys() - set(federation.participants(completed))
        assert len(absent) == 2
        for client in absent:
            assert_equal(seen[completed][client], seen[completed - 1][client], f"client {client}, who did not train")


def clients_that_sleep_come_to_the_same(tester: MethodTester) -> None:
    """With one client in memory, and without what replies replace if the method can do without."""
    options: dict[str, Any] = {"data": tester.digits(4), "rounds": 4, "participation": 2, "evaluate": "after"}
    whole = tester.run(**options)
    try:
        one = tester.run(**options, engine=Local(awake=1), keep_trained=False)
    except ConfigError as error:
        if not str(error).startswith("federation.keep_trained=False: client "):
            raise
        one = tester.run(**options, engine=Local(awake=1))
    assert one.rows == whole.rows, "scores differ"
    assert_equal(one.coordinator.state_dict(), whole.coordinator.state_dict(), "server")


def uploads_and_replies_change_nothing(tester: MethodTester) -> None:
    """However often they are asked for, they are the same, and all else is as it was."""
    federation = tester.run()
    for client, module in federation.clients.items():
        state, drawn = weights(federation), torch.get_rng_state()
        first, again = ({name: t.clone() for name, t in module.upload().items()} for _ in range(2))
        assert_equal(again, first, f"client {client}: a second upload")
        assert_equal(weights(federation), state, "after uploads, the state of client")
        server = federation.coordinator.server
        first, again = ({name: t.clone() for name, t in server.reply(client).items()} for _ in range(2))
        assert_equal(again, first, f"a second reply to client {client}")
        assert torch.equal(torch.get_rng_state(), drawn), "uploads and replies draw from PyTorch's random numbers"


def clients_that_join_after_the_training_are_scored(tester: MethodTester) -> None:
    """As they join and after a round of training, without a change of anything else; or the method says it cannot."""
    try:
        federation = tester.run(tester.digits(4, new_clients=[1]))
    except ConfigError as error:
        if not str(error).startswith("data.new_clients: "):
            raise
        return
    new = [row for row in federation.other_rows if row.split == "new"]
    assert {(row.client, row.state) for row in new} == {(1, "aggregated"), (1, "trained")}
    assert {row.client for row in federation.rows} == {0, 2, 3} == {*federation.clients}
    before = copy.deepcopy(federation.coordinator.state_dict())
    federation.scores.evaluate_new(federation.data)
    assert_equal(federation.coordinator.state_dict(), before, "server")
    assert [row for row in federation.other_rows if row.split == "new"] == [*new, *new], "scores differ"


def further_parameters_are_trained(tester: MethodTester) -> None:
    """A parameter that a method adds is in ``extra``, whose parameters an optimizer has; what nothing trains is a
    buffer."""
    client = tester.run(rounds=1).clients[0]
    groups = [group for optimizer in client.trainer.optimizers for group in optimizer.param_groups]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    added = {name: p for name, p in client.named_parameters() if name.split(".")[0] not in client.learners}
    left = sorted(name for name, p in added.items() if p.requires_grad and id(p) not in trained)
    assert not left, f"no optimizer has {left}"


def a_single_client_is_a_federation(tester: MethodTester) -> None:
    """One client trains and is scored."""
    federation = tester.run(tester.digits(1), rounds=3)
    assert len(federation.rows) == len(federation.clients[0].evaluated)


def a_single_batch_is_an_epoch(tester: MethodTester) -> None:
    """Clients train on all they have at once."""
    federation = tester.run(tester.digits(batch_size=10_000))
    assert all(len(client.training_data()) == 1 for client in federation.clients.values())


def bytes_are_those_of_the_encoded_payloads(tester: MethodTester) -> None:
    """What is counted is what would be sent, and what arrives is what was sent."""
    sent: dict[str, list[int]] = {"sent_up": [], "sent_down": []}

    def watched(direction: str) -> Any:
        count = getattr(Ledger, direction)

        def counted(self: Ledger, client: int, payload: Payload) -> None:
            data = payload.to_bytes()
            sent[direction].append(len(data))
            assert_equal(dict(Payload.from_bytes(data)), dict(payload), "decoded")
            count(self, client, payload)

        return counted

    with patch.multiple(Ledger, **{direction: watched(direction) for direction in sent}):
        federation = tester.run(rounds=3)
    assert len(sent["sent_up"]) == len(sent["sent_down"]) == 9
    total = sum(sent["sent_up"]) + sum(sent["sent_down"])
    assert federation.traffic.total == total, f"{federation.traffic.total} bytes are counted, {total} are sent"


def what_else_is_sent_has_a_reserved_name(tester: MethodTester) -> None:
    """What is sent next to the learner's tensors has a name in ``reserved``, which no learner's tensor can have."""
    federation = tester.run(tester.digits(permute_labels=False))
    for client, module in federation.clients.items():
        sent = {*module.initial(), *module.upload(), *federation.coordinator.server.reply(client)}
        more = (name for name in sent - module.learner.state_dict().keys() if "/" not in name)  # no attribute has one
        left = sorted(name for name in more if not any(is_reserved(name, taken) for taken in module.all_reserved()))
        assert not left, f"is sent, and not in `reserved`: {left}"


def heads_are_kept_local_where_labels_differ(tester: MethodTester) -> None:
    """No upload and no reply holds anything of a head whose labels mean something else elsewhere."""
    if tester.method().needs_common_labels:
        try:
            tester.run(tester.digits(permute_labels=True))
        except ConfigError:
            return
        raise AssertionError("needs_common_labels is set, and data whose labels differ are not refused")
    federation = tester.run()
    payloads = [c.upload() for c in federation.clients.values()]
    payloads += [federation.coordinator.server.reply(client) for client in federation.clients]
    heads = sorted({name for payload in payloads for name in payload if ".head." in name})
    assert not heads, f"is sent although labels differ: {heads}"
    one, other, *_ = (list(c.backbone.head.parameters()) for c in federation.clients.values())  # type: ignore[union-attr]
    trained = [(a, b) for a, b in zip(one, other, strict=True) if a.requires_grad]
    assert not trained or any(not torch.equal(a, b) for a, b in trained), (
        "two clients have the same head after training, although labels differ"
    )


def heads_may_be_sent_where_labels_agree(tester: MethodTester) -> None:
    """Where labels mean the same everywhere, it trains too, and a global model is scored if there is one."""
    method = tester.method(norm_stats="averaged")  # else the global model would lack running statistics
    assert_finite(tester.run(tester.digits(permute_labels=False), method=method))


def a_bad_upload_is_refused_and_the_round_goes_on(tester: MethodTester) -> None:
    """An upload of NaN reaches nobody."""
    collect = Coordinator.collect
    expected: list[int] = []
    refused: list[int] = []

    def poisoned(self: Coordinator, uploads: Any) -> None:
        errors = [upload for upload in uploads.values() if isinstance(upload, UploadError)]
        assert not errors, f"an upload is refused that nobody has spoilt: {errors[0]}"
        floating = {name: torch.full_like(t, torch.nan) for name, t in uploads[1].items() if t.is_floating_point()}
        collect(self, {**uploads, 1: Payload({**uploads[1], **floating})} if floating else uploads)
        expected.append(1 if floating else 0)
        refused.append(len(self.refused))

    with patch.object(Coordinator, "collect", poisoned), warnings.catch_warnings(record=True):
        federation = tester.run(tester.digits(permute_labels=False), rounds=3)
    assert refused == expected, f"uploads refused in three rounds: {refused}"
    assert_finite(federation)


def a_client_that_runs_away_begins_again_from_its_last_good_state(tester: MethodTester) -> None:
    """A round in which a client's loss is NaN continues without it, and leaves nothing of it."""
    method = tester.method()
    objective = type(method).objective

    def spoilt(self: Client, batch: Any, batch_idx: int) -> Tensor:
        bad = self.spec.client_id == 1 and self.completed_rounds == 1 and self.current_epoch % 2 == 0
        return objective(self, batch, batch_idx) * (float("nan") if bad else 1.0)

    with (
        patch.object(type(method), "objective", spoilt),
        warned(r"Round 2 continues .*Client 1: .*The client begins"),
    ):
        federation = tester.run(method=method, rounds=4)
    assert not federation.coordinator.refused, "an upload is still refused after the client has begun again"
    assert_finite(federation)


def what_a_trainer_offers_works(tester: MethodTester) -> None:
    """Gradient clipping and mixed precision."""
    assert_finite(tester.run(client_trainer={"gradient_clip_val": 0.5}))
    assert_finite(tester.run(client_trainer={"precision": "bf16-mixed"}))


def scoring_after_aggregation_changes_nothing(tester: MethodTester) -> None:
    """A run is the same in whichever state its clients are scored, the absent ones too."""
    before, after = (tester.run(rounds=3, participation=2, evaluate=state) for state in ("before", "after"))
    assert_equal(weights(after), weights(before), "weights")
    assert_equal(after.coordinator.state_dict(), before.coordinator.state_dict(), "server")


def other_networks_work_or_are_refused(tester: MethodTester) -> None:
    """A network without batch norm, and a plain chain: it trains, or says what is in its way."""
    for backbone in (GroupNet, PlainNet):
        method = tester.method(backbone=backbone)
        if can_build(method):
            assert tester.run(method=method).rows


def running_statistics_may_be_averaged(tester: MethodTester) -> None:
    """With ``norm_stats="averaged"``."""
    assert_finite(tester.run(method=tester.method(norm_stats="averaged"), rounds=3))


def schedules_work(tester: MethodTester) -> None:
    """With a learning rate that halves every epoch."""

    def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    assert_finite(tester.run(method=tester.method(scheduler=halving)))


def assert_finite(federation: Federation) -> None:
    """See that no client, upload or reply holds NaN or infinity."""
    for client, module in federation.clients.items():
        reply = federation.coordinator.server.reply(client)
        for tensors in (module.state_dict(), module.upload(), reply):
            for name, tensor in tensors.items():
                assert tensor.isfinite().all(), f"client {client}: {name!r} holds NaN or infinity"


@contextmanager
def warned(pattern: str) -> Iterator[None]:
    """See that there is a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert any(re.search(pattern, str(w.message)) for w in caught), f"no warning like {pattern!r}"


#: every rule, as a function of a :class:`MethodTester` that raises an AssertionError
METHOD_CHECKS: tuple[Callable[[MethodTester], None], ...] = (
    two_rounds_are_logged,
    resumed_equals_uninterrupted,
    servers_work_on_the_clients_device_also_after_a_resume,
    the_order_of_clients_does_not_matter,
    clients_that_do_not_take_part_stay_as_they_are,
    clients_that_sleep_come_to_the_same,
    uploads_and_replies_change_nothing,
    clients_that_join_after_the_training_are_scored,
    further_parameters_are_trained,
    a_single_client_is_a_federation,
    a_single_batch_is_an_epoch,
    bytes_are_those_of_the_encoded_payloads,
    what_else_is_sent_has_a_reserved_name,
    heads_are_kept_local_where_labels_differ,
    heads_may_be_sent_where_labels_agree,
    a_bad_upload_is_refused_and_the_round_goes_on,
    a_client_that_runs_away_begins_again_from_its_last_good_state,
    what_a_trainer_offers_works,
    scoring_after_aggregation_changes_nothing,
    other_networks_work_or_are_refused,
    running_statistics_may_be_averaged,
    schedules_work,
)
