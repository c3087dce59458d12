"""Error feedback: what a wire format loses is sent with what comes next, and nothing else becomes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from wire_oracle import Fed, passed

from quicoll.errors import LocalError
from quicoll.numerics.bundle import bundle
from quicoll.numerics.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT64, Array, DType, narrow, widen
from quicoll.numerics.encoding import Encoding, encoding_for
from quicoll.numerics.feedback import ErrorFeedback
from quicoll.numerics.reduce import ReduceOp

WIRES = ("bfloat16", "int8", "int4", "topk:1/8")


def form(wire: str, dtype: str = "float32") -> Encoding:
    return encoding_for(wire, DTYPES[dtype], ReduceOp.SUM, "default")


def fed(residual: Any, x: Any, wire: str = "int8", dtype: str = "float32", *, out: Any = None) -> ErrorFeedback:
    return ErrorFeedback([residual], [bundle(x)], form(wire, dtype), apart_from=[x] if out is None else [x, out])


def drawn(seed: int, size: int = 700) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * 2.0 ** rng.integers(-9, 9, size)).astype(np.float32)


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_sent_and_what_is_left_are_the_ones_of_a_scalar_reference_step_after_step(wire: str) -> None:
    reference, residual = Fed((700,)), np.zeros(700, np.float32)
    how = form(wire)
    for step in range(4):
        x = drawn(step)
        feedback = fed(residual, x, wire)
        (sent,) = feedback.encode()
        before = residual.copy()
        assert sent.tobytes() == how.encode_numbers([reference.follow(wire, x)]).tobytes()
        assert residual.tobytes() == before.tobytes()  # nothing is written yet
        feedback.commit()
        assert residual.tobytes() == reference.residual.tobytes()
        assert residual.any()


@pytest.mark.parametrize("wire", WIRES)
def test_over_many_steps_what_was_sent_adds_up_to_what_was_given(wire: str) -> None:
    """Without feedback the errors of a constant leaf add up, step by step; with it they never exceed one step's."""
    x, residual = drawn(1), np.zeros(700, np.float32)
    how, total = form(wire), np.zeros(700)
    for _ in range(50):
        feedback = fed(residual, x, wire)
        back = [np.empty_like(x)]
        how.decode_numbers(feedback.encode()[0], back)
        feedback.commit()
        total += back[0]
    largest = float(np.abs(x).max()) * 2
    off = np.abs(total - 50 * x.astype(np.float64))
    assert off.max() <= how.codec.bound(largest, DTYPES["float32"]) + 1e-3
    assert off.max() < np.abs(50 * (passed(wire, x).astype(np.float64) - x)).max() / 5


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_not_finite_travels_and_leaves_nothing(wire: str) -> None:
    x = drawn(3)
    x[[5, 6, 7]] = [np.inf, -np.inf, np.nan]
    residual = np.full(700, 2.0**-12, np.float32)
    residual[8] = np.nan  # nothing of ours leaves one there, but a caller may
    feedback = fed(residual, x, wire)
    back = [np.empty_like(x)]
    form(wire).decode_numbers(feedback.encode()[0], back)
    assert back[0][5] == np.inf
    assert back[0][6] == -np.inf
    assert np.isnan(back[0][7:9]).all()
    feedback.commit()
    assert residual[5:9].tolist() == [0, 0, 0, 0]
    assert np.isfinite(residual).all()


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_16_bit_types_are_added_and_subtracted_with_one_rounding(dtype: DType) -> None:
    rng = np.random.default_rng(4)
    wide = [rng.standard_normal(512) * 2.0 ** rng.integers(-6, 6, 512) for _ in range(2)]
    x, residual = np.empty(512, dtype.storage), np.empty(512, dtype.storage)
    narrow(wide[0], FLOAT64, dtype, x)
    narrow(wide[1], FLOAT64, dtype, residual)

    def plain(values: Array) -> Array:
        out = np.empty(values.size)
        widen(values, dtype, FLOAT64, out)
        return out

    def tensor(values: Array) -> Any:
        return values if dtype is FLOAT16 else torch.from_numpy(values).view(torch.bfloat16)

    expected = np.empty(512, dtype.storage)
    narrow(plain(x) + plain(residual), FLOAT64, dtype, expected)  # float64 holds such a sum without rounding
    feedback = fed(tensor(residual), tensor(x), "int8", dtype.name)
    (found,) = feedback.sums(0)
    assert found.tobytes() == expected.tobytes()
    how = form("int8", dtype.name)
    back = [np.empty_like(x)]
    how.decode_numbers(feedback.encode()[0], back)
    left = np.empty(512, dtype.storage)
    narrow(plain(expected) - plain(back[0]), FLOAT64, dtype, left)
    feedback.commit()
    assert plain(residual).tolist() == plain(left).tolist()


def test_a_complex_number_is_its_two_parts() -> None:
    parts, kept = drawn(5, 600), drawn(6, 600)
    residual, plain = kept.view(np.complex64).copy(), kept.copy()
    ours, theirs = fed(residual, parts.view(np.complex64), dtype="complex64"), fed(plain, parts)
    assert ours.encode()[0].tobytes() == theirs.encode()[0].tobytes()
    ours.commit()
    theirs.commit()
    assert residual.tobytes() == plain.tobytes()


def test_tensors_of_a_list_and_strided_ones_have_residuals_in_their_places() -> None:
    x = [drawn(7, 300).reshape(20, 15), drawn(8, 9), np.zeros((0, 3), np.float32)]
    stored = np.zeros((15, 20), np.float32)
    residuals = [stored.T, np.zeros(9, np.float32), np.zeros((0, 3), np.float32)]
    feedback = fed(residuals, x)
    feedback.encode()
    feedback.commit()
    for residual, each in zip(residuals[:2], x, strict=False):
        flat = each.reshape(-1)
        assert residual.reshape(-1).tolist() == (flat - passed("int8", flat)).tolist()


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (lambda x: np.zeros(3, np.float32), r"residual is \(3,\) of float32, the result \(4,\) of float32"),
        (lambda x: np.zeros(4), r"residual is \(4,\) of float64, the result \(4,\) of float32"),
        (lambda x: [np.zeros(4, np.float32)], "residual is a list of 1 for a leaf that is a tensor"),
        (lambda x: 3.0, "residual is a float; pass a numpy array"),
        (lambda x: np.broadcast_to(np.float32(0), 4), "residual is read-only"),
        (lambda x: torch.zeros(4, requires_grad=True), "residual requires grad"),
        (lambda x: torch.zeros(1).expand(4), "residual has several elements in one place"),
        (lambda x: x, "residual shares memory with x or out"),
        (lambda x: x[::-1], "residual shares memory with x or out"),
    ],
)
def test_a_residual_that_does_not_fit_or_lies_in_the_way_is_refused(residual: Any, message: str) -> None:
    x = np.ones(4, np.float32)
    with pytest.raises(LocalError, match=message):
        fed(residual(x), x)


def test_residuals_that_share_memory_are_refused() -> None:
    x = [np.ones(4, np.float32), np.ones(4, np.float32)]
    both = np.zeros(6, np.float32)
    with pytest.raises(LocalError, match="two tensors of residual share memory"):
        fed([both[:4], both[2:]], x)
    with pytest.raises(LocalError, match="a list of 2 tensors"):
        fed([both[:4]], x)
    out = np.zeros(8, np.float32)
    with pytest.raises(LocalError, match="residual shares memory with x or out"):
        fed(out[4:], x[0], out=out)


def test_a_residual_that_was_made_read_only_meanwhile_is_an_error_that_says_so() -> None:
    residual = np.zeros(4, np.float32)
    feedback = fed(residual, np.ones(4, np.float32))
    feedback.encode()
    residual.flags.writeable = False
    with pytest.raises(LocalError, match="residual was changed while the operation was under way"):
        feedback.commit()
