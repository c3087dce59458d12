"""Every type that travels has a name, by which another process of the same code finds it."""

from __future__ import annotations

import pytest

from quicoll.errors import LocalError
from quicoll.numerics.codecs import codec_of
from quicoll.numerics.dtypes import DTYPES, NumberKind
from quicoll.numerics.encoding import encoding_for
from quicoll.numerics.exact import exact_accumulator
from quicoll.numerics.reduce import ReduceOp
from quicoll.numerics.type_names import type_name, type_named


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_tensors_type_and_its_exact_accumulator_are_found_as_the_objects_that_they_are(dtype: object) -> None:
    known = DTYPES[str(dtype)]
    assert type_named(type_name(known)) is known
    if known.kind in (NumberKind.FLOAT, NumberKind.COMPLEX):
        wide = exact_accumulator(known).wide
        assert type_named(type_name(wide)) is wide


@pytest.mark.parametrize("wire", ["bfloat16", "int8", "int4", "topk:1/64", "topk-2bit:1/8"])
@pytest.mark.parametrize("precision", ["default", "float64", "exact"])
def test_what_travels_in_a_wire_format_is_found_with_all_that_a_reduction_asks_of_it(wire: str, precision: str) -> None:
    for part in codec_of(wire).parts:
        try:
            form = encoding_for(wire, part, ReduceOp.SUM, precision)
        except LocalError:  # this format has no such sums
            continue
        for dtype in (form.dtype, form.acc):
            found = type_named(type_name(dtype))
            assert type(found) is type(dtype)
            told = [(each.name, each.itemsize, each.storage, each.kind, each.part) for each in (found, dtype)]
            assert told[0] == told[1]
            for more in ("codec", "numbers"):
                assert getattr(found, more, None) == getattr(dtype, more, None)


@pytest.mark.parametrize("name", ["", "float31", "exact_float31", "x*float32", "int9|float32", "3*"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(LocalError):
        type_named(name)
