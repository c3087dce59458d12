"""What torch asks for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402 - after the check that there is a torch

from quicoll import LocalError  # noqa: E402 - likewise
from quicoll.torch_backend.asked import OPS, flat, movable, put, read_options, reduced_by, seconds_of  # noqa: E402 - likewise


def test_a_timeout_that_is_not_set_is_the_groups() -> None:
    assert read_options(dist.AllreduceOptions()).timeout is None
    assert seconds_of(timedelta(milliseconds=-1)) is None
    assert seconds_of(timedelta(0)) is None
    assert seconds_of(timedelta(seconds=1.5)) == 1.5
    assert (seconds_of(timedelta(days=10_000)) or 0) < 1_000_000


def test_options_and_plain_arguments_say_the_same() -> None:
    opts = dist.ReduceOptions()
    opts.reduceOp, opts.rootRank, opts.timeout = dist.ReduceOp.MAX, 2, timedelta(seconds=3)
    asked = read_options(opts)
    plain = read_options(2, dist.ReduceOp.MAX, timeout=timedelta(seconds=3))
    assert (asked.op, asked.root, asked.timeout) == (plain.op, plain.root, plain.timeout)
    assert plain.root == 2
    assert plain.timeout == 3.0
    with pytest.raises(LocalError, match="a str is no option"):
        read_options("sum")


def test_the_most_frequent_options_are_read_as_all_others() -> None:
    opts = dist.AllreduceOptions()
    opts.reduceOp, opts.timeout = dist.ReduceOp.MIN, timedelta(seconds=3)
    assert read_options(opts)[1:] == read_options(None, opts)[1:] == (0, 3.0)
    assert read_options(opts).op == read_options(None, opts).op == dist.ReduceOp.MIN
    assert read_options(opts, timeout=timedelta(seconds=4)).timeout == 4.0


def test_the_hash_of_an_operation_is_what_torch_counts_it_as_however_it_is_given() -> None:
    names = [name for name in dist.ReduceOp.RedOpType.__members__ if name != "PREMUL_SUM"]  # made in a way of its own
    kinds = [getattr(dist.ReduceOp, name) for name in names]
    hashes = [hash(kind) for kind in kinds]
    assert hashes == [hash(dist.ReduceOp(kind)) for kind in kinds] == [kind.value for kind in kinds]
    assert len({*hashes}) == len(kinds)
    opts = dist.AllreduceOptions()
    for kind in kinds:
        opts.reduceOp = kind
        assert hash(opts.reduceOp) == kind.value
    assert len(OPS) == 8
    assert hash(dist._make_nccl_premul_sum(2.0)) not in OPS


def test_memory_is_used_as_it_is_where_it_lies_in_one_piece() -> None:
    x = torch.arange(6.0, requires_grad=True)
    assert flat(x).data_ptr() == x.data_ptr()
    assert not flat(x).requires_grad
    assert flat(x[::2]).tolist() == [0.0, 2.0, 4.0]
    assert flat(torch.tensor(3.0)).tolist() == [3.0]


def test_memory_is_held_though_the_program_gives_its_tensor_another_one() -> None:
    x = torch.arange(6.0)
    taken = flat(x)
    x.set_(torch.zeros(6).untyped_storage(), 0, (6,))
    assert taken.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    x = torch.arange(6.0)
    taken = flat(x)
    x.data = torch.zeros(6)
    assert taken.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_tensor_on_a_device_that_nobody_can_wait_for_is_refused_and_the_way_is_named() -> None:
    for take in (flat, movable):
        with pytest.raises(LocalError, match=r"on device meta.*pass tensor\.cpu\(\)") as found:
            take(torch.ones(3, device="meta"))
        assert found.value.usable


def test_types_that_are_not_known_travel_as_bytes() -> None:
    x = torch.ones(3).to(torch.float8_e4m3fnuz)
    assert movable(x).dtype is torch.uint8
    target = torch.zeros(3).to(torch.float8_e4m3fnuz)
    put(target, movable(x).clone())
    assert bytes(target.view(torch.uint8)) == bytes(x.view(torch.uint8))


def test_what_is_written_does_not_count_as_a_change_for_autograd() -> None:
    x = torch.zeros(2, 2)
    version = x._version
    put(x.t(), torch.arange(4.0))
    assert x.tolist() == [[0.0, 2.0], [1.0, 3.0]]
    assert x._version == version


@pytest.mark.parametrize(("op", "name"), [("SUM", "bor"), ("PRODUCT", "band"), ("MAX", "max"), ("BXOR", "bxor")])
def test_reductions_of_bools(op: str, name: str) -> None:
    assert reduced_by(getattr(dist.ReduceOp, op), torch.tensor([True]))[1] == name


def test_a_factor_is_rounded_to_the_type_of_the_tensor() -> None:
    op: Any = dist._make_nccl_premul_sum(1 / 3)
    product, name = reduced_by(op, torch.ones(1, dtype=torch.bfloat16))
    assert name == "sum"
    assert product.dtype is torch.bfloat16
    assert product.item() == torch.tensor(1 / 3).bfloat16().item()
