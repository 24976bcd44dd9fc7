"""Psi-Net's structure: a classifier whose layers from some depth on are in groups, each with classes of its own.

The network is traced, so that channels can be followed through additions and products: their widths change together.
"""

from typing import Any, Literal

from torch import fx, nn
from torch.nn.parameter import is_lazy

from lit_pfl.errors import ConfigError
from lit_pfl.models.backbone import Backbone
from lit_pfl.models.channels import LAYERS, NORMS, Channels, Tracer, check
from lit_pfl.nn import (
    GroupedBatchNorm,
    GroupedConv2d,
    GroupedLinear,
    GroupedLogits,
    GroupedNorm,
    GroupSlice,
    check_plain,
    class_groups,
    places_of_weights,
)

Boundary = Literal["split", "full"]
GroupedNorms = Literal["group", "keep"]
Structure = Literal["grouped", "dense"]


def psi(
    backbone: Backbone,
    groups: int,
    depth: int | None = None,
    mapping: Literal["contiguous"] | list[int] = "contiguous",
    boundary: Boundary = "split",
    norm: GroupedNorms = "group",
    structure: Structure = "grouped",
) -> Backbone:
    """Divide the deep layers of a network into groups, and the classes among them.

    The first ``depth`` layers stay shared. In all others a group's neurons see their own group only, down to the logits
    of the group's classes. Widths of grouped layers, and of shared ones whose output they take in, are rounded to the
    nearest multiple of the number of groups; what changes is drawn again, as PyTorch draws it. With one group the
    network stays as it is.

    Parameters, with 10 classes, 10 groups and images of 32 x 32 pixels, all of the Psi form being ``shared`` and ten
    times ``a group``:

    ==================  =====  ===========  ===========  ==========  =========  =========
    network             depth     as it is        dense    Psi form     shared    a group
    ==================  =====  ===========  ===========  ==========  =========  =========
    VGG9                    4    3,493,258    3,545,836     576,376    243,846     33,253
    VGG16                   9   14,728,266   14,645,416   6,213,586  5,270,586     94,300
    MobileNetV1            13    3,217,226    3,193,974     609,804    268,604     34,120
    ResNet9                 5    2,571,338    2,631,746     986,726    802,376     18,435
    ResNet18               13   11,173,962   11,180,926   2,567,386  1,604,176     96,321
    vgg11                   5  128,807,306  128,481,946  14,782,516  2,136,446  1,264,607
    resnet18               13   11,181,642   11,188,606   2,575,066  1,611,856     96,321
    mobilenet_v3_small     35    1,528,106    1,537,844     360,914    183,404     17,751
    efficientnet_b0        54    4,020,358    4,010,608   1,225,288    770,928     45,436
    ==================  =====  ===========  ===========  ==========  =========  =========

    VGG9 is made with batch norm; small letters are torchvision's; ``dense`` is the structure of that name.

    Args:
        backbone: a network of convolutions and fully connected layers, with activations, pooling, dropout, batch and
            group norms, additions and products between them, and a head of one linear layer. Its lazy layers must know
            their shapes. It must not be used any more.
        groups: number of groups G, at most one a class.
        depth: number of shared layers: convolutions and fully connected layers in the order in which they run. By
            default two thirds of the convolutions (VGG9: 4, VGG16: 9, after C4-2).
        mapping: see :func:`~lit_pfl.nn.class_groups`.
        boundary: what groups see of the last shared layer: ``split``: an equal share of its channels each; ``full``:
            all of them (a depthwise convolution sees its own share nevertheless).
        norm: ``group``: every norm of a grouped layer becomes a group norm with G groups; where the network has no norm
            at all, each grouped convolution is given one. ``keep``: batch norms stay, and where there are none there
            are none.
        structure: ``grouped``, or ``dense``: layers of the same widths with the same norms, but not divided.

    Returns:
        The new network.

    Raises:
        ConfigError: when the numbers do not go together, and when a network has something in it that would mix groups.

    Source:
        Psi-Net, Section 3.2; rounding and boundary, which the paper leaves open, by the needs of the convolutions.
    """
    for option, value, choices in (
        ("boundary", boundary, ("split", "full")),
        ("norm", norm, ("group", "keep")),
        ("structure", structure, ("grouped", "dense")),
    ):
        if value not in choices:
            raise ConfigError(f"model.{option}={value!r}: choose one of {', '.join(choices)}.")
    if not isinstance(backbone.head, nn.Linear):
        raise ConfigError(
            f"model.backbone: its head is a {type(backbone.head).__name__}; Psi-Net needs a linear layer."
        )
    mapped = class_groups(backbone.head.out_features, groups, mapping)
    if groups == 1:
        return backbone
    plan = _Plan(backbone, groups, depth, boundary)
    return plan.build(mapped, norm, structure == "grouped")


class _Divided(Backbone):
    """A network that was made of another."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__(body, head)


class _Plan:
    """What is shared, what is grouped, and how wide all of it is."""

    def __init__(self, backbone: Backbone, groups: int, depth: int | None, boundary: Boundary) -> None:
        self.body, self.groups, self.full = backbone.body, groups, boundary == "full"
        assert isinstance(backbone.head, nn.Linear)
        self.head: nn.Linear = backbone.head
        try:
            self.graph = Tracer().trace(self.body)
        except Exception as error:  # whatever a forward pass may do with what is no tensor
            raise ConfigError(f"model.backbone: its layers cannot be followed: {error}") from error
        self.shared = self._shared_layers(depth)
        self.places = places_of_weights(self.body)
        self.channels: dict[fx.Node, Channels] = {}
        self.grouped: set[fx.Node] = set()  # nodes whose values are divided among the groups
        self.outputs: dict[str, Channels] = {}  # of layers, by name
        for node in self.graph.nodes:
            self._follow(node)
        [self.last] = self.output.all_input_nodes
        if not self._reads_all(self.head, self.last):
            self.channels[self.last].need(groups)

    @property
    def output(self) -> fx.Node:
        return next(node for node in self.graph.nodes if node.op == "output")

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.body.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _shared_layers(self, depth: int | None) -> set[str]:
        names = list(dict.fromkeys(str(n.target) for n in self.graph.nodes if isinstance(self._module(n), LAYERS)))
        for name in names:
            layer = self.body.get_submodule(name)
            assert isinstance(layer, LAYERS)
            if is_lazy(layer.weight):
                raise ConfigError(f"Layer {name!r} does not know its shape yet: run a batch through the network first.")
        if depth is None:
            convolutions = [name for name in names if isinstance(self.body.get_submodule(name), nn.Conv2d)]
            depth = max(1, round(len(convolutions) * 2 / 3))
        if not 0 <= depth <= len(names):
            raise ConfigError(
                f"model.depth={depth}: the network has {len(names)} layers before its classifier; "
                f"share 0 to {len(names)} of them."
            )
        return set(names[:depth])

    # -------------------------------------------------------------------------------------------- following channels

    def _follow(self, node: fx.Node) -> None:
        """Find out which channels a node's value has, and whether they are divided."""
        inputs = node.all_input_nodes
        if any(i in self.grouped for i in inputs):
            self.grouped.add(node)
        if node.op == "placeholder":
            self.channels[node] = Channels(0, fixed=True)
            return
        if node.op == "output":
            return
        module = self._module(node)
        if isinstance(module, LAYERS):
            if node.target not in self.shared:
                self.grouped.add(node)
            self.channels[node] = self._follow_layer(node, module)
            return
        check(node, module)
        channels = self.channels[inputs[0]]
        for other in inputs[1:]:
            channels.join(self.channels[other])
        if isinstance(module, nn.GroupNorm) and node not in self.grouped:
            channels.need(module.num_groups)
        self.channels[node] = channels

    def _follow_layer(self, node: fx.Node, layer: nn.Conv2d | nn.Linear) -> Channels:
        [before] = node.all_input_nodes
        inputs, divided = self.channels[before].root(), node in self.grouped
        width, out = _ends(layer)
        inputs.width = inputs.width or width
        if width % inputs.width or (isinstance(layer, nn.Conv2d) and width != inputs.width):
            raise ConfigError(f"model.backbone: {node.target} takes {width} inputs of {inputs.width} channels.")
        within = self.within(layer)
        depthwise = isinstance(layer, nn.Conv2d) and 1 < layer.groups == width
        if depthwise and out != width:
            raise ConfigError(f"model.backbone: {node.target} makes {out} channels of {width}, each on its own.")
        outputs = self.outputs.setdefault(str(node.target), inputs if depthwise else Channels(out))
        multiple = self.groups * within if divided else getattr(layer, "groups", 1)
        if depthwise:
            multiple = self.groups if divided else 1
        outputs.need(multiple)
        if not self._reads_all(layer, before):
            inputs.need(multiple)
        return outputs

    def within(self, layer: nn.Conv2d | nn.Linear) -> int:
        """Return how many groups of its own a convolution keeps inside each group."""
        return max(1, round(getattr(layer, "groups", 1) / self.groups))

    def _reads_all(self, layer: nn.Conv2d | nn.Linear, before: fx.Node) -> bool:
        return self.full and before not in self.grouped and getattr(layer, "groups", 1) == 1

    # ------------------------------------------------------------------------------------------------------- building

    def build(self, mapped: list[int], norm: GroupedNorms, divide: bool) -> Backbone:
        modules = [(node, module) for node in self.graph.nodes if (module := self._module(node)) is not None]
        bare = norm == "group" and not any(isinstance(module, NORMS) for _, module in modules)
        made: dict[str, nn.Module] = {}
        for node, module in modules:
            if isinstance(module, LAYERS):
                made[str(node.target)] = self._layer(node, module, divide)
            elif isinstance(module, NORMS):
                made[str(node.target)] = self._norm(node, module, norm, divide)
        for name, module in made.items():
            old = self.body.get_submodule(name)
            self.body.set_submodule(name, module.to(next(self.head.parameters())).train(old.training))
        if divide:
            self._slice()
        for node, module in modules:
            if bare and isinstance(module, nn.Conv2d) and node in self.grouped:
                width = self.channels[node].rounded()
                self._insert(f"{node.target}_norm", self._group_norm(width, divide), node)
        width = self._features(self.head, self.last)
        bias, reads_all = self.head.bias is not None, self._reads_all(self.head, self.last)
        head = GroupedLogits(width, mapped, bias, reads_all) if divide else nn.Linear(width, len(mapped), bias)
        return _Divided(fx.GraphModule(self.body, self.graph), head.to(self.head.weight)).train(self.body.training)

    def _features(self, layer: nn.Conv2d | nn.Linear, before: fx.Node) -> int:
        """Return a layer's new number of inputs."""
        channels = self.channels[before].root()
        return _ends(layer)[0] // channels.width * channels.rounded()

    def _layer(self, node: fx.Node, layer: nn.Conv2d | nn.Linear, divide: bool) -> nn.Module:
        [before] = node.all_input_nodes
        ends = self._features(layer, before), self.channels[node].rounded()
        grouped, bias = divide and node in self.grouped, layer.bias is not None
        if ends == _ends(layer) and not grouped:
            return layer
        check_plain(layer, str(node.target), self.places)
        reads_all = self._reads_all(layer, before)
        if isinstance(layer, nn.Linear):
            if grouped:
                return GroupedLinear(*ends, self.groups, bias, reads_all)
            return nn.Linear(*ends, bias)
        how: dict[str, Any] = {
            name: getattr(layer, name) for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode")
        }
        depthwise = 1 < layer.groups == layer.in_channels
        within = ends[0] // self.groups if depthwise else self.within(layer)
        if grouped:
            return GroupedConv2d(*ends, num_groups=self.groups, reads_all=reads_all, within=within, bias=bias, **how)
        groups = ends[0] if depthwise else layer.groups
        if node in self.grouped and layer.groups > 1:
            groups = self.groups * within
        return nn.Conv2d(*ends, groups=groups, bias=bias, **how)

    def _norm(self, node: fx.Node, layer: nn.Module, norm: GroupedNorms, divide: bool) -> nn.Module:
        assert isinstance(layer, NORMS)
        width, grouped = self.channels[node].rounded(), node in self.grouped
        if isinstance(layer, nn.GroupNorm):
            if grouped:
                return self._group_norm(width, divide, layer.affine)
            if width == layer.num_channels:
                return layer
            return nn.GroupNorm(layer.num_groups, width, layer.eps, layer.affine)
        if grouped and norm == "group":
            return self._group_norm(width, divide, layer.affine)
        options = (layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        if grouped and divide:
            return GroupedBatchNorm(self.groups, width, *options)
        return layer if width == layer.num_features else type(layer)(width, *options)

    def _group_norm(self, width: int, divide: bool, affine: bool = True) -> nn.Module:
        return (GroupedNorm if divide else nn.GroupNorm)(self.groups, width, affine=affine)

    def _slice(self) -> None:
        """Give groups their share of what is shared, wherever they take it in."""
        for node in list(self.graph.nodes):
            if node.op == "output":
                takes = self.last not in self.grouped and not self._reads_all(self.head, self.last)
            else:
                takes = node in self.grouped
            takes = takes and not getattr(self._module(node), "reads_all", False)
            for before in node.all_input_nodes if takes else ():
                if before not in self.grouped:
                    sliced = self._insert(f"{node.name}_slice", GroupSlice(self.groups), before, [node])
                    self.grouped.add(sliced)

    def _insert(self, name: str, module: nn.Module, after: fx.Node, users: list[fx.Node] | None = None) -> fx.Node:
        """Add a module to what comes out of a node, for all its users or for some."""
        users = list(after.users) if users is None else users
        parent, _, child = name.rpartition(".")
        self.body.get_submodule(parent).add_module(child, module)
        with self.graph.inserting_after(after):
            new = self.graph.call_module(name, (after,))
        for user in users:
            user.replace_input_with(after, new)
        return new


def _ends(layer: nn.Conv2d | nn.Linear) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a layer."""
    if isinstance(layer, nn.Conv2d):
        return layer.in_channels, layer.out_channels
    return layer.in_features, layer.out_features
