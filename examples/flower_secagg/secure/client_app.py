"""What every SuperNode runs: a client of lit-pfl, and Flower's mod, which masks what the client uploads."""

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp

from lit_pfl.core import Payload
from lit_pfl.errors import UploadError
from lit_pfl.links.flower.clients import Node, quiet_trainer, same_everywhere
from lit_pfl.links.flower.messages import pack, unpack
from lit_pfl.links.flower.plan import Plan
from secure.options import Masking
from secure.task import data, method


class MaskedClient(NumPyClient):
    """Trains by the method, as without secure aggregation, and returns arrays, as Flower's mod expects them."""

    def __init__(self, context: Context) -> None:
        config, plan = context.run_config, Plan.of(context.run_config)
        self.id, self.masking = int(context.node_config["clients"]), Masking.of(config, plan)
        prototype = same_everywhere(method, config, plan)
        self.node = Node(prototype, {self.id: data(context)}, plan, context, quiet_trainer(), {})
        joined = self.node.join()
        self.initial = unpack(joined, self.id)
        self.samples = int(joined.metric_records["samples"][str(self.id)])

    def fit(self, parameters, config):
        """Train a round from the common model; return the upload, which the mod masks, and its weight."""
        answer = self.node.train(self._message(parameters, config))
        if trouble := answer.config_records["troubles"].get(str(self.id)):
            raise UploadError(*trouble)
        upload = unpack(answer, self.id)
        weight = 1 if config["uniform"] else self.samples
        self._check(upload, weight / (1 if config["uniform"] else self.masking.largest))
        return [upload[name].double().numpy() for name in self.initial], weight, {}

    def evaluate(self, parameters, config):
        """Score the client's models on its test data."""
        answer = self.node.evaluate(self._message(parameters, config))
        scores = {model.split("/")[1]: record for model, record in answer.metric_records.items()}
        [n] = {int(record["n"]) for record in scores.values()}
        return 0.0, n, {f"{model}/acc": float(record["acc"]) for model, record in scores.items()}

    def _message(self, parameters: list[np.ndarray], config) -> RecordDict:
        """Return what the server sends without secure aggregation."""
        pairs = zip(self.initial.items(), parameters, strict=True)
        reply = Payload({name: torch.from_numpy(array).to(tensor.dtype) for (name, tensor), array in pairs})
        records = pack({self.id: reply})
        records["round"] = ConfigRecord({"run": config["run"], "completed": config["completed"]})
        records["answered"] = ConfigRecord({str(self.id): config["answered"]})
        return records

    def _check(self, upload: Payload, share: float) -> None:
        """Refuse to send what would be clipped: nobody could see it afterwards."""
        if share > 1:
            raise UploadError(
                f"Client {self.id} has {self.samples} training samples; run-config largest-samples must be that many."
            )
        for name, tensor in upload.items():
            if (most := float(tensor.abs().max()) * share) > self.masking.clip:
                raise UploadError(
                    f"Client {self.id}: tensor {name!r} reaches {most:.4g}, weighted; run-config clipping-range must be"
                    " larger.",
                    name,
                )


def client_fn(context: Context) -> Client:
    """Return the client of this node."""
    return MaskedClient(context).to_client()


app = ClientApp(client_fn, mods=[secaggplus_mod])
