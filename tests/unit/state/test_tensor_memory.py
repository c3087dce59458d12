"""Every kind of tensor, read and written in pieces: the bits are those of the whole, and nothing else is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from quicoll.errors import LocalError
from quicoll.numerics.buffers import memory, source, tensor_digest
from quicoll.state import tensor_memory
from quicoll.state.tensor_memory import TensorMemory, readable, writable

SHAPE = (6, 5, 4)


def drawn(dtype: str) -> Any:
    made = np.random.default_rng(7).integers(0, 255, SHAPE, np.uint8)
    return made.astype(bool) if dtype == "bool" else made.astype(dtype)


def drawn_torch(dtype: torch.dtype) -> torch.Tensor:
    bits = torch.from_numpy(np.random.default_rng(7).integers(0, 100, SHAPE, np.int64))
    return bits.to(torch.uint8).view(dtype) if dtype.itemsize == 1 and dtype.is_floating_point else bits.to(dtype)


def contiguous_grad() -> torch.Tensor:
    return torch.ones(SHAPE, requires_grad=True)


KINDS: dict[str, Callable[[], Any]] = {
    "contiguous": lambda: drawn("float32"),
    "bool": lambda: drawn("bool"),
    "complex": lambda: drawn("complex128"),
    "bfloat16 of numpy": lambda: drawn("float32").astype(ml_dtypes.bfloat16),
    "transposed": lambda: drawn("int16").T,
    "every other": lambda: drawn("float64")[::2, :, 1:],
    "backwards": lambda: drawn("uint8")[:, ::-1],
    "bfloat16 of numpy, transposed": lambda: drawn("float32").astype(ml_dtypes.bfloat16).T,
    "no dimension": lambda: np.array(3.0),
    "nothing": lambda: np.empty((3, 0), np.int32),
    "torch": lambda: drawn_torch(torch.float32),
    "torch bool": lambda: drawn_torch(torch.int64) > 50,
    "torch bfloat16": lambda: drawn_torch(torch.bfloat16),
    "torch float8": lambda: drawn_torch(torch.float8_e5m2),
    "torch transposed": lambda: drawn_torch(torch.float32).permute(2, 0, 1),
    "torch bfloat16, every other": lambda: drawn_torch(torch.bfloat16)[:, ::2],
    "torch float8, transposed": lambda: drawn_torch(torch.float8_e4m3fn).transpose(0, 2),
    "torch bool, transposed": lambda: (drawn_torch(torch.int64) > 50).transpose(0, 2),
    "torch complex, transposed": lambda: drawn_torch(torch.complex64).transpose(0, 1),
    "torch no dimension": lambda: torch.tensor(3.0),
    "torch nothing": lambda: torch.empty(3, 0),
    "torch with grad": contiguous_grad,
}
LAZY: dict[str, Callable[[], Any]] = {
    "conjugated": lambda: (drawn_torch(torch.complex64) + 1j).conj(),
    "negated": lambda: (drawn_torch(torch.complex64) + 1j).conj().imag,
    "conjugated and transposed": lambda: (drawn_torch(torch.complex64) + 1j).conj().transpose(0, 2),
}


def opened(open_it: Any, value: Any) -> TensorMemory:
    like = source(value)
    return open_it("w", value, dtype=like.dtype.name, shape=like.shape)


def cuts(elements: int) -> list[tuple[int, int]]:
    return [(start, min(start + 7, elements)) for start in range(0, elements, 7)]


@pytest.fixture(autouse=True)
def few_are_gathered_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_memory, "_INDEXED", 3)


@pytest.mark.parametrize("kind", [*KINDS, *LAZY])
def test_the_pieces_of_a_tensor_are_those_of_its_copy_as_a_whole(kind: str) -> None:
    value = (KINDS | LAZY)[kind]()
    tensor, whole = opened(readable, value), memory(source(value).flat)
    size = tensor.dtype.itemsize
    for start, stop in cuts(tensor.elements):
        read = tensor.read(start, stop)
        assert (read.dtype, read.ndim) == (np.uint8, 1)
        assert bytes(read) == bytes(whole[start * size : stop * size])


@pytest.mark.parametrize("kind", [*KINDS, *LAZY])
def test_pieces_that_are_written_make_the_tensor_equal_to_the_one_that_was_read(kind: str) -> None:
    made = (KINDS | LAZY)[kind]
    given, taken = made(), made()
    with torch.no_grad():
        taken.fill_(False) if isinstance(taken, torch.Tensor) else taken.fill(False)
    read, written = opened(readable, given), opened(writable, taken)
    for start, stop in cuts(read.elements):
        unaligned = np.concatenate([np.zeros(1, np.uint8), read.read(start, stop)])[1:]
        written.write(start, stop, unaligned)
    assert tensor_digest(taken) == tensor_digest(given)


@pytest.mark.parametrize("kind", ["contiguous", "torch", "torch bfloat16", "torch with grad"])
def test_host_memory_in_c_order_is_read_without_a_copy(kind: str) -> None:
    value = KINDS[kind]()
    read = opened(readable, value).read(2, 9)
    assert np.shares_memory(read, source(value).flat)


def test_a_tensor_made_under_inference_mode_is_written_too() -> None:
    with torch.inference_mode():
        taken = torch.zeros(4, 3).t()
    opened(writable, taken).write(0, 12, np.ones(12, np.float32).view(np.uint8))
    assert taken.sum() == 12


def test_what_has_memory_of_numbers_can_be_given() -> None:
    assert bytes(opened(readable, bytearray(b"abc")).read(1, 3)) == b"bc"


def test_another_type_or_shape_than_recorded_is_refused() -> None:
    for open_it in (readable, writable):
        with pytest.raises(LocalError, match=r"'w' of a state is \(3,\) of float64 here, \(4,\) of float64"):
            open_it("w", np.zeros(3), dtype="float64", shape=(4,))
        with pytest.raises(LocalError, match=r"\(3,\) of float32 here, \(3,\) of int32"):
            open_it("w", torch.zeros(3), dtype="int32", shape=(3,))


def test_memory_that_cannot_be_written_is_refused() -> None:
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    with pytest.raises(LocalError, match="read-only"):
        writable("w", fixed, dtype="float64", shape=(3,))
    with pytest.raises(LocalError, match="not a bytearray"):
        writable("w", bytearray(3), dtype="uint8", shape=(3,))
    with pytest.raises(LocalError, match=r"cannot be reached: torch\.strided, meta"):
        writable("w", torch.zeros(3, device="meta"), dtype="float32", shape=(3,))
