"""What the parser says is wrong, in one line: the option, what was given, what would be right."""

import inspect
import re
import shlex
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import lightning as L
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_pfl.core import Client
from lit_pfl.core.asynchronous import Asynchronous
from lit_pfl.core.deadline import Deadline, Speeds
from lit_pfl.core.participation import Participation
from lit_pfl.core.privacy import ClientPrivacy
from lit_pfl.core.robust import RobustMean
from lit_pfl.core.server_optimizer import ServerOptimizer
from lit_pfl.data import Augment, FederatedDataModule, Partition
from lit_pfl.engines.engine import Engine
from lit_pfl.errors import ConfigError
from lit_pfl.models import Backbone
from lit_pfl_callbacks.run_folder import latest_config

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
    "deadline": Deadline,
    "speeds": Speeds,
    "asynchronous": Asynchronous,
    "engine": Engine,
    "server_optimizer": ServerOptimizer,
}
#: classes that are no choice all the same: only to be built on; a federation's own and Lightning's; one that would have
#: to be told a metric
NO_CHOICE = {
    "Optimizer", "LRScheduler", "ServerStep", "ClientLogger", "ElsewhereLogger", "DummyLogger", "ReduceLROnPlateau",
}  # fmt: skip
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
    **dict.fromkeys(("list", "Iterable", "tuple"), "a list"),
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
EXAMPLES = {"fit": "--config simfed"}
#: how lines of the parser's begin that only lead up to the others
FRAME = ("Expected a path but", "Does not validate", "Subtypes:", "Errors:", "Problem with", "Given value")
#: where the parser's lines have what was given, and what was expected
GIVEN = re.compile(
    r"(?:path string|Got value|Given value|base 10|to float): '?(?!NestedArg|Namespace)(.*?)(?:'|\. Got value.*)?$"
    r"|: (\S+) does not conform",
    re.MULTILINE,
)
KIND = re.compile(r"Not of type (\w+)|Literal\[([^\]]*)\]|Expected a <class '(?:\w+\.)*(\w+)'>")


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
    option, reason = _innermost(message)
    if lacking := re.search(r"arguments are required: (\w+)\.model", message):
        example = EXAMPLES.get(lacking[1], "--config RUN/config.yaml --ckpt_path RUN/checkpoints/last.ckpt")
        return f"model: give --model NAME, or a configuration that names it, such as: lit-pfl {lacking[1]} {example}"
    if not option:
        word = re.match(r"unrecognized arguments: ([^-]\S*)", message)
        if word and (config := latest_config(Path(word[1]))).is_file():
            given = shlex.join(["--config", str(config), "--ckpt_path", f"{Path(word[1])}/checkpoints/last.ckpt"])
            return f"{word[1]} is a run's folder; give {given}"
        return message + _did_you_mean(re.findall(r"(?:\s--?|accept option ')([a-z][\w.]*)", message), known)
    if unknown := re.search(r"Option '([\w.]+)' is not accepted", reason):
        there = _parameters(reason)
        meant = _did_you_mean([unknown[1]], there, elsewhere=option in ("model", "data"), within=f"{option}.")
        has = [name for name in there if name != unknown[1]]  # FedAvgM sets an option of FedAvg itself
        return f"{option}: {unknown[0]}." + (meant or (f" It has {', '.join(has)}." if has else ""))
    found, kind = GIVEN.search(reason), option.rpartition(".")[2]
    given = (found[1] or found[2]) if found else ""
    if kind in CLASSES and re.search("path string|instantiatable class|valid subclass", reason):
        names = names_to_choose(CLASSES[kind])
        options = not given or given.startswith(("{", "Namespace("))
        problem = "it has options, but no name" if options else f"there is no {given!r}"
        choice = ALSO.get(kind, "") + ("give" if kind in UNLISTED else f"choose one of {', '.join(names)}, or")
        return f"{option}: {problem}; {choice} a class path of your own.{_did_you_mean([given], names)}"
    said = [line for line in reason.split("\n") if line and not line.startswith(FRAME)]
    said.sort(key=lambda line: line.startswith("Expected a"))  # what a class says itself goes before other kinds
    kinds = [
        "one of " + choices.replace("'", "") if choices else KINDS.get(one or other, f"a {one or other}")
        for one, choices, other in KIND.findall("\n".join(said))
    ]
    if not found or not kinds or not all(line.startswith(("Expected a", "Not of type")) for line in said):
        return f"{option}: {(said or [reason])[0].partition('. Got value')[0].rstrip('.')}."
    if kind in CLASSES:
        kinds.insert(0, "the name of a class")
    elif set(kinds) == {KINDS["NoneType"]}:  # a class of one kind, which has no name
        kinds.insert(0, f"its options, such as --{option}.NAME VALUE,")
    return f"{option}={given}: expected {' or '.join(dict.fromkeys(kinds))}."


def names_to_choose(cls: type) -> list[str]:
    """Return the names of a class and all that build on it, without those that are only there to be built on."""
    subclasses: list[type] = cls.__subclasses__()
    own = set() if cls.__name__.startswith("_") or inspect.isabstract(cls) else {cls.__name__}
    return sorted((own - NO_CHOICE).union(*map(names_to_choose, subclasses)))


def refuse_abstract(option: str, class_path: str) -> None:
    """See that the class of an option can be made: the parser looks at what a factory returns, not whether it can.

    Raises:
        ConfigError: when it is one that is only there to be built on.
    """
    module, _, name = class_path.rpartition(".")
    if inspect.isabstract(getattr(import_module(module), name, None)):
        names = ", ".join(names_to_choose(CLASSES[option.rpartition(".")[2]]))
        raise ConfigError(f"{option}={name}: it is only there to be built on; choose one of {names}.")


def _innermost(message: str) -> tuple[str, str]:
    """Return the option that a message is about, and what it says of that one: the lines that are indented below it."""
    keys, lines, depth = list[str](), list[str](), -1
    for line in message.split("\n"):
        indent = len(line) - len(line.lstrip())
        if found := re.search(r'Parser key "([\w.]+)":\s*(.*)', line):
            outer = keys[:-1] if indent == depth else keys  # each of several kinds may have the same option
            keys, lines, depth = [*outer, found[1]], [found[2]], indent
        elif indent > depth:
            lines.append(line.strip(" -").rpartition("callable class: ")[2])
    return ".".join(keys), "\n".join(lines)


def _parameters(reason: str) -> list[str]:
    """Return the names of what the class can be given that a reason is about, each once."""
    named = re.search(r"class_path[ =]'([\w.]+)\.(\w+)'", reason)
    cls = getattr(import_module(named[1]), named[2], None) if named else None
    names: list[str] = []
    for base in cls.__mro__[:-1] if cls else ():
        taken = inspect.signature(base.__init__).parameters.values()
        names += [p.name for p in taken if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if not any(p.kind is p.VAR_KEYWORD for p in taken):  # the rest is not handed on
            break
    return list(dict.fromkeys(names))


def _did_you_mean(words: list[str], known: list[str], elsewhere: bool = True, within: str = "") -> str:
    """Ask whether something else was meant, if something is near, and it is not what was typed itself.

    Args:
        words: what was typed.
        known: names that there are.
        elsewhere: whether names of other libraries are understood.
        within: what stood before the words.
    """
    plain = {name.lower(): name for name in known}
    groups = {name.partition(".")[0] for name in known if "." in name}
    for word in words:
        near = [ELSEWHERE[word]] if elsewhere and word in ELSEWHERE else []
        near += [plain[name] for name in get_close_matches(word.lower(), plain, n=1)]
        first, dot, _ = word.partition(".")
        if dot and first not in groups:  # the whole group is called otherwise
            near += get_close_matches(first, groups, n=1)
        near = [name for name in near if name not in (word, within + word)]
        if near:
            return f" Did you mean {near[0]}?"
    return ""
