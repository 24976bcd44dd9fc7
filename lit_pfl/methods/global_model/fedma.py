"""FedMA: layers are averaged one after another, their units matched."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_pfl.core import Client, ClientSpec
from lit_pfl.core.payload import Payload
from lit_pfl.core.server import ClientInfo, Server
from lit_pfl.data.batches import labels_in
from lit_pfl.data.loaders import labels_of, needed
from lit_pfl.errors import ConfigError
from lit_pfl.learners import BackboneCallable, OptimizerCallable
from lit_pfl.models import VGG9, Backbone
from lit_pfl.nn import CHANNELWISE, Memory
from lit_pfl.ops import Matching, gather_inputs, match_units, merge_units, nearest_units, spread_inputs, unit_matrix
from lit_pfl_callbacks.random_state import torch_state_kept

Layout = dict[str, tuple[torch.Size, torch.dtype]]


class FedMA(Client):
    """Layer by layer, from the first, the server matches the clients' units and averages those that match.

    A round of the federation is a sub-round of FedMA: it deals with one of the network's L layers, so L rounds are one
    of FedMA's communication rounds. In the sub-round of layer l a client trains layers l to L for
    ``federation.local_epochs`` epochs and uploads layer l. It gets back the global layer and which units of it are its
    own, takes that layer instead of its own, rearranges the input side of the layer after it, zero for units it had
    not, and from then on leaves it as it is. The last layer is averaged class by class, by how many training samples of
    the class each client has; where heads are kept local it is only trained, and nothing is uploaded. Then every client
    cuts a network of its original size out of the global one, trains all of it, and it starts over. In between a
    client's network is as wide as the global layers it has. With ``federation.evaluate=after`` and a multiple of L
    rounds the global network is evaluated.

    Unlike in other methods, clients start from initial weights of their own. The optimizer forgets its momentum in
    every sub-round, since it gets other weights; a learning rate schedule continues.

    A client that was not sampled, or whose upload was refused, gets all layers of this communication round that it
    lacks at once when it comes again, and matches its own units to them itself, at the least distance.

    Args:
        matching: how units are matched.
        backbone: a plain chain of convolutions and linear layers without normalization, such as ``VGG9`` (the paper's),
            ``CNN`` or ``MLP``.
        optimizer: see :class:`~lit_pfl.Client`; the paper's by default.
        kwargs: see :class:`~lit_pfl.Client`; ``factorization`` and ``reset_optimizer`` are not for this method.

    Raises:
        ConfigError: for a backbone that is not such a chain, and when a ``factorization`` is given.

    Source:
        Wang et al. 2020, Algorithm 1 and Section 3, "FedMA with communication".
    """

    needs_automatic = "freezes and grows layers between rounds of training"
    needs_dense = "matches the units of dense layers"
    may_unfreeze = False

    shares = frozenset({"body", "head"})
    reserved = ("step", ".assignment")
    resizes = True

    # layers that the server had done at its latest reply: from then on the first step % L of the client's are global
    step: Tensor
    # of every layer but the last: which of the units that there are now each of the client's own is
    assignments: Memory

    def __init__(
        self,
        matching: Matching = Matching(),
        backbone: BackboneCallable = lambda channels, classes: VGG9(channels, classes),
        optimizer: OptimizerCallable = lambda parameters: torch.optim.SGD(
            parameters, lr=0.01, momentum=0.9, weight_decay=1e-4
        ),
        **kwargs: Any,
    ) -> None:
        super().__init__(backbone=backbone, optimizer=optimizer, reset_optimizer=True, **kwargs)
        if self.local is not None:
            raise ConfigError("model.local: FedMA matches the units of whole layers; leave it out.")
        self.matching = matching

    def configure(self, spec: ClientSpec, alone: bool = False) -> None:
        given = self.learner is not None
        common = int(torch.randint(2**31, ()))  # the same for all clients
        with torch_state_kept():
            torch.manual_seed(int(np.random.default_rng([common, spec.client_id]).integers(2**63)))
            if given:
                for layer in self.learner.modules():
                    if isinstance(layer, nn.Conv2d | nn.Linear):
                        layer.reset_parameters()
            super().configure(spec, alone)

    def configure_learner(self) -> None:
        self.layers = chain(self.learner)

    def configure_state(self) -> None:
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.assignments = Memory({name: torch.arange(len(layer.weight)) for name, layer in self.layers[:-1]})

    @property
    def shares_last(self) -> bool:
        """Whether the last layer is averaged."""
        return self.is_shared(f"{self.layers[-1][0]}.weight", "head")

    def configure_server(self) -> "FedMAServer":
        layouts = {
            name: {leaf: (tensor.shape, tensor.dtype) for leaf, tensor in layer.named_parameters()}
            for name, layer in self.layers
        }
        return FedMAServer(layouts, self.shares_last, self.matching, seed=int(torch.randint(2**31, ())))

    def initial(self) -> Payload:
        """Return what is sent on joining, if samples have the classes that the last layer is averaged by."""
        if self.data is not None and self.shares_last:
            with needed(
                f"Client {self.spec.client_id}", "FedMA averages the last layer by numbers of samples of classes"
            ):
                labels_in(self.data.example)
        return super().initial()

    def begin_round(self) -> None:
        done = int(self.step) % len(self.layers)
        if done == 0:
            self.cut()
        for index, (_, layer) in enumerate(self.layers):
            layer.requires_grad_(index >= done)

    def upload(self) -> Payload:
        """Return the layer of this sub-round; with the last one go numbers of training samples by class."""
        index = int(self.step) % len(self.layers)
        name, layer = self.layers[index]
        tensors, last = {"step": self.step}, index == len(self.layers) - 1
        if not last or self.shares_last:
            tensors |= {f"{name}.{leaf}": tensor.detach() for leaf, tensor in layer.named_parameters()}
        if last and self.shares_last:
            tensors["class_counts"] = self._class_counts()
        return Payload(tensors)

    def _class_counts(self) -> Tensor:
        return torch.bincount(labels_of(self.training_data()), minlength=self.layers[-1][1].weight.shape[0]).int()

    def download(self, reply: Mapping[str, Tensor]) -> None:
        """Take the layers that are new to this client, one after another."""
        step, own, depth = int(reply["step"]), int(self.step), len(self.layers)
        begun = max(step - 1, 0) // depth * depth  # where the communication round of the reply's layers began
        if own < begun:
            self.cut()
        for index in range(max(own, begun) - begun, step - begun):
            self._take(index, reply)
        self.step.fill_(step)

    @torch.no_grad()
    def _take(self, index: int, reply: Mapping[str, Tensor]) -> None:
        name, layer = self.layers[index]
        if f"{name}.weight" not in reply:  # the last layer, where heads stay at home
            return
        weight, bias = reply[f"{name}.weight"], reply.get(f"{name}.bias")
        if index < len(self.layers) - 1:
            assignment = reply.get(f"{name}.assignment")
            if assignment is None:
                assignment = nearest_units(unit_matrix(layer.weight, layer.bias), _units(name, reply))
            self.assignments[name].copy_(assignment)
            _, after = self.layers[index + 1]
            self._put(after, spread_inputs(after.weight, self.assignments[name], len(weight)), after.bias)
        self._put(layer, weight, bias)

    @torch.no_grad()
    def cut(self) -> None:
        """Cut the network of the original size out of the global layers that this client has."""
        for index in reversed(range(len(self.layers))):
            name, layer = self.layers[index]
            weight, bias = layer.weight, layer.bias
            if index > 0:
                before, preceding = self.layers[index - 1]
                weight = gather_inputs(weight, self.assignments[before], len(preceding.weight))
            if name in self.assignments:
                own = self.assignments[name]
                weight, bias = weight[own], None if bias is None else bias[own]
            self._put(layer, weight, bias)
        for _, own in self.assignments.items():
            torch.arange(len(own), out=own)

    def load_global(self, model: Mapping[str, Tensor]) -> None:
        for name, layer in self.layers:
            self._put(layer, model[f"{name}.weight"], model.get(f"{name}.bias"))

    def _put(self, layer: nn.Conv2d | nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
        channels_last = getattr(self.learner, "channels_last", False) and weight.dim() == 4
        layout = torch.channels_last if channels_last else torch.contiguous_format
        weight = weight.detach().clone(memory_format=layout)  # a copy: a reply is the server's own memory
        _resize(layer, weight, None if bias is None else bias.detach().clone())

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state whose layers may have other numbers of units than now."""
        for name, layer in self.layers:
            if f"learner.{name}.weight" in state_dict:
                weight, bias = state_dict[f"learner.{name}.weight"], state_dict.get(f"learner.{name}.bias")
                _resize(layer, weight.clone(), None if bias is None else bias.clone())
        return super().load_state_dict(state_dict, *args, **kwargs)


def chain(learner: nn.Module) -> list[tuple[str, nn.Conv2d | nn.Linear]]:
    """Return the layers of a learner's ``backbone``, which is a plain chain of them, with their names in the learner.

    Raises:
        ConfigError: when it is not.
    """
    backbone = getattr(learner, "backbone", None)
    if not isinstance(backbone, Backbone):
        raise ConfigError(
            f"model.learner: FedMA matches the units of a plain chain of layers, and {type(learner).__name__} has no "
            "attribute `backbone` that is a lit_pfl.models.Backbone."
        )
    layers: list[tuple[str, Any]] = []
    for name, module in backbone.named_modules(prefix="backbone"):
        kind = type(module)
        if kind in (nn.Conv2d, nn.Linear) and getattr(module, "groups", 1) == 1:
            layers.append((name, module))
        # a module that runs its parts one after the other is looked into
        elif kind.forward not in (Backbone.forward, nn.Sequential.forward) and kind not in CHANNELWISE:
            what = f"{kind.__name__} with groups" if kind is nn.Conv2d else kind.__name__
            raise ConfigError(
                f"model.backbone: {name} is a {what}. FedMA needs a plain chain of Conv2d and Linear layers, with "
                "nothing but activations, pooling, dropout and flattening in between; use VGG9, CNN or MLP."
            )
    if [name.startswith("backbone.head") for name, _ in layers].count(True) != 1 or type(layers[-1][1]) is nn.Conv2d:
        raise ConfigError("model.backbone: FedMA needs a head of a single linear layer, as VGG9, CNN and MLP have it.")
    return layers


def _resize(layer: nn.Conv2d | nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Give a layer other weights. Its parameters stay the same objects, so the optimizer and its schedule continue."""
    layer.weight.data = weight.to(layer.weight)
    if bias is not None and layer.bias is not None:
        layer.bias.data = bias.to(layer.bias)
    if isinstance(layer, nn.Conv2d):
        layer.out_channels, layer.in_channels = weight.shape[:2]
    else:
        layer.out_features, layer.in_features = weight.shape


def _units(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    return unit_matrix(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


class FedMAServer(Server):
    """Matches and averages one layer a round.

    Args:
        layers: for every layer of a client's network, in order: shape and type of its tensors, as before training.
        shares_last: whether the last layer is averaged.
        matching: see :class:`FedMA`.
        seed: of the order in which clients are matched.
    """

    count_tensors = ("class_counts",)

    kept = ("step", "seen", "assignments", "finished")

    def __init__(self, layers: Mapping[str, Layout], shares_last: bool, matching: Matching, seed: int = 0) -> None:
        self.layers, self.names, self.shares_last = layers, list(layers), shares_last
        self.matching, self.seed = matching, seed

    def start(self, clients: Mapping[int, ClientInfo]) -> None:
        super().start(clients)
        self.step = 0  # layers done, over all communication rounds
        self.model = Payload({})  # those of this communication round
        self.finished = Payload({})  # all layers of the last one that is over
        self.assignments: dict[str, dict[int, Tensor]] = {}  # by layer and client
        self.seen = dict.fromkeys(clients, 0)  # the step at which a client's upload was used last

    def add(self, client: int, info: ClientInfo) -> None:
        self.seen = {**self.seen, client: 0}

    def layout(self, client: int) -> Layout:
        index = self.step % len(self.names)
        name, last = self.names[index], index == len(self.names) - 1
        expected = {"step": (torch.Size([]), torch.int64)}
        if last and not self.shares_last:
            return expected
        expected |= {f"{name}.{leaf}": layout for leaf, layout in self.layers[name].items()}
        if index > 0:
            before, (shape, dtype) = self.names[index - 1], expected[f"{name}.weight"]
            inputs = shape[1] // self.layers[before]["weight"][0][0] * len(self.model[f"{before}.weight"])
            expected[f"{name}.weight"] = torch.Size([shape[0], inputs, *shape[2:]]), dtype
        if last:
            expected["class_counts"] = self.layers[name]["weight"][0][:1], torch.int32
        return expected

    def aggregate(self, round: int, uploads: Mapping[int, Payload]) -> None:
        index = self.step % len(self.names)
        name, last = self.names[index], index == len(self.names) - 1
        if index == 0:
            self.model, self.assignments = Payload({}), {}
        if not last or self.shares_last:
            units = {client: _units(name, upload).cpu().double() for client, upload in uploads.items()}
            merged = self._average_by_class(units, uploads) if last else self._match(name, units)
            like = next(iter(uploads.values()))[f"{name}.weight"]
            layer = {f"{name}.weight": merged[:, : like[0].numel()].reshape(-1, *like.shape[1:]).to(like)}
            if "bias" in self.layers[name]:
                layer[f"{name}.bias"] = merged[:, -1].to(like)
            self.model = self.model.with_(layer)
        self.seen |= dict.fromkeys(uploads, self.step)
        self.step += 1
        if last:
            self.finished = self.model

    def global_model(self) -> Payload:
        return self.finished

    def _match(self, name: str, units: Mapping[int, Tensor]) -> Tensor:
        """Return the global units of a layer, and note whose they are."""
        rng = np.random.default_rng([self.seed, self.step])
        assignments = match_units(list(units.values()), self.matching, rng)
        self.assignments[name] = {c: own.int() for c, own in zip(units, assignments, strict=True)}
        return merge_units(list(units.values()), assignments, self.matching)

    def _average_by_class(self, units: Mapping[int, Tensor], uploads: Mapping[int, Payload]) -> Tensor:
        """Return the last layer: the row of a class weighs clients by how many samples of it they have."""
        counts = torch.stack([upload["class_counts"] for upload in uploads.values()]).cpu().double()
        counts[:, counts.sum(0) == 0] = 1  # a class that nobody has
        shares = counts / counts.sum(0)
        return torch.stack([share[:, None] * own for share, own in zip(shares, units.values(), strict=True)]).sum(0)

    def reply(self, client: int) -> Payload:
        """Return the layers of this communication round that the client may lack, and which units are its own."""
        begun = max(self.step - 1, 0) // len(self.names) * len(self.names)
        tensors = {"step": torch.tensor(self.step)}
        for name in self.names[max(self.seen[client] - begun, 0) : self.step - begun]:
            tensors |= {key: self.model[key] for leaf in self.layers[name] if (key := f"{name}.{leaf}") in self.model}
            if client in self.assignments.get(name, {}):
                tensors[f"{name}.assignment"] = self.assignments[name][client]
        return Payload(tensors)
