"""What W&B writes of a run without a network."""

import json
import time
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2


def finish() -> None:
    """End a run, and W&B's own process, which writes relative to the folder that it was started in."""
    wandb.finish()
    wandb.teardown()


def leveldb_records(log: bytes):
    """Cut an offline run's file into records: LevelDB's log format, in blocks of 32 KiB after a header of 7 bytes."""
    position, record = 7, b""
    while position + 7 <= len(log):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(log[position + 4 : position + 6], "little"), log[position + 6]
        record += log[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last part
            yield record
            record = b""


def records(run: Path) -> list[wandb_internal_pb2.Record]:
    """Read an offline run back. The process that writes it may be done some time after the run."""
    deadline = time.monotonic() + 60
    while True:
        found = []
        for data in leveldb_records(run.read_bytes()):
            found.append(wandb_internal_pb2.Record())
            found[-1].ParseFromString(data)
        if time.monotonic() > deadline or (found and found[-1].WhichOneof("record_type") == "exit"):
            return found
        time.sleep(0.1)


def wandb_config(run: Path) -> dict[str, Any]:
    """Return the options that a run is filtered by."""
    return {
        item.key: json.loads(item.value_json)
        for record in records(run)
        for item in [*record.run.config.update, *record.config.update]
    }


def wandb_history(run: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the rows of a run's history, and each metric's x-axis."""
    history, axes, names = [], {}, {}
    for record in records(run):
        if record.WhichOneof("record_type") == "history":
            history.append({})
            for item in record.history.item:
                *path, name = item.nested_key or [item.key]
                place = history[-1]
                for part in path:
                    place = place.setdefault(part, {})
                place[name] = json.loads(item.value_json)
        elif record.WhichOneof("record_type") == "metric":
            names[len(names) + 1] = record.metric.name
            axes[record.metric.name] = record.metric.step_metric or names.get(record.metric.step_metric_index, "")
    return history, axes


def wandb_models(run: Path) -> dict[str, list[str]]:
    """Return the files of a run's artifacts that are models, by name."""
    artifacts = [record.artifact for record in records(run) if record.WhichOneof("record_type") == "artifact"]
    return {a.name: [entry.path for entry in a.manifest.contents] for a in artifacts if a.type == "model"}
