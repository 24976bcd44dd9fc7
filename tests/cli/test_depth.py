"""The configuration that suggests a sharing depth."""

import numpy as np
import yaml

from cli.typed import ROOT, TINY, rows
from lit_pfl.cli import main

DEPTH = ["--config", str(ROOT / "configs/depth.yaml")]


def test_the_depth_is_where_the_neurons_preferences_spread(tmp_path, notes):
    few = ["--trainer.max_epochs", "1", "--trainer.callbacks.batches", "1", f"--trainer.logger.save_dir={tmp_path}"]
    main(["fit", *TINY, *DEPTH, *few])
    folder = tmp_path / "depth/version_0"
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    assert model["init_args"]["factorization"] is None  # SimFed's
    layers, neurons = rows(folder / "features.csv"), rows(folder / "preferences.csv")
    assert {row["client"] for row in layers} == {"0"}  # one node alone, whatever the configuration says
    assert len(layers) == 8  # ResNet-9's convolutions; the classifier's neurons are the classes
    expected = []
    for layer in layers:
        own = [row for row in neurons if row["layer"] == layer["layer"]]
        assert len(own) == int(layer["neurons"])
        shares = np.array([[float(row[f"class_{c}"]) for c in range(10)] for row in own])
        tops = [int(row.argmax()) if row.any() else -1 for row in shares]
        assert [int(c) for c in layer["top_classes"].split()] == tops
        shares = shares[shares.sum(1) > 0]
        np.testing.assert_allclose(shares.sum(1), 1)
        expected.append(np.mean([np.linalg.norm(row - shares.mean(0)) for row in shares]))
        np.testing.assert_allclose(float(layer["total_variance"]), expected[-1])
    middle = (min(expected) + max(expected)) / 2
    depth = max(1, next(i for i, variance in enumerate(expected) if variance >= middle))
    [said] = [message for message in notes.messages if "total variance" in message]
    assert said.endswith(f"depth={depth}.")
    assert all(f"{variance:.3f}" in said for variance in expected)
