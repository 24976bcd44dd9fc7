"""A page for every method: its formula, docstring, options and paper, and a picture of what is sent in a real round.

The picture is measured, not drawn: a few rounds on the bundled digits, and the payloads of the last one. What a method
sends and what it is made for is read from the tables of ``choose_a_method.md``, and its formula from ``formulas.md``.
"""

import inspect
import json
import logging
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import expected
import lightning as L
import matplotlib
import torch
import yaml
from docstring_parser import parse
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import lit_pfl.methods
from lit_pfl import Client, Federation, Payload
from lit_pfl.cli.overview import families
from lit_pfl.core.ledger import Ledger
from lit_pfl.data import Digits, Dirichlet
from lit_pfl.models import CNN, Backbone
from lit_pfl.testing.method_tester import LoRANet

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROUNDS = 5  # enough for a second pass of FedMA over its layers to begin
#: methods that are shown on their default network; others are on a small CNN without norm layers, or on one with a LoRA
OWN_NETWORK = ("FedBN", "PsiNet")
#: how parts of a network are called in the pictures, and their colors (Okabe and Ito's: also without color vision)
PARTS = {
    "body": ("weights of the body", "#0072B2"),
    "head": ("the head", "#E69F00"),
    "u": ("factors u", "#56B4E9"),
    "v": ("factors v", "#009E73"),
    "mu": ("sparse mu", "#D55E00"),
    "norm": ("norm layers", "#CC79A7"),
    "adapter": ("adapters", "#000000"),
    "norm_stats": ("running statistics", "#999999"),
    "other": ("the method's own", "#F0E442"),
}
INDEX = """\
# All methods

[Choose a method](../choose_a_method.md) compares them by what is sent and what they are made for. Every method is a
{{py:class}}`lit_pfl.Client`, which chooses the shared tensors and the local objective, and a
{{py:class}}`lit_pfl.Server`, which combines uploads. Each page has the formula, the options, the paper, and what one
client sends and receives in a round, measured. `lit-pfl methods` prints this list.
{families}"""
FAMILY = """
## {family}

```{{toctree}}
:maxdepth: 1
:hidden:

{pages}
```

| Method | |
|---|---|
{rows}
"""
PAGE = """\
# {name}

*{about}.* Family: {family}.

## Formula

{formula}

[Symbols](../formulas.md#symbols) that all methods have in common are explained once for all.

## When to use it

- **Made for:** {made_for}.
- **A client sends:** {sends}.
- **The server, and what is personalized:** {server}.
{refusals}
## Run it

{expected}

## How it works, and its options

```{{eval-rst}}
.. autoclass:: lit_pfl.methods.{name}
```

Options that every method has are those of {{py:class}}`lit_pfl.Client`.

## What is sent

![What a client sends and receives in a round of {name}]({name}.svg)

{caption}

## Where the defaults come from

{defaults}

## Differences from the paper and the authors' code

{differences}

## Paper

```{{eval-rst}}
.. bibliography::
   :filter: key % "^{name}$"
   :list: bullet
```
"""
NO_OPTIONS = "It has no options of its own."
DEFAULTS = """\
| option | default | from | place |
|---|---|---|---|
"""
#: what the kinds of sources in ``paper_defaults.yaml`` are called
KINDS = {"paper": "its paper", "code": "the authors' code", "comparison": "another paper or code", "choice": "no paper"}
CAPTION = (
    "Bytes that one client sends and receives in round {round}, encoded as the library counts them, next to its whole "
    "network; a {network} among four clients with the ten digits."
)
NO_DIFFERENCES = "The class documents none beyond the defaults above."
#: a sentence of a docstring that has one of these words compares with the paper or with other code
COMPARES = re.compile(r"authors'|authors |released code|the paper|PFLlib|codes? of others|some codes|papers ")


class LastRound(Ledger):
    """Keeps what client 0 sent and received last."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, Payload] = {"sends": Payload({}), "receives": Payload({})}

    def sent_up(self, client: int, upload: Payload) -> None:
        super().sent_up(client, upload)
        if client == 0:
            self.sent["sends"] = upload

    def sent_down(self, client: int, reply: Payload) -> None:
        super().sent_down(client, reply)
        if client == 0:
            self.sent["receives"] = reply


class Watched(Federation):
    """A federation with such a ledger."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.coordinator.ledger = LastRound()


def watched(method: type[Client]) -> Watched:
    """Run a few rounds of a method."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
        logging.getLogger(name).setLevel(logging.ERROR)
    data = Digits(num_clients=4, partition=Dirichlet(1.0), image_size=16, train_fraction=0.05, test_fraction=0.05)
    backbone = LoRANet if issubclass(method, lit_pfl.methods.FedIT) else CNN
    made = method() if method.__name__ in OWN_NETWORK else method(backbone=backbone)
    federation = Watched(made, local_epochs=2, seed=1)
    trainer = L.Trainer(
        max_epochs=ROUNDS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", limit_val_batches=0, num_sanity_val_steps=0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(federation, datamodule=data)
    return federation


def sizes(payload: Payload, roles: dict[str, str]) -> Counter[str]:
    """Return the bytes of a payload by part of the network; names and shapes count with the method's own."""
    parts: Counter[str] = Counter()
    for name in payload:
        factors = {name: payload.low_rank[name]} if name in payload.low_rank else {}
        one = Payload({} if factors else {name: payload[name]}, payload.sparse & {name}, factors)
        parts[roles.get(name, "other")] += one.nbytes
    return parts


def draw(method: type[Client], folder: Path) -> str:
    """Draw what is sent, and return the caption."""
    federation = watched(method)
    client = federation.clients[0]
    learner: Backbone = client.backbone
    whole: Counter[str] = Counter()
    for name, tensor in client.learner.state_dict().items():
        whole[client.roles()[name]] += tensor.nbytes
    lanes = {"its network": whole}
    lanes |= {way: sizes(payload, client.roles()) for way, payload in federation.coordinator.ledger.sent.items()}
    figure, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
    for lane, parts in lanes.items():
        left = 0.0
        for part, (label, color) in PARTS.items():
            if parts[part]:
                axes.barh(lane, parts[part] / 1e3, left=left, color=color, label=label, edgecolor="white")
                left += parts[part] / 1e3
        axes.text(left, lane, f" {sum(parts.values()) / 1e3:,.1f} kB", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("kB")
    axes.spines[["top", "right"]].set_visible(False)
    labels = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(labels.values(), labels.keys(), loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(folder / f"{method.__name__}.svg", metadata={"Date": None})
    plt.close(figure)
    return CAPTION.format(round=ROUNDS, network=type(learner).__name__)


def defaults(options: dict[str, list[Any]]) -> str:
    """Return the table of a method's defaults."""
    rows = [f"| `{option}` | {_shown(v)} | {KINDS[kind]} | {place} |\n" for option, (v, kind, place) in options.items()]
    return DEFAULTS + "".join(rows) if rows else NO_OPTIONS


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {part:g}" for key, part in value.items())
    return f"{value:g}" if isinstance(value, float) else f"`{json.dumps(value)}`".replace('"', "")


def chosen(guide: str) -> dict[str, list[str]]:
    """Return the cells of ``choose_a_method.md`` by method: what is sent, what the server does, what it is made for."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", guide, re.MULTILINE)
    return {name: [cell.strip() for cell in cells] for name, *cells in rows}


def formulas(page: str) -> dict[str, str]:
    """Return the sections of ``formulas.md`` by their heading."""
    _, *sections = re.split(r"^## (\w+)$", page, flags=re.MULTILINE)
    return dict(zip(sections[::2], map(str.strip, sections[1::2]), strict=True))


def refusals(method: type[Client]) -> str:
    """Return when a method ends with an error, as its docstring has it."""
    reasons = [" ".join((one.description or "").split()) for one in parse(inspect.getdoc(method) or "").raises]
    return "".join(f"- **It ends with an error** {plain(reason)}\n" for reason in reasons)


def differences(method: type[Client]) -> str:
    """Return the sentences of a docstring that compare with the paper or with other code."""
    about = (inspect.getdoc(method) or "").partition("\nArgs:")[0]
    sentences = re.split(r"(?<=[a-z)`0-9]\.)\s+(?=[A-Z`(])", " ".join(about.split()))
    found = [f"- {plain(sentence)}" for sentence in sentences if COMPARES.search(sentence)]
    return "\n".join(found) or NO_DIFFERENCES


def plain(text: str) -> str:
    """Return a docstring's reStructuredText as Markdown."""
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")


def section(family: tuple[str, dict[str, str]]) -> str:
    """Return the part of the index for a family of methods."""
    title, members = family
    rows = "\n".join(f"| [{name}]({name}.md) | {about} |" for name, about in members.items())
    return FAMILY.format(family=title, pages="\n".join(members), rows=rows)


@rank_zero_only
def write_pages(app: object) -> None:
    """Write all pages, where they are not there yet."""
    folder = Path(app.srcdir) / "methods"  # type: ignore[attr-defined]
    folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    (folder / "index.md").write_text(INDEX.format(families="".join(map(section, families().items()))))
    sources = yaml.safe_load((Path(app.srcdir) / "paper_defaults.yaml").read_text())  # type: ignore[attr-defined]
    guide = chosen((Path(app.srcdir) / "choose_a_method.md").read_text())  # type: ignore[attr-defined]
    formula = formulas((Path(app.srcdir) / "formulas.md").read_text())  # type: ignore[attr-defined]
    for family, members in families().items():
        for name, about in members.items():
            page = folder / f"{name}.md"
            if page.exists() and page.with_suffix(".svg").exists():
                continue
            method = getattr(lit_pfl.methods, name)
            sends, server, made_for = guide[name]
            page.write_text(
                PAGE.format(
                    name=name, about=about[0].upper() + about[1:], family=family[0].lower() + family[1:],
                    sends=sends, server=server, made_for=made_for, refusals=refusals(method),
                    expected=expected.shown(name), formula=formula[name], caption=draw(method, folder),
                    defaults=defaults(sources[name]), differences=differences(method),
                )
            )  # fmt: skip


def setup(app: object) -> dict[str, bool]:
    """Join the build."""
    app.connect("builder-inited", write_pages)  # type: ignore[attr-defined]
    return {"parallel_read_safe": True}
