"""A fault campaign: seeded runs of the command line, each in a process of its own, and what strikes them."""

import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import forkserver
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import lightning as L
import sklearn.datasets  # noqa: F401 - this, and what else has no use here: a process forked from this one has it already
import torch

import lit_pfl.cli.federated_cli
import lit_pfl.cli.run
import lit_pfl.lightning_internals.lean_loop
import lit_pfl.methods  # noqa: F401
from lit_pfl.cli import main
from lit_pfl.core.payload import Payload, Upload
from lit_pfl.errors import PayloadError, UploadError

#: of every family some, those with counts in their uploads all
METHODS = (
    "APFL", "AgnosticFL", "ClusteredFL", "Ditto", "FD", "FML", "FedALA", "FedAMP", "FedAdam", "FedAvg", "FedBABU",
    "FedDyn", "FedFOMO", "FedGH", "FedGen", "FedKD", "FedMA", "FedNova", "FedPAC", "FedPer", "FedProto", "FedProx",
    "FedRep", "FedSLR", "FedSpa", "IFCA", "LGFedAvg", "MOON", "PFedMe", "PFedPara", "PerFedAvg", "Scaffold", "SimFed",
)  # fmt: skip
#: their servers use the mean of the uploads alone
AVERAGING = ("FedAvg", "Ditto", "FedPer", "FedProx", "FedRep")
SECONDS = 180  # after which a run is said not to end


# ---------------------------------------------------------------------------------------------------------- bad uploads


def _some(upload: Payload, random: Random, real: bool = True) -> str | None:
    names = [n for n, t in upload.items() if t.numel() and (t.is_floating_point() or not real)]
    return random.choice(names) if names else None


def _number(value: float) -> Callable[..., Upload | None]:
    def change(upload: Payload, random: Random, federation: Any, client: int) -> Upload | None:
        if (name := _some(upload, random)) is None:
            return None
        tensor = upload[name].clone()
        tensor.view(-1)[random.randrange(tensor.numel())] = value
        return {**upload, name: tensor}

    return change


def _tensor(made: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Upload | None]:
    def change(upload: Payload, random: Random, federation: Any, client: int) -> Upload | None:
        name = _some(upload, random, real=False)
        return None if name is None else {**upload, name: made(upload[name])}

    return change


def _renamed(upload: Payload, random: Random, federation: Any, client: int) -> Upload | None:
    name = _some(upload, random, real=False)
    return None if name is None else {(f"{k}?" if k == name else k): t for k, t in upload.items()}


def _missing(upload: Payload, random: Random, federation: Any, client: int) -> Upload | None:
    name = _some(upload, random, real=False)
    return None if name is None else {k: t for k, t in upload.items() if k != name}


def _extra(upload: Payload, random: Random, federation: Any, client: int) -> Upload | None:
    return {**upload, "nobody.asked": torch.ones(2)}


def _counts(upload: Payload, random: Random, federation: Any, client: int) -> Upload | None:
    names = [name for name in federation.coordinator.server.count_tensors if name in upload]
    number = random.choice([-1, 2**31 - 1])
    return {**upload, names[0]: torch.full_like(upload[names[0]], number)} if names else None


def _huge(upload: Payload, random: Random, federation: Any, client: int) -> Upload | None:
    """Finite, and longer than ``federation.max_update_norm``."""
    real = {name: tensor + 1e6 for name, tensor in upload.items() if tensor.is_floating_point() and tensor.numel()}
    return {**upload, **real} if real else None


def _truncated(upload: Payload, random: Random, federation: Any, client: int) -> Upload | None:
    data = upload.to_bytes()
    try:
        return Payload.from_bytes(data[: random.randrange(len(data))], federation.coordinator.expected(client))
    except PayloadError as error:  # as every link does
        return UploadError(f"Client {client}: {error}", error.tensor)


def _dropped(upload: Payload, random: Random, federation: Any, client: int) -> Upload | None:
    return UploadError(f"Client {client}: it has dropped out.")


BAD: dict[str, Callable[..., Upload | None]] = {
    "NaN": _number(float("nan")), "Inf": _number(float("inf")), "shape": _tensor(lambda t: t[None]),
    "type": _tensor(lambda t: t.float() if t.dtype == torch.float64 else t.double()), "renamed": _renamed,
    "missing": _missing, "extra": _extra, "counts": _counts, "huge": _huge, "truncated": _truncated,
    "dropped": _dropped,
}  # fmt: skip


class BadUploads(L.Callback):
    """Spoils every fourth upload, in a way that is drawn from seed, round and client.

    Args:
        seed: the seed.
        send: whether the server gets what is spoiled; otherwise nothing comes from that client in its place.
        notes: file to which a line is written for every one; empty: none.
    """

    def __init__(self, seed: int, send: bool = True, notes: str = "") -> None:
        self.seed, self.send, self.notes = seed, send, notes

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        def change(round: int, uploads: Mapping[int, Upload]) -> dict[int, Upload]:
            return {client: self._changed(pl_module, round, client, upload) for client, upload in uploads.items()}

        pl_module.coordinator.changes.append(change)

    def _changed(self, federation: Any, round: int, client: int, upload: Upload) -> Upload:
        random = Random(f"{self.seed} {round} {client}")
        if random.random() > 0.25 or not isinstance(upload, Payload) or not upload:
            return upload
        applicable = [name for name in sorted(BAD) if name != "counts" or federation.coordinator.server.count_tensors]
        kind = random.choice(applicable)
        bad = BAD[kind](upload, random, federation, client)
        if bad is None:
            return upload
        if self.notes:
            with Path(self.notes).open("a") as file:
                file.write(f"{round},{client},{kind}\n")
        return bad if self.send else UploadError(f"Client {client}: nothing has come.")


# ------------------------------------------------------------------------------------------------------- what strikes


class Strike(NamedTuple):
    """A fault of the process or of its disk.

    Args:
        kind: ``time SIGKILL``, ``time SIGTERM``, ``file SIGKILL``, ``file SIGTERM``, ``full once`` or ``full``.
        moment: of the run's time, or of its file operations, the share after which it strikes.
    """

    kind: str
    moment: float


STRIKES = ("time SIGKILL", "time SIGTERM", "file SIGKILL", "file SIGTERM", "full once", "full")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
CHANGES = ("os.rename", "os.remove", "os.link", "os.mkdir", "os.truncate")


class Files:
    """Counts the operations by which files of a run's folder are changed, and strikes before one of them.

    Args:
        folder: the folder.
        strike: what strikes, if anything does.
        number: before which operation, from 1.
    """

    def __init__(self, folder: Path, strike: Strike | None = None, number: int = 0) -> None:
        self.folder, self.strike, self.number, self.count = str(folder.absolute()), strike, number, 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if not (flags or 0) & WRITES and not set(str(mode or "")) & set("wax+"):
                return
        elif event in CHANGES:
            path = arguments[0]
        else:
            return
        if not isinstance(path, str | os.PathLike) or not str(Path(path).absolute()).startswith(self.folder):
            return
        self.count += 1
        if self.strike is None or self.count < self.number:
            return
        kind = self.strike.kind
        if kind.startswith("file") and self.count == self.number:
            os.kill(os.getpid(), signal.Signals[kind.split()[1]])
        elif (kind == "full once" and self.count == self.number) or (kind == "full" and event != "os.remove"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class Whole(NamedTuple):
    """What an uninterrupted run takes.

    Args:
        seconds: time.
        operations: operations on files.
    """

    seconds: float = 0.0
    operations: int = 0


def child(words: list[str], folder: str, out: str, strike: Strike | None, whole: Whole, told: Any) -> None:
    """Run the command line in a process of its own, with what it prints in a file."""
    torch.set_num_threads(1)
    os.chdir(Path(folder).parent)
    with Path(out).open("w") as file, redirect_stdout(file), redirect_stderr(file):
        by_file = strike is not None and not strike.kind.startswith("time")
        number = 1 + int(strike.moment * whole.operations) if strike is not None and by_file else 0
        files = Files(Path(folder), strike if by_file else None, number)
        if strike is not None and not by_file:
            signum = signal.Signals[strike.kind.split()[1]]
            timer = threading.Timer(strike.moment * whole.seconds, os.kill, [os.getpid(), signum])
            timer.daemon = True
            timer.start()
        began = time.perf_counter()
        try:
            main(words)
        except SystemExit:
            raise
        except BaseException:
            traceback.print_exc()
            sys.exit(99)
        finally:
            file.flush()
            told.put((time.perf_counter() - began, files.count))


class Came(NamedTuple):
    """What came of a run.

    Args:
        code: the exit code, negative for a signal.
        out: what was printed.
        whole: what it took.
    """

    code: int
    out: str
    whole: Whole


def context() -> Any:
    """Return how processes are started: forked from one that has imported everything."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["campaign"])
    former = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # where that process finds it
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if former is None else os.environ.update(PYTHONPATH=former)
    return made


def run(words: list[str], folder: Path, strike: Strike | None = None, whole: Whole | None = None) -> Came:
    """Run the command line in a process of its own.

    Raises:
        TimeoutError: when it does not end.
    """
    out, made = folder.parent / f"{folder.name}.out", context()
    told = made.SimpleQueue()
    process = made.Process(target=child, args=(words, str(folder), str(out), strike, whole or Whole(), told))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"{' '.join(words)}, struck by {strike}: not at its end after {SECONDS} s")
    took = Whole() if told.empty() else Whole(*told.get())
    return Came(process.exitcode, out.read_text() if out.exists() else "", took)


# ---------------------------------------------------------------------------------------------------------------- cases


class Case(NamedTuple):
    """One run of the campaign.

    Args:
        words: what is typed.
        strikes: what strikes it, one after another.
    """

    words: list[str]
    strikes: list[Strike]


def case(seed: int) -> Case:
    """Draw one."""
    random = Random(seed)
    method = random.choice(METHODS)
    words = [
        "fit", "--model", method, "--model.backbone", "MLP", "--model.backbone.hidden", "16", "--data", "Digits",
        "--data.num_clients", "4", "--data.batch_size", "128", "--trainer.max_epochs", str(random.choice([2, 3, 4])),
        "--trainer.accelerator", "cpu", "--federation.threads", "1", "--federation.quorum", "0",
        "--federation.max_update_norm", "1000", "--seed_everything", str(seed),
    ]  # fmt: skip
    kinds = ["none", "partial", "drop", *(["FedBuff", "FedAsync"] if method in AVERAGING else [])]
    lag, speeds = random.choice(kinds), {"spread": "0.7", "variation": "0.3"}
    if lag in ("FedBuff", "FedAsync"):
        option = "--federation.asynchronous"
        words += [option, lag, *([f"{option}.buffer", "2"] if lag == "FedBuff" else [])]
    else:
        words += random.choice([[], ["--federation.participation", "0.5"], ["--federation.participation", "Bernoulli",
                                "--federation.participation.probability", "0.6"]])  # fmt: skip
        if lag != "none":
            option = "--federation.deadline"
            words += [option, "Deadline", f"{option}.seconds", "5", f"{option}.late", lag]
    if lag != "none":
        words += [f"{option}.speeds", "Speeds", *(w for k, v in speeds.items() for w in (f"{option}.speeds.{k}", v))]
    words += ["--trainer.callbacks", "campaign.BadUploads", "--trainer.callbacks.seed", str(seed)]
    strikes = [Strike(random.choice(STRIKES), random.random()) for _ in range(random.choice([1, 1, 2]))]
    return Case(words, strikes)
