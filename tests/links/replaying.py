"""A ClientApp of nodes one of which sends again what it has sent before, of another round or in another run."""

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto
from sites.task import data, method

from lit_pfl.links.flower import client_app

honest = client_app(method, data)


class Replaying(ClientApp):
    """Keeps what a node has answered; the run's option ``again`` says what it sends instead.

    "3=1" is in round 3 the answer of round 1, and "2=earlier/2" one of another run, whose folder was ``earlier``.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        answer, round = honest(message, context), message.metadata.group_id
        again = dict(pair.split("=") for pair in str(context.run_config["again"]).split(",") if pair)
        if message.metadata.message_type != "train" or "replays" not in context.node_config:
            return answer
        kept = Path(str(context.node_config["folder"]), "answers")
        own = kept / Path(str(context.run_config["folder"])).name / round
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(recorddict_to_proto(answer.content).SerializeToString())
        if round not in again:
            return answer
        source = kept / again[round] if "/" in again[round] else own.parent / again[round]
        return Message(recorddict_from_proto(Proto.FromString(source.read_bytes())), reply_to=message)


app = Replaying()
