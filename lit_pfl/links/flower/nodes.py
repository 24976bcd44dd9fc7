"""The SuperNodes as the server sees them: where clients train."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_pfl.core.checks import check_samples
from lit_pfl.core.encoding import Layout
from lit_pfl.core.payload import Payload, Upload
from lit_pfl.core.server import ClientInfo
from lit_pfl.errors import UploadError
from lit_pfl.links.flower.messages import clients_in, pack, unpack

#: client, model, number of samples, metrics
Scored = tuple[int, str, int, dict[str, Any]]
#: seconds between two looks for nodes that have come
LOOK = 2.0
#: codes of Flower's errors where a message or its answer has expired: nobody has answered in time
EXPIRED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
#: how Flower writes an exception of a node
RAISED = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>:<'(.*)'>", re.DOTALL)


class Nodes:
    """Lets clients train in their SuperNodes. Nodes may come, go and come again: each is asked once who lives there.

    Args:
        grid: Flower's way to the nodes.
        timeout: seconds to wait for answers; who has not answered by then is missing in that round.
        expected: returns names, shapes and types of the tensors that a client is to upload.
        method: how clients train; a node whose own is another does not join.

    Attributes:
        run: the run's name, under which clients keep their states.
        answered: of every client, the last round of which there is an answer; 0 for none.
        refused: why uploads of the round before were refused, by client; its node is told with its next reply.
        losses: sum of the training loss over samples, and number of samples, of every client since it was last emptied.
    """

    def __init__(self, grid: Grid, timeout: float, expected: Callable[[int], Layout], method: ConfigRecord) -> None:
        self.grid, self.timeout, self.expected, self.method = grid, timeout, expected, method
        self.run = ""
        self.answered: dict[int, int] = {}
        self.losses: dict[int, tuple[float, int]] = {}
        self.refused: dict[int, str] = {}
        self._homes: dict[int, int] = {}
        self._known: set[int] = set()
        self._asked: dict[str, int] = {}  # who has been asked who lives there and not answered yet, by message
        self._silent: set[int] = set()  # who has not answered in time, and is not waited for again

    def begin(self, run: str, clients: Iterable[int], answered: Mapping[int, int] | None = None) -> None:
        """Take note of the run and of its clients, and of what they have answered if they continue."""
        self.run, self.answered = run, dict(answered or dict.fromkeys(sorted(clients), 0))

    def gather(self, clients: int) -> dict[int, ClientInfo]:
        """Wait until this many clients have joined, or time is over; return who has, by id."""
        infos: dict[int, ClientInfo] = {}
        until = time.monotonic() + self.timeout
        while True:
            infos |= self._meet(waits=False)
            if len(self._homes) >= clients or time.monotonic() > until:
                return dict(sorted(infos.items()))
            time.sleep(LOOK)

    def _meet(self, waits: bool = True) -> dict[int, ClientInfo]:
        """Ask nodes that have come who lives there, and take in those that answer; forget those that have gone.

        Args:
            waits: whether to wait for the answers of nodes that are asked for the first time.
        """
        nodes = set(self.grid.get_node_ids())
        self._known &= nodes
        self._silent &= nodes
        self._homes = {client: node for client, node in self._homes.items() if node in nodes}
        self._asked = {message: node for message, node in self._asked.items() if node in nodes}
        new = nodes - self._known - set(self._asked.values())
        questions = [self._message(node, MessageType.QUERY, RecordDict()) for node in sorted(new)]
        if questions:
            self.grid.push_messages(questions)
        self._asked |= {question.metadata.message_id: question.metadata.dst_node_id for question in questions}
        infos, first = self._answered(), new - self._silent
        until = time.monotonic() + self.timeout
        while waits and first & set(self._asked.values()) and time.monotonic() < until:
            time.sleep(LOOK)
            infos |= self._answered()
        return infos

    def _answered(self) -> dict[int, ClientInfo]:
        """Take in the nodes that have said by now who lives there."""
        infos: dict[int, ClientInfo] = {}
        replies = self.grid.pull_messages(list(self._asked)) if self._asked else ()
        answers = {self._asked.pop(reply.metadata.reply_to_message_id): _content(reply) for reply in replies}
        for node, answer in sorted(answers.items()):
            if answer is None:
                self._silent.add(node)
                continue
            try:
                here = _joined(answer, self.method)
            except (KeyError, TypeError, ValueError) as error:
                rank_zero_warn(f"Node {node} cannot join: {error}")
                continue
            self._known.add(node)
            for client in here.keys() & self._homes.keys():
                rank_zero_warn(
                    f"Client {client} is at node {node}, which is asked from now on, and at node "
                    f"{self._homes[client]}, unless that has gone; see that one node has it."
                )
            self._homes |= dict.fromkeys(here, node)  # a node that was started again may have two ids for a while
            infos |= here
            rank_zero_info(f"Node {node} has joined with {', '.join(f'client {client}' for client in here)}.")
        return infos

    def train(self, replies: Mapping[int, Payload], completed: int) -> dict[int, Upload]:
        """Let clients load their replies and train a round, all nodes at once."""
        self._meet()
        messages = {}
        for node in self._nodes_of(replies):
            records = pack({client: reply for client, reply in replies.items() if self._homes.get(client) == node})
            records["round"] = self._order(completed)
            here = clients_in(records)
            records["refused"] = ConfigRecord({str(c): self.refused.pop(c) for c in here if c in self.refused})
            messages[node] = self._message(node, MessageType.TRAIN, records, here, str(completed + 1))
        answers = dict(self._ask(messages))
        return {client: self._upload(client, answers, completed) for client in replies}

    def _upload(self, client: int, answers: Mapping[int, RecordDict | str], completed: int) -> Upload:
        if client not in self._homes:
            return UploadError(f"Client {client}: no node has it.")
        answer = answers.get(self._homes[client])
        if answer is None:
            return UploadError(f"Client {client}: its node has not answered within {self.timeout:g} s.")
        if isinstance(answer, str):
            return UploadError(f"Client {client}: its node could not train it. {answer}")
        try:
            if wrong := self._misplaced(answer, completed):
                return UploadError(f"Client {client}: its node's answer is {wrong}.")
            if trouble := answer.config_records["troubles"].get(str(client)):
                self.answered[client] = completed + 1
                words: Any = trouble
                return UploadError(*map(str, words))
            upload = unpack(answer, client, self.expected(client))
            loss: Any = answer.metric_records["losses"][str(client)]
            total, n = loss
            of_samples = float(total), int(n)
        except UploadError as error:
            return error
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            return UploadError(f"Client {client}: its node's answer is not whole ({error!r}).")
        self.answered[client] = completed + 1
        self.losses[client] = of_samples
        return upload

    def _order(self, completed: int) -> ConfigRecord:
        """Return what a message is about; its answer repeats it."""
        return ConfigRecord({"run": self.run, "completed": completed})

    def _misplaced(self, answer: RecordDict, completed: int) -> str:
        """Return which other round or run an answer is of, if it is: a node may send again what it has sent before."""
        said = answer.config_records["round"]
        if said["run"] != self.run:
            return "of another run"
        if type(before := said["completed"]) is not int or before != completed:
            return f"of round {before + 1 if type(before) is int else '?'}, not of round {completed + 1}"
        return ""

    def evaluate(self, fresh: Mapping[int, Payload], completed: int) -> tuple[list[Scored], dict[str, bool]]:
        """Let all clients score their models on their test data.

        Args:
            fresh: of clients that have never trained, what they load first.
            completed: number of rounds before.

        Returns:
            The scores, by client; and of metrics that say so, whether higher is better.
        """
        self._meet()
        messages = {}
        for node in self._nodes_of(self.answered):
            here = [client for client in self.answered if self._homes.get(client) == node]
            records = pack({client: fresh[client] for client in here if client in fresh})
            records["round"] = self._order(completed)
            messages[node] = self._message(node, MessageType.EVALUATE, records, here)
        scores: list[Scored] = []
        higher_is_better: dict[str, bool] = {}
        for node, answer in self._ask(messages):
            if isinstance(answer, str):
                rank_zero_warn(f"Node {node} cannot score its clients: {answer}")
                continue
            try:
                if wrong := self._misplaced(answer, completed):
                    raise ValueError(f"they are {wrong}")
                directions = {name: bool(up) for name, up in answer.config_records["higher_is_better"].items()}
                of_node = [_scored(name, record) for name, record in answer.metric_records.items()]
                if others := [client for client, *_ in of_node if self._homes.get(client) != node]:
                    raise ValueError(f"client {others[0]} is not its own")
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                rank_zero_warn(f"Node {node}: its scores are not whole ({error!r}).")
                continue
            higher_is_better |= directions
            scores += of_node
        return sorted(scores, key=lambda score: score[0]), higher_is_better

    def _nodes_of(self, clients: Iterable[int]) -> list[int]:
        return sorted({self._homes[client] for client in clients if client in self._homes})

    def _message(
        self, node: int, kind: str, records: RecordDict, clients: Iterable[int] = (), round: str = ""
    ) -> Message:
        records["answered"] = ConfigRecord({str(client): self.answered[client] for client in clients})
        # Nobody needs it later: a node that comes back does not train a round of the past.
        return Message(records, node, kind, ttl=self.timeout, group_id=round)

    def _ask(self, messages: Mapping[int, Message]) -> Iterator[tuple[int, RecordDict | str]]:
        """Send messages, wait; yield what nodes have answered, or what was wrong, in the order of their ids."""
        if not messages:
            return
        replies = self.grid.send_and_receive(list(messages.values()), timeout=self.timeout)
        answers = {reply.metadata.reply_to_message_id: reply for reply in replies}
        for node, message in sorted(messages.items()):
            answer = answers.get(message.metadata.message_id)
            if answer is not None and (content := _content(answer)) is not None:
                yield node, content


def _content(answer: Message) -> RecordDict | str | None:
    """Return what a node has answered, or what was wrong; None where it has not answered in time."""
    if answer.has_content():
        return answer.content
    return None if answer.error.code in EXPIRED else RAISED.sub(r"\1: \2", answer.error.reason.strip())


def _joined(answer: RecordDict | str, method: ConfigRecord) -> dict[int, ClientInfo]:
    """Return the clients of a node, as it introduces them; see that they train as the server has it."""
    if isinstance(answer, str):
        raise ValueError(answer)
    own = answer.config_records.get("method")
    if own is None:
        raise ValueError("it has another version of lit-pfl")
    if own != method:
        raise ValueError(
            f"it trains by {own['name']} for {own['local_epochs']} epochs a round, and the server has "
            f"{method['name']} for {method['local_epochs']}"
        )
    samples: Any = answer.metric_records["samples"]
    infos = {client: ClientInfo(samples[str(client)], unpack(answer, client)) for client in clients_in(answer)}
    for client, info in infos.items():
        check_samples(client, info.num_samples)
    return infos


def _scored(name: str, record: Mapping[str, Any]) -> Scored:
    client, model = name.split("/")
    values = {metric: value for metric, value in record.items() if metric != "n"}
    if wrong := [metric for metric, value in values.items() if isinstance(value, list)]:
        raise ValueError(f"{wrong[0]} is not a number")
    return int(client), model, int(record["n"]), values
