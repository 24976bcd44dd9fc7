"""A grid of Flower without its processes: messages are encoded, and nodes answer at once or as a test wants."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from torch import Tensor

from lit_pfl import Federation
from lit_pfl.lightning_internals import read_whole
from tiny import assert_equal


def sent(message: Message) -> Message:
    """Return a message as it arrives."""
    contents = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = message.object_id
    return arrived


class DirectGrid:
    """Nodes that live in this process.

    Args:
        app: what all of them run.
        nodes: their configurations, by id.
        config: the run's.
    """

    def __init__(self, app: ClientApp, nodes: dict[int, dict[str, Any]], config: dict[str, Any]) -> None:
        self.app, self.nodes, self.config = app, nodes, config
        self.down: set[int] = set()
        self.down_in: dict[str, set[int]] = {}
        self.change: Callable[[Message, Message], Message | None] = lambda message, answer: answer
        self.payload_bytes = {"train": [0, 0]}
        self.asked: list[tuple[int, str]] = []
        self.waiting: dict[str, Message] = {}  # answers that nobody has asked for yet, by the message
        self.kept: defaultdict[int, RecordDict] = defaultdict(RecordDict)  # what a node's mods keep
        self.run = SimpleNamespace(run_id=1)

    def get_node_ids(self) -> list[int]:
        return sorted(self.nodes)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        answers = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            self.asked.append((node, kind))
            self._count(message, 1)
            if node in self.down | self.down_in.get(message.metadata.group_id, set()):
                continue
            context = Context(1, node, self.nodes[node], self.kept[node], self.config)
            try:
                answer = self.app(sent(message), context)
            except Exception as error:
                answer = Message(Error(1, f"{type(error)}:<'{error}'>"), reply_to=message)
            changed = self.change(message, answer)
            if changed is not None:
                self._count(changed, 0)
                answers.append(sent(changed))
        return answers

    def push_messages(self, messages: list[Message]) -> None:
        self.waiting |= {answer.metadata.reply_to_message_id: answer for answer in self.send_and_receive(messages)}

    def pull_messages(self, message_ids: list[str]) -> list[Message]:
        return [self.waiting.pop(message) for message in message_ids if message in self.waiting]

    def _count(self, message: Message, direction: int) -> None:
        if message.metadata.message_type == "train" and message.has_content():
            for array in message.content.array_records.get("payloads", {}).values():
                with suppress(ValueError, EOFError):  # of one that a test has spoilt
                    self.payload_bytes["train"][direction] += array.numpy().nbytes


def states(nodes: Path, server: Path) -> dict[int, dict[str, Tensor]]:
    """Return what clients have in their files, of those who have ever trained.

    Args:
        nodes: where the nodes' folders are.
        server: the server's folder.
    """
    found, checkpoint = {}, read_whole(server / "checkpoint.ckpt")
    for client, round in checkpoint["answered"].items():
        if round:
            [path] = nodes.glob(f"*/{checkpoint['run']}/client{client}/round{round}.ckpt")
            found[client] = dict(read_whole(path)["clients"][client]["state_dict"])
    return found


def assert_same(nodes: Path, server: Path, whole: Federation) -> None:
    """Compare clients' states, the server's and all byte counts with those of a run in one process, bit for bit."""
    trained, checkpoint = states(nodes, server), read_whole(server / "checkpoint.ckpt")
    assert trained
    for client, state in trained.items():
        assert_equal(state, dict(whole.clients[client].state_dict()))
    assert_equal(checkpoint["coordinator"]["server"], whole.coordinator.server.state_dict())
    assert checkpoint["coordinator"]["ledger"] == whole.coordinator.ledger.state_dict()
