"""Means of tensors in half precision, of whole numbers, and of single payloads."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_pfl.core.averaging import SMALL, mean_of_rows, weighted_mean
from lit_pfl.core.mixing import MixingServer
from lit_pfl.core.payload import Payload


class Steps(TorchDispatchMode):
    """Counts PyTorch's operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


NUMBERS = torch.linspace(-2, 2, 1001)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clients", [10, 1000])
def test_mean_of_equal_tensors_in_half_precision_is_that_tensor(dtype: torch.dtype, clients: int) -> None:
    same = Payload({"w": NUMBERS.to(dtype)})
    mean = weighted_mean([same] * clients, [1 / clients] * clients)
    assert mean["w"].dtype == dtype
    assert torch.equal(mean["w"], same["w"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mean_of_equal_rows_in_half_precision_is_these_rows(dtype: torch.dtype) -> None:
    rows, which = NUMBERS.to(dtype).view(7, -1), torch.tensor([0, 1, 2, 4, 5, 6])
    before = torch.zeros_like(rows)
    mean = mean_of_rows([(rows[which], which, 1 / 300)] * 300, before)
    assert mean.dtype == dtype
    assert torch.equal(mean[which], rows[which])
    assert not mean[3].any()


def test_mean_of_whole_numbers_is_rounded_to_the_nearest() -> None:
    payloads = [Payload({"n": torch.tensor([n, 2**40 + n])}) for n in (1, 2, 5)]
    mean = weighted_mean(payloads, [1 / 3] * 3)["n"]
    assert mean.tolist() == [3, 2**40 + 3]
    assert mean.dtype == torch.int64


def test_a_tensor_that_nobody_with_a_weight_has_is_left_out() -> None:
    some, more = Payload({"w": torch.ones(2)}), Payload({"w": torch.ones(2), "thawed": torch.ones(3)})
    assert list(weighted_mean([some, more], [1.0, 0.0], ["w", "thawed"])) == ["w"]
    assert list(weighted_mean([some, more], [0.5, 0.5], ["w", "thawed"])) == ["w", "thawed"]


def many_tensors(seed: int) -> Payload:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (7,), (), (SMALL + 1,)] * 10
    tensors = {f"{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
    return Payload({**tensors, "half": tensors["1"].half(), "n": torch.tensor([seed, 2]), "turned": torch.ones(2, 3).T})


def test_a_mean_is_that_of_every_tensor_by_itself_bit_for_bit() -> None:
    payloads, weights = [many_tensors(seed) for seed in range(4)], [0.3, 0.0, 0.6, 0.1]
    mean = weighted_mean(payloads, weights)
    assert list(mean) == list(payloads[0])
    for name, tensor in mean.items():
        alone = weighted_mean([Payload({name: one[name]}) for one in payloads], weights)[name]
        assert torch.equal(tensor, alone)
        assert (tensor.dtype, tensor.stride()) == (alone.dtype, alone.stride())
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_mixture_of_many_small_tensors_takes_no_more_steps_than_one_of_a_single_tensor() -> None:
    class Equally(MixingServer):
        def mixing_matrix(self, round: int, latest: Any) -> Tensor:
            return torch.full((len(latest), len(latest)), 1 / len(latest))

    def steps(tensors: int) -> int:
        server, counter = Equally(), Steps()
        server.latest = {}
        server.aggregate(1, {k: Payload({f"{i}": torch.ones(2) * k for i in range(tensors)}) for k in range(100)})
        server.reply(0)
        with counter:
            server.reply(1)
        return counter.count

    assert steps(20) < 2 * steps(1)
