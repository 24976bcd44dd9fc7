"""Decoding payloads is total: any bytes are one payload, or one PayloadError."""

import ctypes
import json
import math
import multiprocessing
import os
import resource
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_pfl import Payload
from lit_pfl.core.encoding import DTYPES
from lit_pfl.errors import PayloadError
from lit_pfl.ops.low_rank import LowRank, matrix_shape

MUTATIONS = int(os.environ.get("LIT_PFL_MUTATIONS", "20000"))
SMALL_ROOM = 4 << 20  # bytes for mutants of some hundred bytes: what Python and the allocator take at once
TENSOR = 1_000  # bytes that Python and PyTorch take for a tensor besides its values
REAL = [dtype for dtype in DTYPES if dtype.is_floating_point]


def of_bits(data: bytes, shape, dtype) -> torch.Tensor:
    """Return a tensor whose memory these bytes are."""
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same(a: Payload, b: Payload) -> bool:
    return set(a) == set(b) and all(
        (a[name].shape, a[name].dtype, bits(a[name])) == (b[name].shape, b[name].dtype, bits(b[name])) for name in a
    )


@st.composite
def tensors(draw, dtypes=tuple(DTYPES), fewest=0):
    """Draw tensors of any bits: NaN of every kind, -0.0, subnormal numbers."""
    dtype = draw(st.sampled_from(dtypes))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=fewest, max_size=4)))
    size = math.prod(shape) * dtype.itemsize
    return of_bits(draw(st.binary(min_size=size, max_size=size)), shape, dtype)


@st.composite
def mostly_zero(draw):
    """Draw tensors with enough zeros to be packed, and some -0.0."""
    dtype = draw(st.sampled_from(tuple(DTYPES)))
    flat = torch.zeros(draw(st.integers(0, 300)), dtype=dtype)
    for place in draw(st.lists(st.integers(0, 299), max_size=20)):
        if place < len(flat):
            flat[place] = draw(st.sampled_from([-0.0, 1.0, float("nan")])) if dtype.is_floating_point else 1
    return flat.view(-1, 1) if draw(st.booleans()) else flat


@st.composite
def in_factors(draw):
    dtype = draw(st.sampled_from(REAL))
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=5)))
    (rows, columns), rank = matrix_shape(shape), draw(st.integers(0, 3))
    return LowRank(torch.randn(rows, rank).to(dtype), torch.randn(rank, columns).to(dtype), shape)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")


@pytest.mark.seconds
@settings(max_examples=300, deadline=None, database=None)
@given(st.dictionaries(NAMES, tensors()), st.dictionaries(NAMES, mostly_zero()), st.dictionaries(NAMES, in_factors()))
def test_whatever_a_payload_holds_arrives_bit_for_bit(dense, sparse, factors):
    sparse = {"s" + name: tensor for name, tensor in sparse.items()}
    factors = {"l" + name: pair for name, pair in factors.items()}
    payload = Payload({**{"d" + name: tensor for name, tensor in dense.items()}, **sparse}, sparse, factors)
    data = payload.to_bytes()
    assert payload.nbytes == len(data)
    for arrived in (Payload.from_bytes(data), Payload.from_bytes(data, payload.layout)):
        assert same(arrived, payload)
        for name, pair in arrived.low_rank.items():
            assert bits(pair.left) == bits(factors[name].left)
            assert bits(pair.right) == bits(factors[name].right)
        assert arrived.to_bytes() == data


@settings(max_examples=300, deadline=None, database=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_a_payload_or_refused(data):
    try_decoding(data)
    try_decoding(len(data).to_bytes(8, "little") + data)


@pytest.mark.seconds
@settings(max_examples=100, deadline=None, database=None)
@given(st.dictionaries(NAMES, tensors(), min_size=1))
def test_the_bytes_are_those_that_safetensors_writes(dense):
    assert Payload(dense).to_bytes() == safetensors.torch.save(dense)


def test_the_bytes_of_every_encoding_stay_as_they_are():
    payload = Payload(
        {"b": torch.tensor([1.0, -2.0]), "mu": torch.tensor([0.0, 3.0] + [0.0] * 98), "n": torch.tensor(7)},
        ["mu"],
        {"w": LowRank(torch.ones(6, 1), torch.ones(1, 6), (6, 6))},
    )
    header = (
        b'{"__metadata__":{"sparse":"{\\"mu\\": [100]}","low_rank":"{\\"w\\": [6, 6]}"},'
        b'"n":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},'
        b'"mu#values":{"dtype":"F32","shape":[1],"data_offsets":[16,20]},'
        b'"w#left":{"dtype":"F32","shape":[6,1],"data_offsets":[20,44]},'
        b'"w#right":{"dtype":"F32","shape":[1,6],"data_offsets":[44,68]},'
        b'"mu#mask":{"dtype":"U8","shape":[13],"data_offsets":[68,81]}}'
    )
    header += b" " * (-len(header) % 8)
    body = np.int64(7).tobytes() + np.array([1, -2, 3] + [1] * 12, np.float32).tobytes() + b"\x40" + bytes(12)
    data = len(header).to_bytes(8, "little") + header + body
    assert payload.to_bytes() == data
    swapped = data.replace(b'"sparse":"{\\"mu\\": [100]}","low_rank":"{\\"w\\": [6, 6]}"',
                           b'"low_rank":"{\\"w\\": [6, 6]}","sparse":"{\\"mu\\": [100]}"')  # fmt: skip
    assert swapped != data  # as safetensors wrote it, in one order or the other
    assert same(Payload.from_bytes(swapped), payload)


@pytest.mark.parametrize("dtype", REAL)
def test_negative_zeros_of_a_sparse_tensor_arrive(dtype):
    tensor = torch.zeros(100, dtype=dtype)
    tensor[[3, 70]], tensor[9] = -0.0, 2.5
    payload = Payload({"mu": tensor}, ["mu"])
    arrived = Payload.from_bytes(payload.to_bytes())
    assert arrived["mu"].signbit().nonzero().flatten().tolist() == [3, 70]
    assert same(arrived, payload)
    assert payload.nbytes == len(payload.to_bytes())
    assert payload.sizes["mu"] == 13 + 3 * dtype.itemsize
    assert payload.elements == arrived.elements == 1  # as papers count


# ------------------------------------------------------------------------------------------------------ what is refused


def raw(header: dict | str, body: bytes = b"") -> bytes:
    text = header if isinstance(header, str) else json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    encoded = text.encode("utf-8", "surrogatepass")
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + body


def entry(dtype, shape, start, end):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def sparse(shape, mask: bytes, values: list[float], **more) -> bytes:
    end = 4 * len(values)
    header = {
        "__metadata__": {"sparse": json.dumps({"w": list(shape)})},
        "w#values": entry("F32", [len(values)], 0, end),
        "w#mask": entry("U8", [len(mask)], end, end + len(mask)),
        **more,
    }
    return raw(header, np.array(values, np.float32).tobytes() + mask)


def factors(shape, rank, rows, columns, dtype="F32", size=4) -> bytes:
    first = size * rows * rank
    last = first + size * rank * columns
    header = {
        "__metadata__": {"low_rank": json.dumps({"w": list(shape)})},
        "w#left": entry(dtype, [rows, rank], 0, first),
        "w#right": entry(dtype, [rank, columns], first, last),
    }
    return raw(header, bytes(last))


F32 = entry("F32", [2], 0, 8)
REFUSED = {
    "pickle": (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00.", "ends within its header"),
    "one byte": (b"\x00", "ends within its header"),
    "no header": (bytes(8), "not as payloads write it"),
    "no tensor": (raw({}), "not as payloads write it"),
    "deep": (raw("[" * 200_000), "not as payloads write it"),
    "deep entry": (raw('{"w":' * 100_000), "not as payloads write it"),
    "long number": (raw('{"w":{"dtype":"F32","shape":[' + "9" * 100_000 + "]"), "not as payloads write it"),
    "many dimensions": (raw({"w": entry("F32", [1] * 100, 0, 4)}, bytes(4)), "not as payloads write it"),
    "negative": (raw({"w": entry("F32", [-2], 0, 8)}, bytes(8)), "not as payloads write it"),
    "not utf-8": (raw({"w": F32}, bytes(8)).replace(b'"w"', b'"\xff"'), "not as payloads write it"),
    "surrogate": (raw('{"\\ud800":' + json.dumps(F32) + "}", bytes(8)), "not as payloads write it"),
    "infinite": (raw({"w": entry("F32", [float("inf")], 0, 8)}, bytes(8)), "not as payloads write it"),
    "type": (raw({"w": entry("F8_E5M2", [8], 0, 8)}, bytes(8)), "not as payloads write it"),
    "spaces": (raw(json.dumps({"w": F32}), bytes(8)), "not as payloads write it"),
    "escaped": (raw({"w": F32}, bytes(8)).replace(b'{"w":', b'{"\\u0077":'), "ends within its header|not as"),
    "twice": (raw('{"w":' + json.dumps(F32) + ',"w":' + json.dumps(F32) + "}", bytes(8)), "not as payloads write it"),
    "gap": (raw({"w": entry("F32", [2], 8, 16)}, bytes(16)), "not as payloads write it"),
    "overlap": (raw({"a": F32, "b": F32}, bytes(8)), "not as payloads write it"),
    "order": (raw({"b": F32, "a": entry("F32", [2], 8, 16)}, bytes(16)), "not as payloads write it"),
    "metadata": (raw({"__metadata__": {"format": "pt"}, "w": F32}, bytes(8)), "not as payloads write it"),
    "no metadata": (raw({"__metadata__": {}, "w": F32}, bytes(8)), "not as payloads write it"),
    "more bytes": (raw({"w": F32}, bytes(9)), "has 73 bytes; by its header it must have 72"),
    "fewer bytes": (raw({"w": F32}, bytes(7)), "has 71 bytes; by its header it must have 72"),
    "too large": (raw({"w": entry("F32", [0, 2**31, 2**31], 0, 0)}), "larger than any memory"),
    "bool": (raw({"w": entry("BOOL", [2], 0, 2)}, b"\x01\x02"), "'w' holds a bool that is neither"),
    "claimed sparse": (sparse([10**9], bytes(5), []), "not as payloads write it"),
    "no mask": (raw({"__metadata__": {"sparse": '{"w": [100]}'}, "w": F32}, bytes(8)), "not as payloads write it"),
    "values": (sparse([100], b"\x40" + bytes(12), [1, 2]), "'w' has a mask that does not fit its values"),
    "bits beyond": (sparse([100], bytes(12) + b"\x01", [1]), "'w' has a mask that does not fit its values"),
    "zero value": (sparse([100], b"\x40" + bytes(12), [0]), "'w' has a mask that does not fit its values"),
    "saves nothing": (sparse([2], b"\xc0", [1, 2]), "'w' is sparse although that saves nothing"),
    "dense too": (sparse([100], b"\x40" + bytes(12), [1], w=entry("U8", [0], 17, 17)), "'w' is encoded twice"),
    "claimed factors": (factors([10**5, 10**5], 0, 10**5, 10**5), "more than 16777216"),
    "shape of factors": (factors([5, 7], 1, 6, 7), "not as payloads write it"),
    "vector of factors": (factors([9], 1, 3, 3), "not as payloads write it"),
    "factors save nothing": (factors([2, 2], 1, 2, 2), "'w' is in factors although that saves nothing"),
    "factors of bools": (factors([6, 6], 1, 6, 6, "BOOL", 1), "'w' is in factors of torch.bool"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_payload_encodes_is_refused(name):
    data, message = REFUSED[name]
    with pytest.raises(PayloadError, match=message):
        decoded_in_bounds(data)


def test_what_is_refused_is_well_formed_but_for_one_thing():
    Payload.from_bytes(raw({"w": F32}, bytes(8)))
    Payload.from_bytes(sparse([100], b"\x40" + bytes(12), [1]))
    Payload.from_bytes(factors([6, 6], 1, 6, 6))


def test_what_is_not_expected_is_refused_before_it_is_made():
    data = Payload({"b": torch.ones(2)}, low_rank={"w": LowRank(torch.ones(9, 1), torch.ones(1, 9), (9, 9))}).to_bytes()
    right = {"b": ((2,), torch.float32), "w": ((9, 9), torch.float32)}
    Payload.from_bytes(data, right, limit=0)
    with pytest.raises(PayloadError, match="lacks tensor 'c'"):
        Payload.from_bytes(data, {**right, "c": ((2,), torch.float32)})
    with pytest.raises(PayloadError, match="nobody asked for tensor 'w'"):
        Payload.from_bytes(data, {"b": right["b"]})
    with pytest.raises(PayloadError, match=r"'b' is torch.float32 \(2,\); it must be torch.float16 \(2,\)"):
        Payload.from_bytes(data, {**right, "b": ((2,), torch.float16)})
    with pytest.raises(PayloadError, match="lacks tensor 'b'"):
        Payload.from_bytes(b"", right)
    with pytest.raises(PayloadError, match="have 81 elements, more than 80"):
        Payload.from_bytes(data, limit=80)
    with pytest.raises(PayloadError, match=r"'w' is torch.float32 \(100000, 100000\); it must be"):
        Payload.from_bytes(factors([10**5, 10**5], 0, 10**5, 10**5), {"w": right["w"]})


def test_a_tensor_cannot_have_the_name_of_the_metadata():
    with pytest.raises(ValueError, match="cannot be named '__metadata__'"):
        Payload({"__metadata__": torch.ones(1)})


# -------------------------------------------------------------------------------------------------------------- mutants


def try_decoding(data: bytes) -> Payload | None:
    """Decode; see that what is accepted is the one encoding of what it says."""
    try:
        payload = Payload.from_bytes(data)
    except PayloadError:
        return None
    assert payload.to_bytes() == data
    return payload


def decoded_in_bounds(data: bytes) -> Payload:
    """Decode; see that it takes neither long nor much memory of Python's, in which all bytes are first."""
    tracemalloc.start()
    began = time.perf_counter()
    try:
        return Payload.from_bytes(data)
    finally:
        seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 100_000 + 40 * len(data), f"{peak} bytes for a message of {len(data)}"
        assert seconds < 1  # tracing takes most of it


def seeds() -> list[bytes]:
    torch.manual_seed(0)
    one = {"a": torch.randn(3, 4), "größe": torch.arange(5), 'q"': torch.ones(2, dtype=torch.bool)}
    mu = torch.zeros(200)
    mu[::17] = torch.randn(12)
    low_rank = {"w": LowRank(torch.randn(12, 1), torch.randn(1, 9), (4, 3, 3, 3))}
    return [
        Payload(one).to_bytes(),
        Payload({**one, "mu": mu}, ["mu"]).to_bytes(),
        Payload({"nu": mu.bfloat16(), "mu": mu.bool()}, ["nu", "mu"]).to_bytes(),
        Payload(one, low_rank=low_rank).to_bytes(),
        Payload({"mu": mu, "e": torch.empty(0, 3)}, ["mu"], low_rank).to_bytes(),
    ]


DICTIONARY = [b"#mask", b"#left", b"#values", b"__metadata__", b"sparse", b"low_rank", b"F32", b"BOOL", b"BF16", b"I64",
              b"[]", b"{}", b"null", b"-1", b"1e9", b"99999999999999999999", b"[[[[[", b'"', b"\\", b"\\u0000", b"\xff",
              b",", b":", b"NaN", b"true", b"\x00"]  # fmt: skip


def mutated(data: bytes, random: Random, others: list[bytes], within: int = 1 << 40) -> bytes:
    """Return a mutant, whose first bytes alone may be changed."""
    mutant = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        at, length = random.randrange(min(len(mutant), within) + 1), random.choice([1, 1, 2, 8, 30])
        match random.randrange(8):
            case 0:
                mutant[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                del mutant[at : at + length]
            case 2:
                mutant[at:at] = random.choice(DICTIONARY)
            case 3:
                mutant[at : at + length] = random.choice(DICTIONARY)
            case 4:
                mutant[at:at] = mutant[at : at + length]
            case 5:
                other = random.choice(others)
                start = random.randrange(len(other))
                mutant[at : at + length] = other[start : start + length]
            case 6 if mutant:
                mutant[at % len(mutant)] ^= 1 << random.randrange(8)
            case _:  # another number, and a length of the header that fits
                digits = [i for i, byte in enumerate(mutant[:4096]) if 48 <= byte < 58] or [0]
                mutant[(place := random.choice(digits)) : place + 1] = str(random.choice([0, 1, 9, 10, 2**31])).encode()
                end = mutant.rfind(b"}") + 1
                end += -end % 8
                mutant[:8] = max(end - 8, 0).to_bytes(8, "little")
        if not mutant:
            break
    return bytes(mutant)


def large() -> dict[str, Payload]:
    """Return payloads that are large beside what Python and PyTorch take in steps; each has another worst part."""
    mu = torch.zeros(1_000_000)
    mu[::20] = torch.randn(50_000)
    return {
        "dense": Payload({f"layer{i}.weight": torch.randn(100, 4) for i in range(200)}),
        "sparse": Payload({"mu": mu, "zeros": torch.zeros(1_000_000)}, ["mu", "zeros"]),
        "factors": Payload({}, low_rank={"w": LowRank(torch.randn(1000, 30), torch.randn(30, 1000), (1000, 1000))}),
        "many": Payload({f"weight{i}": torch.ones(1) for i in range(4_000)}),
    }


@contextmanager
def no_more_than(room: int) -> Iterator[None]:
    """Let the process have so many bytes more than it has now, whoever asks for them."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + room, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def decode_in_little_memory(mutations: int) -> None:
    """Decode small mutants, and large ones, without the memory for more than they may take."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-1, 0)  # M_TRIM_THRESHOLD: what is freed goes back
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is large comes from the system
    random, known = Random(int(os.environ.get("LIT_PFL_MUTATIONS_SEED", "0"))), seeds()
    for data in known * 100:
        try_decoding(data)
    slowest, accepted = 0.0, 0
    with no_more_than(SMALL_ROOM):
        for _ in range(mutations):
            data = mutated(random.choice(known), random, known)
            began = time.thread_time()  # of this thread alone, whatever else the machine does
            accepted += try_decoding(data) is not None
            slowest = max(slowest, time.thread_time() - began)
    print(f"{mutations} mutants, {accepted} payloads, the slowest took {1e3 * slowest:.1f} ms", flush=True)
    assert accepted < mutations / 2  # of a flipped bit of a weight nobody can know
    assert slowest < 0.1
    for name, payload in large().items():
        data, layout, number = payload.to_bytes(), payload.layout, mutations // 1000
        header, expected = 8 + int.from_bytes(data[:8], "little"), 0
        for tensor in payload.values():
            expected += tensor.numel() * tensor.element_size() + TENSOR
        accepted = 0
        for i in range(number):
            mutant = mutated(data, random, [data], header if i % 8 else len(data))
            with suppress(PayloadError), no_more_than(10 * len(mutant) + expected):
                Payload.from_bytes(mutant, layout)
                accepted += 1
        print(
            f"{number} mutants, {name}, of {len(data)} bytes; expected are {expected}; {accepted} payloads", flush=True
        )


@pytest.mark.seconds
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_mutants_are_payloads_or_refused_in_little_memory():
    process = multiprocessing.get_context("spawn").Process(target=decode_in_little_memory, args=(MUTATIONS,))
    process.start()
    process.join()
    assert process.exitcode == 0  # what was wrong is in its output


def test_a_small_mutant_takes_little_memory():
    random, known = Random(1), seeds()
    for _ in range(300):
        data = mutated(random.choice(known), random, known)
        with suppress(PayloadError):
            decoded_in_bounds(data)
