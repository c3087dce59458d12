"""How ranks agree on a network."""

from __future__ import annotations

from typing import Any

import pytest
from plan_networks import alike, plans

from quicoll.errors import LocalError
from quicoll.plan.choice import choose
from quicoll.plan.forecast import predict
from quicoll.plan.network import MEMORY_RATE, NetworkModel, agreed, quantised


def test_ranks_agree_on_the_larger_of_what_either_end_has_measured() -> None:
    rows = [(0, 128, 0, 1 << 20), (256, 0, 1 << 21, 0)]
    network = agreed(rows, (7, 7))
    assert network.latency == ((0.0, 256e-6), (256e-6, 0.0))
    assert network.rate[0][1] == network.rate[1][0] == 1 << 21
    assert network.sites == (0, 0)


def test_a_path_that_nobody_has_measured_is_as_fast_as_the_fastest_of_its_kind() -> None:
    near, far, here = 1 << 27, 1 << 23, MEMORY_RATE
    rows = [
        (0,) * 5 + (0, here, near, 0, far),
        (0,) * 5 + (here, 0, 0, 0, 0),
        (0,) * 5 + (0, 0, 0, 0, far >> 1),
        (0,) * 10,
        (0,) * 10,
    ]
    rate = agreed(rows, (0, 0, 0, 1, 1)).rate
    assert (rate[0][1], rate[0][2], rate[0][4], rate[2][4]) == (here, near, far, far >> 1)
    assert rate[1][2] == rate[2][1] == rate[3][4] == near
    assert rate[0][3] == rate[1][3] == rate[4][1] == far


def test_one_path_that_was_not_measured_changes_no_choice() -> None:
    """Of four ranks one pair had sent each other nothing yet, and 4 MiB went by a tree, to go around it."""
    us, rate = 1 << 15, 1 << 24
    rows = [[us] * 4 + [rate] * 4 for _ in range(4)]
    rows[1][4 + 2] = rows[2][4 + 1] = 0
    sites = (0,) * 4
    assert choose("all_reduce", 4, 4 << 20, 4, sites, agreed(rows, sites)) == "direct"


def test_what_nobody_has_measured_has_a_default() -> None:
    network = agreed([(0,) * 4] * 2, (0, 1))
    assert network.latency[0][1] == 1e-6
    assert network.rate[0][1] > 1e6


@pytest.mark.parametrize("rows", [[(0, 0)], [(0, 1, 1, 0), (0, 1, 1)], [(0, -1, 0, 0)] * 2, [(0, 1 << 62, 0, 0)] * 2])
def test_measurements_of_another_shape_or_out_of_bounds_are_refused(rows: list[tuple[int, ...]]) -> None:
    if len(rows) == 1:
        assert agreed(rows, (0,)).world == 1
        return
    with pytest.raises(LocalError, match="another world size"):
        agreed(rows, (0,) * len(rows))


def test_measurements_are_rounded_up_to_powers_of_two() -> None:
    assert [quantised(value) for value in (0, 1, 2, 3, 1000, 1024, 1025)] == [0, 1, 2, 4, 1024, 1024, 2048]


@pytest.mark.parametrize(
    ("latency", "rate", "said"),
    [
        (((0.0,),), ((1.0, 1.0), (1.0, 1.0)), "latency must be 2 rows of 2"),
        (((0.0, -1.0), (0.0, 0.0)), ((1.0, 1.0), (1.0, 1.0)), "not negative"),
        (((0.0, 0.0), (0.0, 0.0)), ((1.0, 0.0), (1.0, 1.0)), "above 0"),
    ],
)
def test_a_network_that_cannot_be_is_refused(latency: Any, rate: Any, said: str) -> None:
    with pytest.raises(LocalError, match=said):
        NetworkModel(latency, rate, (0, 0))
    with pytest.raises(LocalError, match="a network of 3 ranks for 2 plans"):
        predict(plans("barrier", 2), alike(3))
