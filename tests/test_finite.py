import pytest
import torch

from lit_pfl.core.payload import all_finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_one_bad_value_is_seen_among_others(bad, dtype):
    good = [torch.randn(3, 4), torch.arange(5), torch.randn(2, dtype=torch.float64), torch.empty(0)]
    tensor = torch.zeros(10, dtype=dtype)
    assert all_finite([*good, tensor])
    tensor[7] = bad
    assert not all_finite([*good, tensor])


def test_numbers_of_one_byte_are_looked_at():
    values = torch.tensor([448.0, 448.0]).to(torch.float8_e4m3fn)
    assert all_finite([values])
    assert not all_finite([torch.tensor([float("nan"), 1]).to(torch.float8_e4m3fn)])


def test_infinities_of_both_signs_do_not_cancel():
    assert not all_finite([torch.tensor([float("inf"), -float("inf")])])


def test_complex_numbers_are_looked_at():
    good, bad = torch.ones(3, dtype=torch.complex64), torch.tensor([1, complex(0, float("nan"))])
    assert all_finite([good, good.conj()])
    assert not all_finite([bad])
    assert not all_finite([bad.conj()])


def test_nothing_is_finite():
    assert all_finite([])


def test_half_precision_that_adds_up_beyond_its_own_range():
    assert all_finite([torch.full((10,), 60000.0, dtype=torch.float16)])
