"""What the command line makes of a class is what Python makes of it, and a method's defaults are those of its paper."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser
from torch import nn

import lit_pfl.data
import lit_pfl.methods
import lit_pfl.models
from lit_pfl.core import Client
from lit_pfl.data import Augment, FederatedDataModule, Partition
from lit_pfl.models import Backbone

KINDS = {Client: lit_pfl.methods, FederatedDataModule: lit_pfl.data, Partition: lit_pfl.data, Augment: lit_pfl.data,
         Backbone: lit_pfl.models}  # fmt: skip
CASES = [
    (base, cls)
    for base, room in KINDS.items()
    for cls in (getattr(room, name) for name in room.__all__)
    if inspect.isclass(cls) and issubclass(cls, base) and not inspect.isabstract(cls) and cls is not base
]


@pytest.mark.parametrize(("base", "cls"), CASES, ids=lambda x: x.__name__)
def test_defaults_on_the_command_line_are_those_of_python(base, cls):
    parameters = inspect.signature(cls).parameters
    required = [p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if required:
        pytest.skip("has no defaults for all")
    parser = ArgumentParser()
    parser.add_subclass_arguments(base, "it")
    made = parser.instantiate(parser.parse_args(["--it", f"{cls.__module__}.{cls.__name__}"])).it
    plain = vars(cls())
    for name, value in vars(made).items():
        # factories cannot be compared; parameters are drawn anew
        if not name.startswith(("_", "make_")) and not callable(value) and "Module" not in type(value).__name__:
            assert repr(value) == repr(plain[name]) or type(value).__repr__ is object.__repr__, name


# ---------------------------------------------------------------------------------------------- where defaults are from

SOURCES: dict[str, dict[str, list]] = yaml.safe_load(
    (Path(__file__).parent.parent / "docs" / "paper_defaults.yaml").read_text()
)
KINDS_OF_SOURCE = {"paper", "code", "comparison", "choice"}


def in_words(name: str, value: Any) -> dict[str, Any]:
    """Return a default by name as the table has it: parts of a dataclass by themselves, and what a factory makes."""
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return {f"{name}.{part}": own for part, own in parts.items()}
    if name == "optimizer":
        [group] = value([nn.Parameter()]).param_groups
        return {name: {key: group[key] for key in ("lr", "momentum", "weight_decay")}}
    if name == "backbone" and isinstance(value, Callable):
        network = value(3, 10)
        norms = {type(part).__name__ for part in network.modules() if "Norm" in type(part).__name__}
        return {name: ", ".join([type(network).__name__, *sorted(norms)])}
    return {name: value}


def own_defaults(cls: type) -> dict[str, Any]:
    """Return the defaults of all options that a class names in its signature; none if it has that of every method."""
    if cls is not Client and cls.__init__ is Client.__init__:
        return {}
    own = {
        name: p.default
        for name, p in inspect.signature(cls.__init__).parameters.items()
        if name != "self" and p.kind is not p.VAR_KEYWORD
    }
    return {key: value for name, default in own.items() for key, value in in_words(name, default).items()}


METHODS = {name: getattr(lit_pfl.methods, name) for name in lit_pfl.methods.__all__}


def test_the_table_of_defaults_has_every_method_and_names_a_place_for_each():
    assert set(SOURCES) == {"Client", *METHODS}
    for method, options in SOURCES.items():
        for option, (_, kind, place) in options.items():
            assert kind in KINDS_OF_SOURCE, f"{method}.{option}"
            assert len(place) > 4, f"{method}.{option}"


@pytest.mark.parametrize("name", SOURCES)
def test_every_default_is_the_one_that_the_table_has(name):
    """An option without a line, a line without an option, and a default that has changed are all found."""
    assert own_defaults({"Client": Client, **METHODS}[name]) == {
        option: value for option, (value, *_) in SOURCES[name].items()
    }


def test_a_changed_default_would_be_seen():
    def changed(self, epsilon_decay: float = 1.05, **kwargs: Any) -> None: ...

    cls = type("Changed", (lit_pfl.methods.FedFOMO,), {"__init__": changed})
    assert own_defaults(cls)["epsilon_decay"] != SOURCES["FedFOMO"]["epsilon_decay"][0]
