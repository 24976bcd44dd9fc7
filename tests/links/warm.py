"""Flower's commands without their start: each is forked from a process that has imported PyTorch already.

A SuperNode starts a process for every message, and importing takes longer than the tiny rounds of tests. What runs in
them is Flower's own entry points; SuperLink, SuperNodes and SuperExecs are started as ever.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

COMMANDS = {
    "flwr": ("flwr.cli.app", "app"),
    "flwr-clientapp": ("flwr.supernode.cli", "flwr_clientapp"),
    "flwr-serverapp": ("flwr.superlink.cli", "flwr_serverapp"),
}
IMPORTS = ("lit_pfl.links.flower", "lit_pfl.methods", "lit_pfl.data", "sklearn.datasets", "flwr.server.run_serverapp")
WRAPPER = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiter:
    waiter.connect({address!r})
    order = [{command!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]
    socket.send_fds(waiter, [json.dumps(order).encode()], [1, 2])
    sys.exit(int(waiter.recv(16) or b"1"))
"""


class Warm:
    """The process that is forked. Use it in a ``with`` statement.

    Args:
        folder: for the commands that are to be found first, ``folder/bin``.
        environment: the process's.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.bin, self.environment = folder / "bin", environment
        self.address = str(folder / "warm.socket")

    def __enter__(self) -> "Warm":
        self.bin.mkdir(parents=True)
        for command in COMMANDS:
            script = self.bin / command
            script.write_text(WRAPPER.format(python=sys.executable, address=self.address, command=command))
            script.chmod(0o755)
        self.process = subprocess.Popen([sys.executable, __file__, self.address], env=self.environment)
        while not Path(self.address).exists():
            assert self.process.poll() is None
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def serve(address: str) -> None:
    """Fork at every order; tell who gave it how it ended."""
    functions = {name: getattr(import_module(module), function) for name, (module, function) in COMMANDS.items()}
    for module in IMPORTS:
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        while True:
            orderer, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                data, outputs, _, _ = socket.recv_fds(orderer, 1 << 20, 2)
                worker = os.fork()
                if worker == 0:
                    orderer.close()
                    name, *order = json.loads(data)
                    work(name, functions[name], outputs, *order)
                _, status = os.waitpid(worker, 0)
                with suppress(BrokenPipeError):  # who waited may have been killed
                    orderer.send(str(os.waitstatus_to_exitcode(status) & 255).encode())
                os._exit(0)
            orderer.close()


def work(name, function, outputs, arguments, folder, environment) -> None:
    for output, stream in zip(outputs, (1, 2), strict=True):
        os.dup2(output, stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [name, *arguments]
    code = 1
    try:
        function()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
