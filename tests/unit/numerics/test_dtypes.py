"""Element types, operations and accumulators: what there is, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from scalar_oracle import COMPLEX, FLOATS, PAIRS

from quicoll.errors import LocalError
from quicoll.numerics.dtypes import (
    BOOL,
    DTYPES,
    FLOAT32,
    DType,
)
from quicoll.numerics.reduce import ReduceOp, accumulator


@pytest.mark.parametrize("op", [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR])
@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=str)
def test_bitwise_operations_refuse_floats(dtype: DType, op: ReduceOp) -> None:
    with pytest.raises(LocalError, match=f"{op} is bitwise and {dtype} is not an integer"):
        accumulator(dtype, op)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_an_order_of_complex_numbers_is_refused(dtype: DType, op: ReduceOp) -> None:
    with pytest.raises(LocalError, match=f"{op} of {dtype} is not defined: complex numbers have no order"):
        accumulator(dtype, op)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT])
def test_arithmetic_refuses_bools(op: ReduceOp) -> None:
    with pytest.raises(LocalError, match=f"{op} of bools is not defined"):
        accumulator(BOOL, op)


def test_accumulators_are_wide_where_it_pays() -> None:
    names = {
        (dtype.name, op.value, precision): accumulator(dtype, op, precision).name
        for dtype, op in PAIRS
        for precision in ("default", "float64")
    }
    assert names["float16", "sum", "default"] == names["bfloat16", "avg", "default"] == "float32"
    assert names["float8_e4m3fn", "sum", "default"] == names["float8_e5m2", "product", "default"] == "float32"
    assert names["complex64", "sum", "default"] == "complex64"
    assert names["complex64", "avg", "float64"] == names["complex128", "sum", "default"] == "complex128"
    assert names["float32", "product", "default"] == "float32"
    assert names["float32", "sum", "float64"] == names["bfloat16", "sum", "float64"] == "float64"
    assert names["float16", "min", "float64"] == "float16"
    assert names["int8", "sum", "float64"] == "int8"
    assert names["int8", "avg", "default"] == "int64"
    assert names["uint16", "avg", "default"] == "uint64"
    assert names["bool", "bxor", "default"] == "bool"
    with pytest.raises(LocalError, match="precision 'float128' is not known"):
        accumulator(FLOAT32, ReduceOp.SUM, "float128")


@pytest.mark.parametrize("text", ["sum", "SUM", ReduceOp.SUM])
def test_an_op_is_known_by_its_name_in_any_case(text: str) -> None:
    assert ReduceOp.parse(text) is ReduceOp.SUM


@pytest.mark.parametrize("value", ["mean", "", None, 3])
def test_an_unknown_op_is_refused_with_those_there_are(value: Any) -> None:
    with pytest.raises(LocalError, match="use one of sum, avg, min, max, product, band, bor, bxor"):
        ReduceOp.parse(value)


def pickled(dtype: DType) -> DType:
    found: DType = pickle.loads(pickle.dumps(dtype))  # noqa: S301 - what it has just written itself
    return found


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_of_a_dtype_is_the_dtype(duplicate: Callable[[DType], DType]) -> None:
    for name, dtype in DTYPES.items():
        assert duplicate(dtype) is dtype
        assert DType.parse(name) is dtype
        assert dtype.storage.itemsize == dtype.itemsize


def test_an_unknown_dtype_is_refused_with_those_there_are() -> None:
    with pytest.raises(LocalError, match=r"'float128' is not supported; use one of float8_e4m3fn, .*bool"):
        DType.parse("float128")
