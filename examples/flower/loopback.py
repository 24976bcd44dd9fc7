"""Start all of a federation on this machine: certificates, a SuperLink, SuperNodes, and a run.

python loopback.py                                 # six sites, three SuperNodes
python loopback.py method=Scaffold rounds=10       # other options of pyproject.toml
"""

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import certificates

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent  # where pip puts Flower's commands


class Loopback:
    """A SuperLink and SuperNodes on this machine, with TLS and node authentication. Use it in a ``with`` statement.

    Args:
        folder: for certificates, logs, Flower's own files, and what server and clients keep.
        project: the project to run.
    """

    def __init__(self, folder: Path, project: Path = HERE) -> None:
        self.folder, self.project = folder.resolve(), project
        self.keys = self.folder / "certificates"
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        own = {"FLWR_HOME": str(self.folder / "flwr"), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        self.environment = {**os.environ, **own, **quiet}
        if not self.keys.exists():
            certificates.main(self.keys, ["localhost"], [])

    def __enter__(self) -> "Loopback":
        self.configure()
        try:
            self.start_superlink()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self.processes)):
            self.stop(name)

    def configure(self) -> None:
        """Tell the command ``flwr`` where the SuperLink is."""
        config = self.folder / "flwr" / "config.toml"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(
            f'[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.keys / "ca.crt"}"\n'
        )

    def start_superlink(self) -> None:
        """Start the SuperLink, with a data base so that it knows its nodes again after a restart; wait for its port."""
        tls = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
        tls = [str(self.keys / word) if "." in word else word for word in tls]
        options = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--database", str(self.folder / "superlink.db")]
        self.start("superlink", ["flower-superlink", *tls, *options, *where])
        wait_for(self.port, self.processes["superlink"])

    def register(self, node: str) -> None:
        """Make a key pair for a node, and let the SuperLink know the public one."""
        certificates.node_keys(self.keys, node)
        self.flwr("supernode", "register", str(self.keys / f"{node}.pub"), "loopback")

    def start_supernode(self, node: str, clients: Iterable[int], port: int | None = None, **config: Any) -> None:
        """Start a SuperNode, for some clients.

        Args:
            node: its name, under which it has been registered.
            clients: ids of the clients whose data it has.
            port: of the SuperLink, or of what stands before it.
            config: more that its ClientApp finds in its configuration.
        """
        config = {"clients": ",".join(map(str, clients)), "folder": str(self.folder / node), **config}
        options = " ".join(f"{name}={quoted(value)}" for name, value in config.items())
        self.start(
            node,
            [
                *("flower-supernode", "--superlink", f"127.0.0.1:{port or self.port}", "--port", str(free_port())),
                *("--root-certificates", str(self.keys / "ca.crt")),
                *("--auth-supernode-private-key", str(self.keys / node), "--node-config", options),
            ],
        )

    def run(self, **config: Any) -> subprocess.CompletedProcess[str]:
        """Run the project, with other options than its own; wait, and return what it printed."""
        config = {"folder": str(self.folder / "server"), **config}
        options = " ".join(f"{name.replace('_', '-')}={quoted(value)}" for name, value in config.items())
        return self.flwr("run", str(self.project), "loopback", "--stream", "--run-config", options)

    def flwr(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of ``flwr`` and return what it printed."""
        done = subprocess.run(["flwr", *command], env=self.environment, text=True, capture_output=True)
        if done.returncode:
            raise RuntimeError(f"flwr {shlex.join(command)}\n{done.stdout}{done.stderr}")
        return done

    def start(self, name: str, command: list[str]) -> None:
        """Start a process, in a group of its own, so that what it starts can be ended with it."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment, cwd=self.folder, stdout=log, stderr=log, process_group=0,
            )  # fmt: skip

    def stop(self, name: str, signal: int = 15) -> None:
        """End a process and all that it has started."""
        process = self.processes.pop(name)
        try:
            os.killpg(process.pid, signal)
            process.wait(20)
        except ProcessLookupError:
            pass
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
        process.wait()

    def log(self, name: str) -> str:
        """Return what a process has printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")


def quoted(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def options_of(words: Iterable[str]) -> dict[str, Any]:
    """Return what is written NAME=VALUE."""
    return {name: _typed(value) for name, value in (word.split("=", 1) for word in words)}


def _typed(text: str) -> Any:
    """Return a number or a truth value where a text is one."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port: int, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise RuntimeError(f"Nobody listens on port {port}; see the log.")


def main(options: list[str]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="lit-pfl-flower-"))
    print(f"Logs, certificates and results are in {folder}.")
    with Loopback(folder) as federation:
        for node, clients in {"north": [0, 1], "south": [2, 3], "west": [4, 5]}.items():
            federation.register(node)
            federation.start_supernode(node, clients)
        print(federation.run(**options_of(options)).stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
