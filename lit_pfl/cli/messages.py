"""What the parser says is wrong, in one line: the option, what was given, what would be right."""

import inspect
import re
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import NoReturn

import lightning as L
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_pfl.core import Client
from lit_pfl.core.participation import Participation
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.core.robust import RobustMean
from lit_pfl.data import Augment, FederatedDataModule, Partition
from lit_pfl.errors import ConfigError
from lit_pfl.models import Backbone

#: the options whose value is the name of a class
CLASSES: dict[str, type] = {
    "model": Client,
    "data": FederatedDataModule,
    "partition": Partition,
    "within": Partition,
    "augment": Augment,
    "backbone": Backbone,
    "optimizer": Optimizer,
    "scheduler": LRScheduler,
    "learner": L.LightningModule,
    "logger": Logger,
    "callbacks": L.Callback,
    "mean": RobustMean,
    "participation": Participation,
    "privacy": ClientPrivacy,
}
#: classes that are no choice all the same: a federation's own and Lightning's; one that would have to be told a metric
NO_CHOICE = {"ServerStep", "DummyLogger", "ReduceLROnPlateau"}
#: options of which no names are listed: most classes of their kinds are no choice there
UNLISTED = ("learner", "callbacks")
#: options that take something else than a class as well
ALSO = {"participation": "give a number, "}
#: what the parser calls a kind of value, and what people do
KINDS = {
    "PositiveInt": "a whole number above 0",
    "NonNegativeInt": "a whole number from 0",
    "PositiveFloat": "a number above 0",
    "NonNegativeFloat": "a number from 0",
    "ClosedUnitInterval": "a number from 0 to 1",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "Iterable": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "NoneType": "null",
}
#: what options are called elsewhere, and here
ELSEWHERE = {
    **dict.fromkeys(("rounds", "num_rounds", "global_rounds", "comm_round", "trainer.epochs"), "trainer.max_epochs"),
    **dict.fromkeys(("epochs", "num_epochs", "local_ep"), "federation.local_epochs"),
    **dict.fromkeys(("lr", "learning_rate", "local_learning_rate"), "model.optimizer.lr"),
    **dict.fromkeys(("clients", "num_clients", "num_users", "nclients"), "data.num_clients"),
    **dict.fromkeys(("join_ratio", "frac", "fraction", "fraction_fit"), "federation.participation"),
    **dict.fromkeys(("batch_size", "local_bs"), "data.batch_size"),
    "partition": "data.partition",
    "root": "data.root",
    **dict.fromkeys(("algorithm", "algo", "method"), "model"),
    **dict.fromkeys(("dataset", "datamodule"), "data"),
    **dict.fromkeys(("device", "gpu", "gpus"), "trainer.accelerator"),
    "seed": "seed_everything",
    "resume": "ckpt_path",
}
#: what to type, by command; of the others a run
EXAMPLES = {"fit": "--config configs/simfed.yaml"}


@rank_zero_only
def say(text: str) -> None:
    """Print something, in one of a run's processes."""
    print(text, flush=True)


def fail(message: str) -> NoReturn:
    """Print what is wrong in one line, and exit with code 2."""
    print(f"lit-pfl: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def explained(message: str, known: list[str]) -> str:
    """Return the parser's message in the words of an option.

    Args:
        message: what jsonargparse says. It nests: a class within a class has its own message within the outer one's.
        known: names of the options that there are.
    """
    keys = re.findall(r'Parser key "([\w.]+)"', message)
    if lacking := re.search(r"arguments are required: (\w+)\.(\w+)", message):
        example = EXAMPLES.get(lacking[1], "--config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt")
        return (
            f"{lacking[2]}: give --{lacking[2]} NAME, or a configuration that names it, such as: lit-pfl {lacking[1]} "
            f"{example}"
        )
    if not keys:
        return message + _did_you_mean(re.findall(r"\s--?([a-z][\w.]*)|accept option '([\w.]+)'", message), known)
    option = ".".join(keys)
    reason = re.sub(r'.*Parser key "[\w.]+":\s*', "", message, flags=re.DOTALL)  # the innermost: the one that was made
    reason = re.sub(r".*Problem with given class_path '\S+':", "", reason, flags=re.DOTALL)
    if unknown := re.search(r"Option '([\w.]+)' is not accepted", reason):
        there = _parameters(_innermost_class(message))
        meant = _did_you_mean([(unknown[1], "")], there, elsewhere=option in ("model", "data"))
        return f"{option}: {unknown[0]}." + (meant or (f" It has {', '.join(there)}." if there else ""))
    wrong = re.search(r"dot import path string: (\S+)|Multiple subclasses with name (\w+)|instantiatable class", reason)
    kind = keys[-1].rpartition(".")[2]
    cls = CLASSES.get(kind)
    if wrong and cls is not None:
        names = names_of_subclasses(cls)
        given = wrong[1] or wrong[2] or _given(message) or ""
        problem = f"there is no {given!r}" if given.isidentifier() else "it has options, but no name"
        if given in names:
            problem = f"there are several {given!r}"
        choice = ALSO.get(kind, "")
        choice += "give" if kind in UNLISTED else f"choose one of {', '.join(names)}, or"
        return f"{option}: {problem}; {choice} a class path of your own.{_did_you_mean([(given, '')], names)}"
    if needed := re.search(r"the following arguments are required: ([\w., ]+)", reason):
        return f"{option}: give also " + ", ".join(f"{option}.{name}" for name in needed[1].split(", ")) + "."
    if missing := re.search(r"No module named '[\w.]+'|[Mm]odule '[\w.]+' has no attribute '\w+'", reason):
        return f"{option}: {missing[0]}."
    expected, given = _expected(reason), _given(reason) or _given(message)
    if expected and given is not None:
        if cls is not None:
            expected = f"the name of a class or {expected}"
        elif expected == KINDS["NoneType"]:  # a class of one kind, which has no name
            expected = f"its options, such as --{option}.NAME VALUE, or {expected}"
        return f"{option}={given}: expected {expected}."
    return f"{option}: {re.split(r'Given value type', reason)[0]}"


def names_of_subclasses(cls: type) -> list[str]:
    """Return the names of all classes to choose from: not those that are only there to be built on."""
    subclasses: list[type] = cls.__subclasses__()
    names = {sub.__name__ for sub in subclasses if not sub.__name__.startswith("_") and not inspect.isabstract(sub)}
    return sorted((names - NO_CHOICE).union(*map(names_of_subclasses, subclasses)))


def refuse_abstract(option: str, class_path: str) -> None:
    """See that the class of an option can be made: the parser looks at what a factory returns, not whether it can.

    Raises:
        ConfigError: when it is one that is only there to be built on.
    """
    module, _, name = class_path.rpartition(".")
    if inspect.isabstract(getattr(import_module(module), name, None)):
        names = ", ".join(names_of_subclasses(CLASSES[option.rpartition(".")[2]]))
        raise ConfigError(f"{option}={name}: it is only there to be built on; choose one of {names}.")


def _expected(reason: str) -> str:
    kinds: list[str] = []
    alternatives = reason.lstrip().startswith(("Does not validate", "- "))
    # What follows is of the classes around.
    reason = reason.split("Given value type")[0] if alternatives else reason.strip().split("\n")[0]
    for name, choices, cls in re.findall(
        r"Not of type (\w+)|Literal\[([^\]]*)\]|Expected a <class '([\w.]+)'>", reason
    ):
        if choices:
            kinds.append("one of " + choices.replace("'", ""))
        else:
            name = name or cls.rpartition(".")[2]
            kinds.append(KINDS.get(name, f"a {name}"))
    return " or ".join(dict.fromkeys(kinds))


def _given(message: str) -> str | None:
    found = re.search(r"NestedArg\(key='[\w.]+', val='?(.*?)'?\)\s*$", message)
    found = re.search(r"Not of type \w+: (\S+) does not conform", message) or found
    found = re.search(r"(?:Got|Given) value: (?!NestedArg|Namespace)(.*?)(?:\. Got value|$)", message, re.M) or found
    return found[1] if found else None


def _innermost_class(message: str) -> type | None:
    paths = re.findall(r"class_path[ =]'([\w.]+)'", message)
    module, _, name = paths[-1].rpartition(".") if paths else ("", "", "")
    return getattr(import_module(module), name, None) if module else None


def _parameters(cls: type | None) -> list[str]:
    """Return the names of what a class can be given, each once."""
    names: list[str] = []
    for base in cls.__mro__[:-1] if cls else ():
        taken = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        names += [p.name for p in taken if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return list(dict.fromkeys(names))


def _did_you_mean(words: list[tuple[str, str]], known: list[str], elsewhere: bool = True) -> str:
    plain = {name.lower(): name for name in known}
    for word in (one or other for one, other in words):
        near = [ELSEWHERE[word]] if elsewhere and word in ELSEWHERE else []
        near += [plain[name] for name in get_close_matches(word.lower(), plain, n=1)]
        if near and near[0] != word:
            return f" Did you mean {near[0]}?"
    return ""
