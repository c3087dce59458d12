"""How long the messages of a plan are on a network, and how many of its lanes are open."""

from __future__ import annotations

import pytest

from quicoll.numerics.dtypes import DType
from quicoll.numerics.reduce import ReduceOp
from quicoll.plan.chunks import MIB
from quicoll.plan.model import LANES_PER_WIDTH
from quicoll.plan.network import NetworkModel, messages
from quicoll.plan.schedule import Schedule, element_format, reduction


def pair(latency: float, rate: float) -> NetworkModel:
    return NetworkModel.between((0, 1), latency=latency, rate=rate)


def all_reduce(nbytes: int) -> Schedule:
    how = element_format(DType.parse("float32"), ReduceOp.SUM, leaves=2, precision="default", wire=None)
    return reduction(
        "all_reduce", how, world=2, sizes={"elements": nbytes // 4}, leaves=2, sites=(0, 0), chunk_bytes=MIB
    )


def test_messages_stay_as_long_as_they_are_where_no_path_is_long() -> None:
    assert messages(pair(0.009, 1e9), MIB) == (MIB, LANES_PER_WIDTH)


def test_one_long_path_makes_all_messages_short() -> None:
    near, far = 1e-4, 0.025
    network = NetworkModel(((0.0, near, far), (near, 0.0, near), (far, near, 0.0)), ((1e8,) * 3,) * 3, (0, 0, 1))
    assert messages(network, MIB)[0] == 128 << 10


def test_short_messages_are_not_made_longer() -> None:
    assert messages(pair(0.1, 1e8), 1000)[0] == 1000


@pytest.mark.parametrize(("latency", "rate"), [(0.0125, 6e7), (0.025, 2.5e7), (0.05, 1.25e7), (0.15, 6e6), (0.05, 1e8)])
def test_on_a_long_path_more_bytes_are_open_than_twice_what_it_holds(latency: float, rate: float) -> None:
    chunk, lanes = messages(pair(latency, rate), MIB)
    assert chunk * lanes >= 2 * (2 * latency * rate)


def test_open_bytes_are_bounded_whatever_was_measured() -> None:
    chunk, lanes = messages(pair(10.0, 1e12), MIB)
    assert chunk * lanes == 64 << 20


def test_a_plan_is_made_in_the_messages_of_the_network_that_was_agreed_on() -> None:
    schedule = all_reduce(4 << 20)
    near, far = (schedule.plan_taken(0, "auto", pair(latency, 2.5e7)) for latency in (1e-4, 0.025))
    assert (len(near.lanes), near.open_lanes) == (4, 4)
    assert (len(far.lanes), far.open_lanes) == (32, 32)


def test_ranks_whose_plans_differ_in_the_length_of_messages_do_not_agree() -> None:
    schedule = all_reduce(4 << 20)
    near, far = (schedule.plan_taken(0, "auto", pair(latency, 2.5e7)) for latency in (1e-4, 0.025))
    assert near.signature != far.signature
