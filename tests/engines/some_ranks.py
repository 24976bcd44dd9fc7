"""What several processes tell each other, checked in every one of them.

torchrun --nproc-per-node 2 two_ranks.py
"""

import os
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from lit_pfl import Payload
from lit_pfl.core.averaging import weighted_mean
from lit_pfl.engines.carrier import Carrier
from lit_pfl.engines.parcels import alike, of_all_ranks
from lit_pfl.engines.processes import Processes
from lit_pfl.engines.ranks import ManyRanks
from lit_pfl.engines.shared_mean import shared_mean
from lit_pfl.errors import RankError, UploadError
from lit_pfl.ops.low_rank import LowRank


def tensors_of(rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rank)
    picture = torch.randn(2, 3, 4, 5, generator=draw).contiguous(memory_format=torch.channels_last)
    whole = torch.arange(rank, rank + 7)
    return [
        picture, whole, torch.tensor(rank), torch.empty(0, 3), picture.transpose(0, 1)[:, :1], torch.tensor([True]),
        torch.tensor([rank, -0.0]).bfloat16(), picture,
    ]  # fmt: skip


def check_exchange(ranks: ManyRanks) -> None:
    for only_to in (None, 0, ranks.size - 1):
        for kept in (False, True):
            told = ranks.exchange(
                {"rank": ranks.rank, "text": "x" * 10_000 * ranks.rank}, tensors_of(ranks.rank), only_to, kept
            )
            for rank, one in enumerate(told):
                assert one.words == {"rank": rank, "text": "x" * 10_000 * rank}
                if only_to not in (None, ranks.rank) and rank != ranks.rank:
                    assert one.tensors == []
                    continue
                for tensor, expected in zip(one.tensors, tensors_of(rank), strict=True):
                    assert tensor.dtype == expected.dtype
                    assert np.array_equal(tensor.double().numpy(), expected.double().numpy())
                assert one.tensors[0].stride() == expected.stride() == tensors_of(rank)[0].stride()
                assert one.tensors[0].data_ptr() == one.tensors[-1].data_ptr()  # one tensor, sent once
    everybody = range(ranks.size)
    assert ranks.merged({-ranks.rank: 0.1, 5 + ranks.rank: float("inf")}) == {
        **{-rank: 0.1 for rank in reversed(everybody)},
        **{5 + rank: float("inf") for rank in everybody},
    }
    states = ranks.states({"mine": {ranks.rank: torch.tensor([ranks.rank])}})
    assert [state["mine"] for state in states] == [
        {rank: torch.tensor([rank])} for rank in (everybody if ranks.rank == 0 else [ranks.rank])
    ]


def check_uploads(ranks: ManyRanks) -> None:
    sparse = Payload({"u": torch.full((3,), float(ranks.rank)), "mu": torch.tensor([0.0, 0.0, 1.0])}, ["mu"])
    low_rank = Payload({"a": torch.ones(2)}, low_rank={"w": LowRank(torch.ones(4, 1), torch.ones(1, 4), (4, 4))})
    n = ranks.size
    own = {ranks.rank: sparse, ranks.rank + n: low_rank, ranks.rank + 2 * n: UploadError(f"no {ranks.rank}")}
    uploads = of_all_ranks(ranks, own)
    assert list(uploads) == list(range(3 * n))
    for rank in range(n):
        first, second, error = (uploads[rank + offset] for offset in (0, n, 2 * n))
        assert first["u"].tolist() == [rank] * 3
        assert first.sparse == {"mu"}
        assert (first.nbytes, first.elements) == (sparse.nbytes, sparse.elements)
        assert (second.nbytes, second.elements) == (low_rank.nbytes, low_rank.elements)
        assert torch.equal(second["w"], torch.ones(4, 4))
        assert str(error) == f"no {rank}"
    same = alike({k: Payload({"w": torch.ones(5), "b": torch.full((1,), k)}) for k in (0, 1, 2)})
    assert same[0]["w"] is same[1]["w"] is same[2]["w"]
    assert same[0]["b"] is not same[1]["b"]


def check_one_copy(ranks: ManyRanks) -> None:
    content = {"images": torch.arange(5000).view(50, 100), "labels": torch.arange(50), "name": "x", "none": None}
    shared = ranks.one_copy(dict(content))
    assert torch.equal(shared["images"], content["images"])
    assert (shared["name"], shared["none"]) == ("x", None)
    ranks.exchange()
    if ranks.rank == 0:
        shared["images"][3, 4] = -1  # which nobody does, but it shows whose memory it is
    ranks.exchange()
    assert shared["images"][3, 4] == (-1 if 0 in ranks.carrier.neighbours else 304)


def check_settled(ranks: ManyRanks) -> None:
    own, expected = tensors_of(ranks.rank), tensors_of(ranks.rank)
    own[0] = own[0].clone()
    ranks.settle(own)
    for tensor, before in zip(own, expected, strict=True):
        assert torch.equal(tensor, before)
    together = len(ranks.carrier.neighbours) == ranks.size
    assert own[4].data_ptr() == own[7].data_ptr()  # one is a part of the other, and stays it
    at_home = [together and number in (0, 1, 2, 5, 6) for number in range(len(own))]  # 3 is empty
    assert [ranks.carrier.place(tensor).home is not None for tensor in own] == at_home
    for tensor in (own[number] for number, settled in enumerate(at_home) if settled):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # nobody saves the others' with it
    assert own[0].stride() == expected[0].stride()
    assert ranks.carrier.place(own[0][:1]).home is None  # a part of one is none of those that live there
    for change in (0, 1):
        own[0].add_(change)
        told = ranks.exchange(tensors=[*own, torch.tensor([ranks.rank]), own[0] + 1], kept=True)
        for rank, one in enumerate(told):
            *settled, passing, further = one.tensors
            assert passing.tolist() == [rank]
            for number, (tensor, before) in enumerate(zip(settled, tensors_of(rank), strict=True)):
                assert torch.equal(tensor, before + change if number == 0 else before)
            assert torch.equal(further, settled[0] + 1)
        ranks.exchange()


def check_mean(ranks: ManyRanks) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"rows": (130, 40), "one row": (1, 7000), "picture": (6, 3, 64, 64), "small": (5,), "number": ()}

    def payload() -> Payload:
        tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        tensors["picture"] = tensors["picture"].contiguous(memory_format=torch.channels_last)
        whole = torch.randint(100, (9000,), generator=draw)
        return Payload({**tensors, "turned": torch.randn(40, 500, generator=draw).T, "whole": whole}, ["rows"])

    everybody = [payload() for _ in range(4)]
    for weights in ([0.1, 0.2, 0.3, 0.4], [0.0, 0.5, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0]):
        for names in (None, ["small", "turned", "rows"]):
            expected = weighted_mean(everybody, weights, names)
            with patch("lit_pfl.engines.shared_mean.WORTH_SHARING", 0):
                mean = shared_mean(ranks, everybody, weights, names)
            assert list(mean) == list(expected)
            assert mean.sparse == expected.sparse
            for name in mean:
                assert torch.equal(mean[name], expected[name])
                assert mean[name].stride() == expected[name].stride()
                assert mean[name].dtype == expected[name].dtype


def check_failure(ranks: ManyRanks) -> None:
    if ranks.rank == 1:
        ranks.fail("no more")
        return
    try:
        ranks.exchange("all is well")
    except RankError as error:
        assert str(error) == "Rank 1 could not go on (no more)."  # noqa: PT017
    else:
        raise AssertionError("nobody heard")


class Apart(Carrier):
    """As if only so many processes were on each machine."""

    each: int

    def _look_around(self) -> list[int]:
        seen = super()._look_around()
        assert seen == list(range(size))
        first = self.rank // self.each * self.each
        return [rank for rank in seen if first <= rank < first + self.each]


if __name__ == "__main__":
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for Apart.each in (size, 2, 1):
        group = Processes(rank, size, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=60)
        with patch("lit_pfl.engines.ranks.Carrier", Apart):
            ranks = ManyRanks(group, torch.device("cpu"))
        check_exchange(ranks)
        check_uploads(ranks)
        check_one_copy(ranks)
        check_settled(ranks)
        check_mean(ranks)
        check_failure(ranks)
