"""Payloads: their exact size, and what comes out of their bytes."""

import numpy as np
import pytest
import safetensors.torch
import torch

from lit_pfl import Payload
from lit_pfl.ops.low_rank import LowRank, as_matrix, as_weight


def random(shape, dtype=torch.float32, density=1.0):
    values = torch.randint(1, 100, shape) * (torch.rand(shape) < density)
    return (values / 7 if dtype.is_floating_point else values).to(dtype)


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))


def assert_travels(payload: Payload) -> Payload:
    """See that a payload's size is exact and that it arrives bit for bit."""
    data = payload.to_bytes()
    assert payload.nbytes == len(data)
    arrived = Payload.from_bytes(data)
    assert set(arrived) == set(payload)
    for name, tensor in payload.items():
        assert_same_bits(arrived[name], tensor)
        assert arrived[name].is_contiguous()
    return arrived


def encoded_names(payload: Payload) -> set[str]:
    return set(safetensors.torch.load(payload.to_bytes()))


def test_an_empty_payload_is_nothing():
    payload = Payload({})
    assert payload.nbytes == payload.elements == len(payload.to_bytes()) == 0
    assert len(Payload.from_bytes(b"")) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.03, 0.5, 0.86, 0.87, 0.96, 0.97, 1.0])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (9,), (40, 50)])
def test_a_sparse_tensor_travels_in_the_smaller_encoding(shape, density, dtype):
    tensor = random(shape, dtype, density)
    nonzeros = int((tensor != 0).sum())
    payload = Payload({"mu": tensor}, sparse=["mu"])
    assert_travels(payload)
    assert payload.elements == nonzeros
    masked = (tensor.numel() + 7) // 8 + nonzeros * tensor.element_size()
    dense = tensor.numel() * tensor.element_size()
    assert encoded_names(payload) == ({"mu#mask", "mu#values"} if masked < dense else {"mu"})
    assert len(payload.to_bytes()) <= 300 + min(masked, dense)


def test_only_tensors_marked_as_sparse_are_packed():
    zeros = torch.zeros(800)
    payload = Payload({"u": zeros, "mu": zeros}, sparse=["mu", "not there"])
    arrived = assert_travels(payload)
    assert encoded_names(payload) == {"u", "mu#mask", "mu#values"}
    assert payload.elements == 800
    assert 3300 < payload.nbytes < 3700
    assert arrived.sparse == {"mu"}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "rearrange",
    [
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.transpose(0, 1),
        lambda t: t[::2, 1:],
        lambda t: t[:1].expand(6, -1, -1, -1),
        lambda t: t.clone().requires_grad_(),
        lambda t: torch.nn.Parameter(t),
    ],
    ids=["channels_last", "transposed", "slice", "expanded", "with gradient", "parameter"],
)
def test_any_memory_lay_out_arrives_with_its_values(rearrange, sparse):
    tensor = rearrange(random((6, 4, 5, 3), density=0.2 if sparse else 1.0))
    arrived = Payload.from_bytes((payload := Payload({"w": tensor}, ["w"] if sparse else [])).to_bytes())
    assert payload.nbytes == len(payload.to_bytes())
    assert_same_bits(arrived["w"], tensor.detach().contiguous())


def test_tensors_that_share_memory_arrive_apart():
    rows = random((4, 30))
    arrived = assert_travels(Payload({"a": rows[0], "again": rows[0], "all": rows, "column": rows[:, 2]}))
    arrived["a"].zero_()
    assert_same_bits(arrived["again"], rows[0])


def test_a_payload_holds_tensors_by_reference_and_its_clone_does_not():
    tensor = torch.ones(3, requires_grad=True)
    payload = Payload({"w": tensor}, sparse=["w"])
    clone = payload.clone()
    assert payload["w"] is tensor
    with torch.no_grad():
        tensor.zero_()
    assert clone["w"].tolist() == [1, 1, 1]
    assert not clone["w"].requires_grad
    assert clone.sparse == {"w"}


def test_the_mapping_cannot_be_written_to():
    source = {"w": torch.ones(3)}
    payload = Payload(source)
    source["more"] = torch.ones(1)
    assert list(payload) == ["w"]
    with pytest.raises(TypeError):
        payload["w"] = torch.zeros(3)
    assert repr(payload) == f"Payload(1 tensors, 3 elements, {payload.nbytes} bytes)"


def test_a_name_that_the_encoding_needs_is_refused():
    with pytest.raises(ValueError, match="'n' is sparse, so 'n#mask'"):
        Payload({"n": torch.zeros(9), "n#mask": torch.zeros(9)}, sparse=["n"])
    with pytest.raises(ValueError, match="A tensor cannot be named '__metadata__'"):
        Payload({"__metadata__": torch.zeros(9)})


# ----------------------------------------------------------------------------------------------------------- low rank


def factors(rank, shape=(6, 4, 3, 3), dtype=torch.float32):
    rows, columns = as_matrix(torch.empty(shape)).shape
    return LowRank(random((rows, rank), dtype), random((rank, columns), dtype), shape)


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (5, 7, 3, 2), (5, 7, 2, 3, 4), (3, 1, 1, 1)])
def test_the_matrix_of_a_weight(shape):
    """Row (output, first half of the window), column (input, second half), each counted from its last index."""
    weight = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    matrix = as_matrix(weight)
    window = shape[2:]
    half = (len(window) + 1) // 2
    for place in np.ndindex(*shape):
        row = np.ravel_multi_index((place[0], *place[2 : 2 + half]), (shape[0], *window[:half]))
        column = np.ravel_multi_index((place[1], *place[2 + half :]), (shape[1], *window[half:]))
        assert matrix[row, column] == weight[place]
    assert torch.equal(as_weight(matrix, shape), weight)
    assert as_weight(matrix, shape).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(20, 30), (20, 10, 3), (6, 4, 3, 3), (5, 4, 3, 2, 2)])
@pytest.mark.parametrize("rank", [0, 1, 3, 7, 8, 100])
def test_a_tensor_in_factors_travels_in_the_smaller_encoding(rank, shape, dtype):
    weight = factors(rank, shape, dtype)
    dense = as_weight(weight.left @ weight.right, shape)
    payload = Payload({"b": random((3,))}, low_rank={"w": weight})
    assert_same_bits(payload["w"], dense)
    arrived = assert_travels(payload)
    rows, columns = as_matrix(dense).shape
    saves = rank * (rows + columns) < dense.numel()
    assert encoded_names(payload) == ({"w#left", "w#right", "b"} if saves else {"w", "b"})
    assert payload.elements == 3 + min(rank * (rows + columns), dense.numel())
    assert set(arrived.low_rank) == ({"w"} if saves else set())
    if saves:
        assert_same_bits(arrived.low_rank["w"].left, weight.left)
        assert_same_bits(arrived.low_rank["w"].right, weight.right)


def test_factors_in_any_memory_lay_out_make_the_same_bits():
    """What the sender holds and what the receiver decodes must not differ."""
    left, right = torch.randn(64, 8), torch.randn(8, 96)
    one = LowRank(left, right, (64, 96))
    other = LowRank(left.T.contiguous().T, right.T.contiguous().T, (64, 96))
    assert_same_bits(one.dense(), other.dense())
    assert_travels(Payload({}, low_rank={"w": other}))


def test_a_clone_has_factors_of_its_own():
    weight = factors(1)
    clone = Payload({}, low_rank={"w": weight}).clone()
    before = clone["w"].clone()
    weight.left.zero_()
    assert torch.equal(clone["w"], before)
    assert clone.low_rank["w"].left.any()


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"must be \(18, r\) and \(r, 12\)"):
        LowRank(torch.ones(18, 2), torch.ones(3, 12), (6, 4, 3, 3))
    with pytest.raises(ValueError, match="'w' is given twice"):
        Payload({"w": torch.ones(3)}, low_rank={"w": factors(1)})
    with pytest.raises(ValueError, match="'w' is given in factors, so 'w#left' and 'w#right' are taken"):
        Payload({"w#left": torch.ones(3)}, low_rank={"w": factors(1)})


def test_order_and_sparsity_can_be_told_again():
    """An encoding keeps neither the order nor what is known as sparse but travelled dense."""
    factors = LowRank(random((9, 1)), random((1, 9)), (9, 9))
    payload = Payload({"z": random((3,)), "mu": random((4,)), "a": random((2,), torch.int64)}, ["mu"], {"f": factors})
    order = ["f", "z", "mu", "a"]
    arrived = Payload.from_bytes(payload.to_bytes()).laid_out(order, ["mu"])
    assert list(arrived) == list(arrived.clone()) == list(arrived.to(torch.device("meta"))) == order
    assert (arrived.sparse, set(arrived.low_rank)) == ({"mu"}, {"f"})
    assert (arrived.nbytes, arrived.elements) == (payload.nbytes, payload.elements)
    assert_same_bits(arrived["f"], payload["f"])
    assert all(tensor.is_meta for tensor in arrived.to(torch.device("meta")).values())
    for names in (["f", "z", "mu"], [*order, "b"], [*order, "a"]):
        with pytest.raises(ValueError, match="The payload holds"):
            arrived.laid_out(names, [])


def test_others_in_the_place_of_some_tensors_and_further_ones():
    payload = Payload({"mu": torch.zeros(90), "w": torch.ones(2)}, ["mu"], {"f": factors(1), "g": factors(2)})
    changed = payload.with_({"w": torch.zeros(3), "f": torch.ones(1), "new": torch.ones(1)})
    assert set(changed) == {"mu", "w", "f", "g", "new"}
    assert len(changed["w"]) == 3
    assert (changed.sparse, set(changed.low_rank)) == ({"mu"}, {"g"})
    assert len(payload["w"]) == 2
    assert changed["mu"] is payload["mu"]


def test_bits_are_bytes_but_no_elements():
    tensors = {"w": torch.ones(3), "masks#bits": torch.arange(5, dtype=torch.uint8), "bits": torch.ones(2)}
    payload = Payload(tensors)
    assert payload.counts == {"w": 3, "masks#bits": 0, "bits": 2}
    assert payload.sizes == {"w": 12, "masks#bits": 5, "bits": 8}
    assert assert_travels(payload).counts == payload.counts


def test_what_is_not_finite_is_found_beside_a_sparse_tensor():
    payload = Payload({"graph": torch.eye(3).to_sparse(), "w": torch.tensor([torch.nan])})
    assert payload.not_finite == "w"
