"""Tensors and arrays as flat memory: what is shared, what is copied, what is refused."""

from __future__ import annotations

import array
import ctypes
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quicoll.errors import LocalError
from quicoll.numerics.buffers import argument, detached, memory, source, tensor_digest, wrap
from quicoll.numerics.destinations import IN_PLACE_BYTES, allocate, destination, require_apart
from quicoll.numerics.dtypes import BFLOAT16, DTYPES

TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPES}
NUMPY_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in DTYPES}


def torch_values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(np.prod(shape))
    return (
        (torch.arange(count) % 2 if name == "bool" else torch.arange(count) % 100).to(TORCH_DTYPES[name]).reshape(shape)
    )


def numpy_values(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape))
    return (np.arange(count) % (2 if name == "bool" else 100)).astype(NUMPY_DTYPES[name]).reshape(shape)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (2, 3, 4)])
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_shape_is_read_where_it_lies(name: str, shape: tuple[int, ...]) -> None:
    for value in (numpy_values(name, shape), torch_values(name, shape)):
        read = source(value)
        assert read.dtype is DTYPES[name]
        assert read.shape == shape
        assert read.kind == ("torch" if isinstance(value, torch.Tensor) else "numpy")
        assert not read.copied
        assert read.flat.shape == (int(np.prod(shape)),)
        assert read.flat.dtype == DTYPES[name].storage
        assert read.nbytes == read.flat.size * DTYPES[name].itemsize
        if read.flat.size:
            address = value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data
            assert read.flat.ctypes.data == address


@pytest.mark.parametrize("name", DTYPES)
def test_array_and_tensor_of_equal_values_are_the_same_memory_and_digest(name: str) -> None:
    array, tensor = source(numpy_values(name, (3, 5))), source(torch_values(name, (3, 5)))
    np.testing.assert_array_equal(array.flat, tensor.flat)
    assert tensor_digest(array) == tensor_digest(tensor) == tensor_digest(numpy_values(name, (3, 5)))


def test_what_is_read_cannot_be_written_by_accident_and_the_callers_own_still_can() -> None:
    for value in (np.zeros(3, np.float32), torch.zeros(3)):
        read = source(value)
        with pytest.raises(ValueError, match="read-only"):
            read.flat[0] = 1
        value[0] = 1
        assert read.flat[0] == 1


def test_a_read_only_array_is_read() -> None:
    value = np.arange(4, dtype=np.int32)
    value.flags.writeable = False
    assert source(value).flat.tolist() == [0, 1, 2, 3]
    assert not source(value).copied


@pytest.mark.parametrize(
    "view",
    [lambda x: x.T, lambda x: x[:, ::2], lambda x: x[1:, 1:], lambda x: x[::2]],
    ids=["transposed", "every second column", "inner block", "every second row"],
)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool"])
def test_strided_views_are_copied_once_in_c_order(name: str, view: Any) -> None:
    array, tensor = numpy_values(name, (4, 6)), torch_values(name, (4, 6))
    for value in (view(array), view(tensor)):
        read = source(value)
        assert read.copied
        expected = np.ascontiguousarray(view(array)).reshape(-1).view(DTYPES[name].storage)
        np.testing.assert_array_equal(read.flat, expected)


def test_reversed_and_broadcast_arrays_and_expanded_tensors_are_copied() -> None:
    assert source(np.arange(3.0)[::-1]).flat.tolist() == [2, 1, 0]
    assert source(np.broadcast_to(np.float32(4), (3,))).flat.tolist() == [4, 4, 4]
    assert source(torch.tensor([4.0]).expand(3)).flat.tolist() == [4, 4, 4]


def test_a_tensor_that_is_lazily_negated_is_resolved() -> None:
    imaginary = torch.view_as_complex(torch.ones(3, 2)).conj().imag
    assert imaginary.is_neg()
    assert source(imaginary).flat.tolist() == [-1, -1, -1]


def test_a_lazily_conjugated_tensor_is_resolved() -> None:
    assert source(torch.tensor([1 + 2j]).conj()).flat.tolist() == [1 - 2j]


def test_a_parameter_is_read_outside_of_autograd() -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    read = source(parameter)
    assert read.flat.tolist() == [0, 1, 2]
    assert read.flat.ctypes.data == parameter.data_ptr()
    assert parameter.requires_grad


@pytest.mark.parametrize("value", [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex128(1 + 2j)])
def test_a_numpy_scalar_is_a_0_dimensional_array_that_nothing_is_written_to(value: Any) -> None:
    read, array = source(value), source(np.array(value))
    assert (read.shape, read.dtype, read.flat.tolist()) == ((), array.dtype, [value])
    assert tensor_digest(value) == tensor_digest(np.array(value))
    with pytest.raises(LocalError, match="out is read-only"):
        destination(value, read)


RECORDED: dict[str, Callable[[], torch.Tensor]] = {
    "leaf": lambda: torch.nn.Parameter(torch.arange(3.0)),
    "result": lambda: torch.nn.Parameter(torch.arange(3.0)) * 1,
    "view": lambda: torch.nn.Parameter(torch.arange(3.0))[:],
}


@pytest.mark.parametrize("make", RECORDED.values(), ids=RECORDED.keys())
def test_a_tensor_that_autograd_records_is_refused_and_read_where_nothing_is_recorded(
    make: Callable[[], torch.Tensor],
) -> None:
    value = make()
    with pytest.raises(LocalError, match=r"requires grad, and no gradient .*; pass x.detach\(\), or make the call"):
        argument(value)
    with pytest.raises(LocalError, match=r"out requires grad; pass out.detach\(\), or make the call under"):
        destination(value, source(value))
    for nothing_recorded in (torch.no_grad, torch.inference_mode):
        with nothing_recorded():
            read, place = argument(value), destination(value, source(value))
        assert read.flat.tolist() == [0, 1, 2]
    version = value._version
    assert place.commit(np.ones(3, np.float32)) is value
    assert (value.tolist(), value.requires_grad, value._version > version) == ([1, 1, 1], True, True)
    assert argument(detached(value)).flat.ctypes.data == value.data_ptr()


def test_what_records_nothing_is_not_asked_about_autograd() -> None:
    assert argument(torch.ones(2)).flat.tolist() == argument(np.ones(2)).flat.tolist() == [1, 1]
    array = np.ones(2)
    assert detached(array) is array


# ---------------------------------------------------------------------------------------------------------------------
# Other memory


class Exported:
    """Something with DLPack and nothing else: what jax and others look like from here."""

    def __init__(self, value: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.value = value
        self.device = device

    def __dlpack__(self, **options: Any) -> Any:
        return self.value.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def others() -> list[tuple[Any, str, tuple[int, ...]]]:
    """Objects that hold 0, 1, 2, ... with their dtypes and shapes."""
    return [
        (array.array("f", range(6)), "float32", (6,)),
        (array.array("d", []), "float64", (0,)),
        (array.array("b", range(3)), "int8", (3,)),
        (bytearray(range(5)), "uint8", (5,)),
        (memoryview(np.arange(6, dtype=np.int32).reshape(2, 3)), "int32", (2, 3)),
        (memoryview(bytearray(8)).cast("B").cast("?")[:0], "bool", (0,)),
        ((ctypes.c_double * 4)(0, 1, 2, 3), "float64", (4,)),
        (Exported(np.arange(6, dtype=np.float16).reshape(3, 2)), "float16", (3, 2)),
        (Exported(torch.arange(4).to(torch.complex64)), "complex64", (4,)),
        (Exported(np.array(0, np.int64)), "int64", ()),
    ]


@pytest.mark.parametrize("case", range(len(others())))
def test_memory_of_others_is_read_where_it_lies_and_written_as_out(case: int) -> None:
    value, name, shape = others()[case]
    read = source(value)
    assert (read.dtype.name, read.shape, read.kind, read.copied) == (name, shape, "numpy", False)
    assert read.flat.tolist() == list(range(read.flat.size))
    fresh = allocate(read)
    assert isinstance(fresh.value, np.ndarray)
    place = destination(value, read)
    place.flat[:] = read.flat[::-1]
    expected = place.flat.tolist()
    assert place.commit() is value
    assert read.flat.tolist() == expected, "the same memory"


def test_bytes_and_read_only_views_are_read_and_are_no_out() -> None:
    for value in (b"abc", memoryview(b"abc"), memoryview(bytearray(b"abc")).toreadonly()):
        assert source(value).flat.tolist() == [97, 98, 99]
        with pytest.raises(LocalError, match="out is read-only"):
            destination(value, source(value))


def test_a_strided_view_of_a_buffer_is_copied() -> None:
    read = source(memoryview(bytearray(range(6)))[::2])
    assert read.copied
    assert read.flat.tolist() == [0, 2, 4]


def test_memory_that_numpy_cannot_name_or_reach_is_refused() -> None:
    big = ctypes.c_float.__ctype_be__ * 2
    for value, message in [
        (Exported(torch.zeros(2, dtype=torch.bfloat16)), "the memory of a Exported cannot be read as numbers"),
        (Exported(np.zeros(2), device=(2, 0)), "on DLPack device type 2 is not supported; pass a copy on the host"),
        (big(1.0, 2.0), r"byte order; pass value.astype\('float32'\)"),
        (memoryview(bytearray(2)).cast("c"), "dtype 'bytes8' is not supported"),
    ]:
        with pytest.raises(LocalError, match=message):
            source(value)


# ---------------------------------------------------------------------------------------------------------------------
# Copies, counted

LARGE = 1 << 20


def taken(call: Any) -> int:
    """Bytes that numpy and Python hold at most while `call` runs, beyond what they held before."""
    call()  # what is kept for ever is kept now
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "complex128", "bool"])
def test_contiguous_memory_is_not_copied_on_any_way(name: str) -> None:
    for value in (numpy_values(name, (LARGE,)), torch_values(name, (LARGE,))):
        assert taken(lambda value=value: memory(source(value).flat)) < 10_000
        assert taken(lambda value=value: tensor_digest(value)) < 10_000
        like = source(value)
        held = taken(lambda like=like: allocate(like).commit())
        assert held < like.nbytes + 10_000, "the result itself, and no more"
        assert taken(lambda like=like, value=value: destination(value, like).commit()) < like.nbytes + 10_000


def test_strided_memory_is_copied_once() -> None:
    value = np.zeros((LARGE, 2), np.float32)[:, 0]
    assert LARGE * 4 <= taken(lambda: source(value)) < LARGE * 4 + 10_000


# ---------------------------------------------------------------------------------------------------------------------
# CUDA

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device that torch can use")


@cuda
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "complex64", "int64"])
def test_tensors_on_a_cuda_device_go_through_the_host_and_back(name: str) -> None:
    on_host = torch_values(name, (3, 5))
    value = on_host.cuda()
    read = source(value)
    assert read.copied
    assert read.device == value.device
    np.testing.assert_array_equal(read.flat, source(on_host).flat)
    assert tensor_digest(value) == tensor_digest(on_host)
    fresh = allocate(read)
    fresh.flat[:] = read.flat[::-1]
    assert fresh.commit() is fresh.value
    assert fresh.value.device == value.device
    np.testing.assert_array_equal(source(fresh.value).flat, read.flat[::-1])
    out = torch.empty_like(value.T).T
    place = destination(out, read)
    place.flat[:] = read.flat
    place.commit()
    np.testing.assert_array_equal(source(out).flat, read.flat)


# ---------------------------------------------------------------------------------------------------------------------
# wrap


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_flat_memory_is_wrapped_without_a_copy(kind: Any, name: str) -> None:
    flat = source(numpy_values(name, (6,))).flat.copy()
    value = wrap(flat, DTYPES[name], (2, 3), kind)
    read = source(value)
    assert (read.dtype, read.shape, read.kind) == (DTYPES[name], (2, 3), kind)
    assert read.flat.ctypes.data == flat.ctypes.data


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(LocalError, match="ml_dtypes is not installed"):
        wrap(np.zeros(2, np.uint16), DTYPES["bfloat16"], (2,), "numpy")


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize("value", [1.0, 3, True, [1.0, 2.0], (1,), None, "abc", {"a": 1}])
def test_what_is_neither_array_nor_tensor_is_refused_with_what_to_pass(value: Any) -> None:
    with pytest.raises(LocalError, match=rf"a {type(value).__name__} is neither array nor tensor; pass numpy.asarray"):
        source(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(2, ">f4"), r"dtype >f4 is not in this machine's byte order; pass value.astype\('float32'\)"),
        (np.zeros(2, np.longdouble), "dtype '.*128' is not supported; use one of float8_e4m3fn, "),
        (np.array([None]), "dtype 'object' is not supported"),
        (np.array(["a"]), "dtype 'str32' is not supported"),
        (np.zeros(2, "m8[s]"), r"dtype 'timedelta64\[s\]' is not supported"),
        (np.zeros(2, [("a", "f4")]), "is not supported"),
        (np.zeros(2, ml_dtypes.float8_e4m3fnuz), "dtype 'float8_e4m3fnuz' is not supported"),
        (np.ma.masked_array([1, 2], [True, False]), r"would lose its mask; pass value.filled"),
    ],
    ids=lambda value: value.dtype.name if isinstance(value, np.ndarray) else "",
)
def test_arrays_that_are_not_plain_numbers_are_refused(value: Any, message: str) -> None:
    with pytest.raises(LocalError, match=message):
        source(value)


def test_tensors_without_plain_cpu_memory_are_refused() -> None:
    with FakeTensorMode():
        fake = torch.empty(3)
    for value, message in [
        (torch.empty(3, device="meta"), "on device meta has no elements"),
        (torch.eye(3).to_sparse(), r"layout torch.sparse_coo is not supported; pass value.to_dense\(\)"),
        (torch.ones(2, dtype=torch.float8_e4m3fnuz), "dtype 'float8_e4m3fnuz' is not supported"),
        (fake, "a FakeTensor has no memory that can be read; pass the local tensor"),
    ]:
        with pytest.raises(LocalError, match=message):
            source(value)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation.*:UserWarning")
def test_quantised_tensors_are_refused() -> None:
    with pytest.raises(LocalError, match=r"quantised tensor \(torch.qint8\) is not supported; pass value.int_repr"):
        source(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))


class _Elsewhere:
    """What `_torch_dtype` looks at, of a tensor on a device that this machine need not have."""

    layout, is_quantized, device, dtype, requires_grad = torch.strided, False, torch.device("xpu", 1), None, False


def test_a_tensor_on_another_device_is_refused_with_the_device_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Tensor", _Elsewhere)
    with pytest.raises(LocalError, match=r"a tensor on device xpu:1 is not supported; pass value.cpu\(\)"):
        source(_Elsewhere())


# ---------------------------------------------------------------------------------------------------------------------
# Results


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_new_result_has_the_kind_and_dtype_of_the_input_and_is_written_in_place(kind: str, name: str) -> None:
    value: Any = numpy_values(name, (2, 3)) if kind == "numpy" else torch_values(name, (2, 3))
    like = source(value)
    for shape in (None, (4,), (), (0, 2)):
        place = allocate(like, shape)
        expected = (2, 3) if shape is None else shape
        assert type(place.value) is type(value)
        assert place.value.dtype == value.dtype
        assert tuple(place.value.shape) == place.shape == expected
        place.flat[:] = np.resize(like.flat, place.flat.size)
        assert place.commit() is place.value
        np.testing.assert_array_equal(source(place.value).flat, place.flat)


def test_a_result_that_lies_elsewhere_is_copied_into_the_new_one() -> None:
    place = allocate(source(np.zeros(3, np.float32)))
    assert place.commit(np.array([1, 2, 3], np.float32)).tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", DTYPES)
def test_out_is_untouched_until_commit_and_holds_the_result_after(name: str) -> None:
    """Array for tensor and tensor for array, contiguous and strided."""
    shape = (3, 4)
    outs: list[Any] = [
        numpy_values(name, shape),
        torch_values(name, shape),
        numpy_values(name, (4, 3)).T,
        torch_values(name, (4, 3)).T,
        numpy_values(name, (3, 8))[:, ::2],
        torch_values(name, (3, 8))[:, ::2],
        numpy_values(name, shape)[::-1],
    ]
    for like in (source(numpy_values(name, shape)), source(torch_values(name, shape))):
        for out in outs:
            before = source(out).flat.copy()
            place = destination(out, like)
            place.flat[:] = like.flat[::-1]
            np.testing.assert_array_equal(source(out).flat, before)
            assert place.commit() is out
            np.testing.assert_array_equal(source(out).flat, like.flat[::-1])


def test_out_may_be_the_input_itself() -> None:
    for value in (np.arange(4.0), torch.arange(4.0)):
        place = destination(value, source(value))
        place.flat[:] = 7
        place.commit()
        assert value.tolist() == [7] * 4


def test_a_read_only_result_is_committed_without_a_warning() -> None:
    for out in (np.zeros(3, np.float32), torch.zeros(3)):
        result = np.array([1, 2, 3], np.float32)
        result.flags.writeable = False
        assert destination(out, source(out)).commit(result).tolist() == [1, 2, 3]


def test_autograd_sees_that_out_was_written() -> None:
    out = torch.zeros(3)
    version = out._version
    destination(out, source(out)).commit(np.ones(3, np.float32))
    assert out._version > version


LARGE = IN_PLACE_BYTES // 4  # of float32


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_a_large_out_apart_from_what_must_stay_is_written_as_the_result_comes(make: Any) -> None:
    out = make(LARGE, dtype=np.float32 if make is np.zeros else torch.float32)
    place = destination(out, source(out), apart_from=[np.ones(LARGE, np.float32)])
    assert place.in_place
    place.flat[:] = 7
    assert float(out[-1]) == 7
    assert place.commit() is out
    beside = place.aside()
    beside.flat[:] = 8
    assert float(out[-1]) == 7
    assert beside.commit() is out
    assert float(out[-1]) == 8


def test_an_out_that_may_not_be_written_meanwhile_gets_a_buffer_beside_it() -> None:
    whole = np.zeros(3 * LARGE, np.float32)
    cases: list[tuple[Any, list[Any]]] = [
        (whole[:LARGE], [whole]),
        (whole[:LARGE], [whole[LARGE - 1 : 2 * LARGE]]),
        (whole[:LARGE], [whole[:: LARGE * 2]]),
        (torch.from_numpy(whole)[:LARGE], [whole]),
        (whole[: 2 * LARGE : 2], [np.ones(1)]),
        (torch.from_numpy(whole)[: 2 * LARGE : 2], [np.ones(1)]),
        (whole[: LARGE - 1], [np.ones(1)]),
    ]
    for out, apart in cases:
        assert not destination(out, source(out), apart_from=apart).in_place
    assert destination(whole[:LARGE], source(whole[:LARGE]), apart_from=[whole[LARGE:]]).in_place
    assert not destination(whole, source(whole)).in_place


def test_autograd_sees_an_out_that_was_written_in_place() -> None:
    weights, out = torch.ones(LARGE, requires_grad=True), torch.ones(LARGE)
    loss = (weights * out).sum()
    destination(out, source(out), apart_from=[]).commit()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        made = torch.zeros(LARGE)
    assert destination(made, source(torch.zeros(LARGE)), apart_from=[]).commit() is made


def test_an_out_whose_memory_was_exchanged_meanwhile_is_refused() -> None:
    read_only, other = np.zeros(LARGE, np.float32), torch.zeros(LARGE)
    places = [destination(out, source(out), apart_from=[]) for out in (read_only, other)]
    read_only.flags.writeable = False
    other.data = torch.zeros(LARGE)
    for place in places:
        with pytest.raises(LocalError, match="out was changed while"):
            place.commit()


def test_out_made_under_inference_mode_is_written() -> None:
    with torch.inference_mode():
        out = torch.zeros(3)
    assert destination(out, source(torch.ones(3))).commit(np.ones(3, np.float32)).tolist() == [1, 1, 1]


READ_ONLY = np.zeros(3, np.float32)
READ_ONLY.flags.writeable = False
SLIDING = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (3,), (0,))
WINDOWS = torch.zeros(4).as_strided((3,), (0,))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ([0.0] * 3, "out is a list; pass a numpy array or a torch tensor"),
        (np.zeros(4, np.float32), r"out is \(4,\) of float32, the result \(3,\) of float32"),
        (np.zeros((3, 1), np.float32), r"out is \(3, 1\) of float32"),
        (np.zeros(3), r"out is \(3,\) of float64"),
        (torch.zeros(3, dtype=torch.bfloat16), r"out is \(3,\) of bfloat16"),
        (np.zeros(3, ">f4"), "byte order"),
        (READ_ONLY, "out is read-only"),
        (torch.zeros(3, requires_grad=True), r"out requires grad; pass out.detach\(\)"),
        (torch.zeros(3, device="meta"), "on device meta"),
        (torch.zeros(1).expand(3), r"several elements in one place \(strides \(0,\) bytes\)"),
        (SLIDING, "several elements in one place"),
        (WINDOWS, "several elements in one place"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_an_out_that_cannot_take_the_result_is_refused(out: Any, message: str) -> None:
    with pytest.raises(LocalError, match=message):
        destination(out, source(np.zeros(3, np.float32)))


def test_overlap_is_seen_in_any_dimension_and_not_where_there_is_none() -> None:
    base = np.zeros(64, np.float32)

    def strided(shape: tuple[int, ...], *strides: int) -> Any:
        return np.lib.stride_tricks.as_strided(base[32:], shape, tuple(4 * stride for stride in strides))

    for shape, strides in [((3, 3), (1, 1)), ((3, 3), (2, 1)), ((2, 2, 2), (4, 0, 1)), ((3, 2), (-1, -1))]:
        value = strided(shape, *strides)
        with pytest.raises(LocalError, match="several elements in one place"):
            destination(value, source(np.zeros(shape, np.float32)))
    for shape, strides in [((3, 3), (3, 1)), ((3, 3), (1, 3)), ((3, 1), (1, 0)), ((0, 3), (0, 0)), ((3, 3), (-3, -1))]:
        value = strided(shape, *strides)
        destination(value, source(np.zeros(shape, np.float32))).commit()


MATRIX = np.zeros((4, 6), np.float32)
TENSOR = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("outs", "items"),
    [
        ([MATRIX, MATRIX], "0 and 1"),
        ([np.zeros(2, np.float32), MATRIX[1], MATRIX[:, 2]], "1 and 2"),
        ([MATRIX[::-1, 1:3], MATRIX[:, 2:]], "0 and 1"),
        ([MATRIX[2:3], np.zeros(0, np.float32), MATRIX[:2], MATRIX[1:3]], "2 and 3"),
        ([TENSOR, TENSOR.t()], "0 and 1"),
        ([TENSOR[0], TENSOR.numpy()[0]], "0 and 1"),
        ([TENSOR.bfloat16()] * 2, "0 and 1"),
        ([bytearray(4)] * 2, "0 and 1"),
    ],
)
def test_two_results_in_one_place_are_refused(outs: list[Any], items: str) -> None:
    with pytest.raises(LocalError, match=f"out has items {items} in one place; pass tensors that share no memory"):
        require_apart([destination(out, source(out)) for out in outs])


def test_results_that_lie_between_each_other_share_nothing() -> None:
    apart: list[list[Any]] = [
        [MATRIX[:, 0], MATRIX[:, 1], MATRIX[::2, 2:], MATRIX[1::2, 2:]],
        [TENSOR[:, ::2], TENSOR[:, 1::2], MATRIX],
        [MATRIX[:0], MATRIX[:0], MATRIX],
        [MATRIX[3], MATRIX[2], MATRIX[::-1][2:]],
        [],
    ]
    for outs in apart:
        require_apart([destination(out, source(out)) for out in outs])


@pytest.mark.parametrize("result", [np.zeros(2, np.float32), np.zeros(3), np.zeros((3, 1), np.float32)])
def test_a_result_that_does_not_fit_is_not_committed(result: Any) -> None:
    out = np.ones(3, np.float32)
    for place in (destination(out, source(out)), allocate(source(out))):
        with pytest.raises(LocalError, match="does not fit 3 float32"):
            place.commit(result)
    assert out.tolist() == [1, 1, 1]


# ---------------------------------------------------------------------------------------------------------------------
# Bytes and digests


@pytest.mark.parametrize("name", DTYPES)
def test_memory_is_the_bytes_without_a_copy(name: str) -> None:
    flat = source(numpy_values(name, (5,))).flat.copy()
    view = memory(flat)
    assert view.format == "B"
    assert view.tobytes() == flat.tobytes()
    view[:] = bytes(len(view))
    assert not flat.view(np.uint8).any()
    assert memory(source(flat if name != "bfloat16" else flat.view(ml_dtypes.bfloat16)).flat).readonly
    assert len(memory(flat[:0])) == 0


def test_a_digest_is_of_bits_dtype_and_shape() -> None:
    """Written out once, so that ranks with different versions still agree, or it is known that they do not."""
    assert tensor_digest(np.arange(3, dtype=np.float32)).hex() == "449d52a26b88fa475ed3a0a1cd1dde33"
    seen = {
        tensor_digest(value)
        for value in (
            np.zeros(6, np.float32), np.zeros(6, np.int32), np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32),
            np.zeros(3, np.float64), np.zeros(()), np.zeros(0, np.float32), np.zeros((0, 1), np.float32),
            np.zeros(12, np.float16), torch.zeros(12, dtype=torch.bfloat16), -np.zeros(6, np.float32),
        )
    }  # fmt: skip
    assert len(seen) == 11
    assert tensor_digest(np.eye(3, dtype=np.float32)[:, ::2]) == tensor_digest(torch.eye(3)[:, ::2])


@pytest.mark.slow
def test_torch_is_not_imported_for_a_numpy_array() -> None:
    program = (
        "import sys, numpy as np\n"
        "from quicoll.numerics.buffers import tensor_digest, source\n"
        "from quicoll.numerics.destinations import allocate, destination\n"
        "x = source(np.ones(3, np.float32)); allocate(x); tensor_digest(x)\n"
        "destination(np.ones(3, np.float32), x).commit()\n"
        "assert 'torch' not in sys.modules and 'ml_dtypes' not in sys.modules\n"
    )
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_bfloat16_of_either_kind_is_one_type() -> None:
    assert source(np.zeros(2, ml_dtypes.bfloat16)).dtype is source(torch.zeros(2).bfloat16()).dtype is BFLOAT16
    out = np.zeros(2, ml_dtypes.bfloat16)
    like = source(torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert destination(out, like).commit(like.flat.copy()).tolist() == [1.5, -2.0]
