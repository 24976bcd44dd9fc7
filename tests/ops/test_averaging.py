"""Means of tensors in half precision, of whole numbers, and of single payloads."""

import pytest
import torch

from lit_pfl.core.averaging import mean_of_rows, weighted_mean
from lit_pfl.core.payload import Payload

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
