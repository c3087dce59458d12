"""Operations between far hosts with bbr, over what they take at best: the first of new connections, and those after."""

from __future__ import annotations

from statistics import median

import pytest

from quicoll.bench.wan import LINKS, WanCell
from quicoll.bench.wan_simulated import simulate_cell


@pytest.mark.slow
@pytest.mark.parametrize("link", ["metro", "wan", "badwan", "satellite", "loss2", "bursts", "asymmetric"])
def test_a_first_operation_takes_less_than_twice_what_it_must_and_later_ones_a_quarter_more(link: str) -> None:
    cell = WanCell(LINKS[link], "all_reduce", 4, 2, "bbr", 7)
    first, *later = (seconds / cell.ideal_s for seconds in simulate_cell(cell, 0).seconds)
    print([round(first, 3), *(round(each, 3) for each in later)])  # noqa: T201 - what a failure is looked at by
    assert first < 2.0
    assert median(later) < 1.25, later
    assert max(later) < 1.6, later
