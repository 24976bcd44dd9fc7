"""The callback alone, with modules that know nothing of lit_pfl."""

import copy
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from lit_pfl.errors import ConfigError
from lit_pfl.links import LocalHub
from lit_pfl_callbacks import FederatedLoop
from lit_pfl_callbacks.resumed_draws import ResumedDraws

SIZES, ROUNDS, EPOCHS, LR = (300, 200, 150, 100), 3, 2, 0.1


class PlainModule(L.LightningModule):
    """Somebody's own module."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)


class CountsEpochs(L.Callback):
    """Somebody's own callback."""

    def __init__(self):
        self.epochs = 0

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs += 1


def loaders():
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    parts = torch.arange(sum(SIZES)).split(SIZES)
    return [
        DataLoader(TensorDataset(x[i], y[i]), 32, shuffle=True, generator=torch.Generator().manual_seed(k))
        for k, i in enumerate(parts)
    ]


def modules():
    torch.manual_seed(0)
    first = PlainModule()
    return [copy.deepcopy(first) for _ in SIZES]


def reference():
    """FedAvg in plain PyTorch: parameters travel, running statistics and momentum stay."""
    nets = [module.net for module in modules()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9) for net in nets]
    batches = loaders()
    for _ in range(ROUNDS):
        for net, optimizer, loader in zip(nets, optimizers, batches, strict=True):
            for _ in range(EPOCHS):
                for x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(net(x), y).backward()
                    optimizer.step()
        with torch.no_grad():
            for same in zip(*[net.parameters() for net in nets], strict=True):
                mean = same[0] * (SIZES[0] / sum(SIZES))
                for parameter, size in zip(same[1:], SIZES[1:], strict=True):
                    mean = mean + parameter * (size / sum(SIZES))
                for parameter in same:
                    parameter.copy_(mean)
    return nets


def quiet_trainer(*callbacks, **options):
    return L.Trainer(
        callbacks=list(callbacks), accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def test_four_trainers_of_plain_modules_compute_fedavg_exactly():
    hub, counters, federated = LocalHub(), [CountsEpochs() for _ in SIZES], modules()
    for client, (module, loader) in enumerate(zip(federated, loaders(), strict=True)):
        loop = FederatedLoop(hub.link, every_n_epochs=EPOCHS)
        trainer = quiet_trainer(counters[client], loop, max_epochs=ROUNDS * EPOCHS)
        hub.add(client, lambda t=trainer, m=module, x=loader: t.fit(m, x))
    coordinator = hub.run()

    for module, net in zip(federated, reference(), strict=True):
        for (name, ours), expected in zip(module.net.state_dict().items(), net.state_dict().values(), strict=True):
            assert torch.equal(ours, expected), name
    assert [counter.epochs for counter in counters] == [ROUNDS * EPOCHS] * 4
    assert coordinator.round == ROUNDS
    assert not torch.equal(federated[0].net[1].running_mean, federated[1].net[1].running_mean)


def test_modules_start_from_the_first_client_s_weights():
    hub, different = LocalHub(), [PlainModule(), PlainModule()]
    start = copy.deepcopy(different[0].net[0].weight)
    for client, module in enumerate(different):
        trainer = quiet_trainer(FederatedLoop(hub.link), max_epochs=1, limit_train_batches=1)
        module.configure_optimizers = lambda m=module: torch.optim.SGD(m.parameters(), lr=0.0)
        hub.add(client, lambda t=trainer, m=module, x=loaders()[client]: t.fit(m, x))
    hub.run()
    for module in different:
        torch.testing.assert_close(module.net[0].weight, start)


def test_share_by_name_keeps_the_head_at_home():
    hub, federated = LocalHub(), modules()
    for client, module in enumerate(federated):
        trainer = quiet_trainer(FederatedLoop(hub.link, share=r"^net\.0\."), max_epochs=2)
        hub.add(client, lambda t=trainer, m=module, x=loaders()[client]: t.fit(m, x))
    hub.run()
    assert torch.equal(federated[0].net[0].weight, federated[3].net[0].weight)
    assert not torch.equal(federated[0].net[3].weight, federated[3].net[3].weight)


class Ends:
    """A link that ends the fit at the second exchange."""

    def __init__(self):
        self.exchanged = 0

    def join(self, info):
        self.info = info
        return info.tensors

    def exchange(self, upload):
        self.exchanged += 1
        return upload if self.exchanged < 2 else None


def test_what_one_site_keeps_at_home_stays_also_where_others_share_it():
    hub, modules = LocalHub(), [PlainModule() for _ in range(2)]
    for site, share in enumerate(["", "^net.0"]):
        fit = quiet_trainer(FederatedLoop(hub.link, share=share), max_epochs=1).fit
        hub.add(site, partial(fit, modules[site], loaders()[site]))
    before = copy.deepcopy(modules[1].net[3])
    hub.run()
    assert torch.equal(modules[0].net[0].weight, modules[1].net[0].weight)
    assert not torch.equal(modules[0].net[3].weight, modules[1].net[3].weight)
    assert not torch.equal(before.weight, modules[1].net[3].weight)  # it has been trained


def test_a_reply_of_none_ends_the_fit_and_the_link_hears_of_the_samples():
    link, told = Ends(), []
    loop = FederatedLoop(link, every_n_epochs=3)
    loop.watchers.append(lambda transfer: told.append((transfer.round, transfer.direction)))
    trainer = quiet_trainer(loop, max_epochs=-1)
    trainer.fit(PlainModule(), loaders()[3])
    assert (trainer.current_epoch, link.exchanged, link.info.num_samples) == (6, 2, 100)
    assert told == [(1, "down"), (1, "up"), (2, "down"), (2, "up")]


class Never(Ends):
    """A link at which a client's turn never comes."""

    def join(self, info):
        return None


@pytest.mark.parametrize("least", [{"min_epochs": 5}, {"min_steps": 20}])
@pytest.mark.parametrize(("link", "epochs"), [(Never(), 0), (Ends(), 2)])
def test_a_reply_of_none_ends_the_fit_whatever_its_least_length(least, link, epochs):
    link.exchanged = 0
    trainer = quiet_trainer(FederatedLoop(link), max_epochs=8, **least)
    trainer.fit(PlainModule(), loaders()[3])
    assert (trainer.current_epoch, link.exchanged) == (epochs, epochs)


class Again(Ends):
    """A link that sends back what it gets."""

    def exchange(self, upload):
        return upload


class Answers(Ends):
    def __init__(self, reply):
        super().__init__()
        self.reply = reply

    def exchange(self, upload):
        return self.reply


@pytest.mark.parametrize(
    ("options", "link", "message"),
    [
        ({"every_n_epochs": 0}, Ends(), "every_n_epochs=0"),
        ({"share": "nothing"}, Ends(), "picks no tensor of PlainModule"),
        ({}, Answers({"net.9.weight": torch.zeros(1)}), "'net.9.weight', which PlainModule does not have"),
        ({}, Answers({"net.0.bias": torch.zeros(2)}), r"'net.0.bias' has shape \(2,\); PlainModule needs \(16,\)"),
    ],
)
def test_what_does_not_fit_is_named(options, link, message):
    with pytest.raises(MisconfigurationException, match=message):
        quiet_trainer(FederatedLoop(link, **options), max_epochs=1).fit(PlainModule(), loaders()[3])


def test_a_lazy_layer_is_named_until_it_has_seen_a_batch():
    module = PlainModule()
    module.net[3] = nn.LazyLinear(10)
    hub = LocalHub()
    hub.add(0, lambda: quiet_trainer(FederatedLoop(hub.link), max_epochs=1).fit(module, loaders()[3]))
    with pytest.raises(MisconfigurationException, match=r"'net.3.weight' of PlainModule .* run one batch") as error:
        hub.run()
    assert "\n" not in str(error.value)
    module.net(torch.zeros(2, 64))
    hub.add(0, lambda: quiet_trainer(FederatedLoop(hub.link), max_epochs=1).fit(module, loaders()[3]))
    assert hub.run().round == 1


def test_a_resume_that_failed_at_its_start_leaves_no_draws_to_later_fits():
    draws, strategy = ResumedDraws(), (fitting := quiet_trainer()).strategy
    draws.keep(None)
    saved = draws.state_dict()["random"]
    torch.manual_seed(5)
    expected = torch.get_rng_state()
    for resumes in (True, False):
        draws.load(saved)
        draws.after_reply(fitting)
        draws.load(saved.copy())  # the next one, which resumes too
        if resumes:
            draws.after_reply(fitting)
        else:
            draws.forget()
        torch.manual_seed(5)
        strategy.on_train_start()
        assert torch.equal(torch.get_rng_state(), saved["after"]["torch"] if resumes else expected)
        assert "on_train_start" not in vars(strategy)


def test_an_unknown_number_of_samples_is_asked_for():

    class Batches:
        def __iter__(self):
            yield torch.rand(4, 64), torch.zeros(4, dtype=torch.long)

    batches = Batches()
    for loader in (batches, DataLoader(loaders()[0])):  # which has a length, of batches
        with pytest.raises(MisconfigurationException, match=r"FederatedLoop\(num_samples=...\)"):
            quiet_trainer(FederatedLoop(Ends()), max_epochs=1).fit(PlainModule(), loader)
    link = Ends()
    chosen = DataLoader(
        TensorDataset(torch.rand(30, 64), torch.zeros(30).long()), 5, sampler=SubsetRandomSampler(range(5))
    )
    quiet_trainer(FederatedLoop(link), max_epochs=1).fit(PlainModule(), chosen)
    assert link.info.num_samples == 5
    quiet_trainer(FederatedLoop(link, num_samples=7), max_epochs=1).fit(PlainModule(), batches)
    assert link.info.num_samples == 7


def test_samples_of_a_subset_are_counted_also_where_several_processes_share_them():
    """There Lightning puts a sampler of its own around the loader's."""
    subset, data = SubsetRandomSampler(range(3)), TensorDataset(torch.zeros(8, 1))
    for sampler in (subset, DistributedSamplerWrapper(subset, num_replicas=2, rank=0)):
        site = SimpleNamespace(train_dataloader=DataLoader(data, sampler=sampler))
        assert FederatedLoop(Ends())._count_samples(site) == 3


def test_a_local_link_outside_a_hub_says_so():
    with pytest.raises(RuntimeError, match="LocalHub.add"):
        quiet_trainer(FederatedLoop(LocalHub().link), max_epochs=1).fit(PlainModule(), loaders()[3])


def test_a_checkpoint_of_the_middle_of_a_round_is_refused(tmp_path):
    """The reply of the round would undo the epochs that were trained in it, and fewer would be trained."""

    def fit(epochs, **options):
        hub, module = LocalHub(), modules()[0]
        loop = FederatedLoop(hub.link, every_n_epochs=2)
        saves = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        trainer = L.Trainer(
            max_epochs=epochs, callbacks=[loop, saves], accelerator="cpu", logger=False, enable_progress_bar=False
        )
        hub.add(0, lambda: trainer.fit(module, loaders()[0], **options))
        hub.run()

    fit(4)
    with pytest.raises(
        MisconfigurationException, match=r"middle of a round, after epoch 3, .* saved 1 epoch earlier\."
    ):
        fit(6, ckpt_path=tmp_path / "epoch=2.ckpt")
    fit(6, ckpt_path=tmp_path / "epoch=3.ckpt")


def test_a_fit_that_ends_in_the_middle_of_a_round_says_so():
    hub, module = LocalHub(), modules()[0]
    trainer = quiet_trainer(FederatedLoop(hub.link, every_n_epochs=2), max_epochs=3)
    hub.add(0, lambda: trainer.fit(module, loaders()[0]))
    with pytest.warns(UserWarning, match=r"ends in the middle of a round; what was trained in 1 epoch is not uploaded"):
        hub.run()


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"every_n_train_steps": 2}, ["epoch=0-step=2", "epoch=0-step=4", "epoch=1-step=6", "epoch=1-step=8"]),
        ({"save_on_train_epoch_end": False, "every_n_epochs": 1}, ["epoch=0-step=4", "epoch=1-step=8"]),
        ({"save_on_train_epoch_end": True}, []),
    ],
)
def test_a_checkpoint_from_before_an_epoch_s_end_is_refused(tmp_path, options, refused):
    """Where rounds are single epochs too, the reply would undo what was trained, and be uploaded as it came."""

    class Validated(PlainModule):
        def validation_step(self, batch, batch_idx):
            pass

    def fit(epochs, *callbacks, **options):
        trainer = L.Trainer(
            max_epochs=epochs, callbacks=[FederatedLoop(Again()), *callbacks], accelerator="cpu", logger=False,
            enable_progress_bar=False, limit_train_batches=4, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(Validated(), loaders()[3], loaders()[3], **options)

    fit(2, ModelCheckpoint(tmp_path / "saved", filename="{epoch}-{step}", save_top_k=-1, **options))
    for path in sorted((tmp_path / "saved").iterdir()):
        if path.stem in refused:
            with pytest.raises(MisconfigurationException, match=r"before its epoch had ended.*save_on_train_epoch_end"):
                fit(3, ckpt_path=path)
        else:
            fit(3, ckpt_path=path)
    assert not refused or sorted(path.stem for path in (tmp_path / "saved").iterdir()) == refused


@pytest.mark.parametrize("why", ["no batch", "no epoch", "no callback"])
def test_a_fit_that_never_joins_is_named(why):
    hub = LocalHub()
    short = DataLoader(TensorDataset(torch.zeros(5, 64), torch.zeros(5, dtype=torch.int64)), 8, drop_last=True)

    def fit(client):
        broken = client == 1
        loops = [] if broken and why == "no callback" else [FederatedLoop(hub.link)]
        trainer = quiet_trainer(*loops, max_epochs=0 if broken and why == "no epoch" else 1)
        trainer.fit(PlainModule(), short if broken and why == "no batch" else loaders()[3])

    for client in range(2):
        hub.add(client, lambda client=client: fit(client))
    with pytest.raises(ConfigError, match="Client 1: its fit ended before it had joined. .*drop_last=True") as error:
        hub.run()
    assert "\n" not in str(error.value)
