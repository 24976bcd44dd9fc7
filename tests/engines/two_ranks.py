"""What several processes tell each other, checked in every one of them.

torchrun --nproc-per-node 2 two_ranks.py
"""

import os

import numpy as np
import torch
from torch import Tensor

from lit_pfl import Payload
from lit_pfl.engines.parcels import alike, of_all_ranks
from lit_pfl.engines.processes import Processes
from lit_pfl.engines.ranks import ManyRanks
from lit_pfl.errors import RankError, UploadError
from lit_pfl.low_rank import LowRank


def tensors_of(rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rank)
    picture = torch.randn(2, 3, 4, 5, generator=draw).contiguous(memory_format=torch.channels_last)
    whole = torch.arange(rank, rank + 7)
    return [
        picture, whole, torch.tensor(rank), torch.empty(0, 3), picture.transpose(0, 1)[:, :1], torch.tensor([True]),
        torch.tensor([rank, -0.0]).bfloat16(), picture,
    ]  # fmt: skip


def check_exchange(ranks: ManyRanks) -> None:
    for only_to in (None, 0, 1):
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
    assert ranks.merged({ranks.rank + 2: 0.1, -ranks.rank: float("inf")}) == {
        -1: float("inf"),
        0: float("inf"),
        2: 0.1,
        3: 0.1,
    }
    states = ranks.states({"mine": {ranks.rank: torch.tensor([ranks.rank])}})
    assert len(states) == (2 if ranks.rank == 0 else 1)
    assert states[-1]["mine"] == {1: torch.tensor([1])}


def check_uploads(ranks: ManyRanks) -> None:
    sparse = Payload({"u": torch.full((3,), float(ranks.rank)), "mu": torch.tensor([0.0, 0.0, 1.0])}, ["mu"])
    low_rank = Payload({"a": torch.ones(2)}, low_rank={"w": LowRank(torch.ones(4, 1), torch.ones(1, 4), (4, 4))})
    own = {ranks.rank: sparse, ranks.rank + 2: low_rank, ranks.rank + 4: UploadError(f"no {ranks.rank}")}
    uploads = of_all_ranks(ranks, own)
    assert list(uploads) == [0, 1, 2, 3, 4, 5]
    for rank in (0, 1):
        first, second, error = (uploads[rank + offset] for offset in (0, 2, 4))
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
    assert shared["images"][3, 4] == (-1 if ranks.one_machine or ranks.rank == 0 else 304)


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


if __name__ == "__main__":
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def group() -> Processes:
        return Processes(rank, size, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=60)

    for one_machine in (True, False):
        ranks = ManyRanks(group(), torch.device("cpu"))
        assert ranks.one_machine
        assert ranks.neighbours == [0, 1]
        if not one_machine:
            ranks.one_machine, ranks.neighbours = False, [rank]
        check_exchange(ranks)
        check_uploads(ranks)
        check_one_copy(ranks)
        check_failure(ranks)
