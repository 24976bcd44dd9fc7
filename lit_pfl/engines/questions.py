"""What clients are asked where they live. Each is a function of a module, so that it can be sent to another process."""

from dataclasses import replace
from typing import Any

from lit_pfl.core import Client
from lit_pfl.learners.scoring import Score, Split, predictions, score
from lit_pfl.lightning_internals import show_scores


def scored(model: str, split: Split, client: Client) -> Score:
    """Return how well one of a client's models, of ``Client.evaluated``, does on its own data."""
    with client.as_evaluated(model) as learner:
        found = score(learner, getattr(client.data, split), split)
        show_scores(client.trainer, found.logged)
        return replace(found, sizes=client.sizes(model)) if found.n else found


def predicted(client: Client) -> list[Any]:
    """Return what a client's personalized model predicts on its test data, batch by batch."""
    assert client.data is not None
    with client.as_evaluated(client.evaluated[0]) as learner:
        return predictions(learner, client.data.test)
