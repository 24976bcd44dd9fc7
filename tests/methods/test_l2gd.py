"""L2GD against its formula, and what it is at both ends."""

import numpy as np
import torch
from quadratic import Quadratics, equal, flat, quadratic

from lit_pfl.methods import L2GD
from tiny import client, run


def test_rounds_equal_the_formula():
    problem = Quadratics.random()
    federation = run(quadratic(L2GD, problem, mix=0.3), equal(4), rounds=4, local_epochs=3)
    points = np.stack([problem.start] * 4)
    for _ in range(4):
        points = 0.7 * points + 0.3 * points.mean(0)
        for k in range(4):
            for _ in range(3):
                points[k] = points[k] - 0.1 * problem.gradient(k, points[k])
    for k, member in federation.clients.items():
        np.testing.assert_allclose(flat(member.learner.state_dict()), points[k], rtol=1e-10)


def test_mixing_leaves_the_mean_where_it_is():
    federation = run(quadratic(L2GD, Quadratics.random(), mix=0.4), equal(4), rounds=2)
    server = federation.coordinator.server
    for k, member in federation.clients.items():
        member.download(server.reply(k))
    mean = np.mean([flat(member.learner.state_dict()) for member in federation.clients.values()], axis=0)
    np.testing.assert_allclose(mean, flat(server.model), rtol=1e-12)


def test_counters_of_batch_norm_are_averaged_whole():
    federation = run(client(L2GD, norm_stats="averaged"), rounds=2, evaluate="after")
    assert federation.clients[0].backbone.body[1].num_batches_tracked.dtype == torch.int64
