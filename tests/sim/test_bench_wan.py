"""`quicoll bench wan` in the simulator: one short row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quicoll.cli.main import main

ROW = ["--link", "500mbit 10ms 0.1%", "--mib", "1", "--operations", "3", "--congestion", "bbr", "--json", "-"]


def measured(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, dict[str, Any], str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "wan", *ROW, *arguments])
    said = capsys.readouterr()
    return ended.value.code, json.loads(said.out), said.err


def test_a_row_is_the_same_again_and_not_below_what_the_link_allows(capsys: pytest.CaptureFixture[str]) -> None:
    status, first, said = measured(capsys)
    assert status == 0
    assert "quicoll bbr" in said
    (cell,) = first["cells"]
    assert (cell["link"]["mbit"], cell["ranks"], cell["congestion"]) == (500, 2, "bbr")
    (seconds,) = cell["seconds"]["quicoll"]
    assert len(seconds) == 3
    # Its two phases may overlap by a delay. Processor time is none here, so no machine makes it slower.
    assert all(cell["ideal_s"] - 0.005 < each < 10 * cell["ideal_s"] for each in seconds)
    assert measured(capsys)[1]["cells"] == first["cells"]


def test_four_ranks_share_the_uplinks_of_their_hosts_and_use_them(capsys: pytest.CaptureFixture[str]) -> None:
    status, found, _ = measured(capsys, "--ranks", "4")
    assert status == 0
    (cell,) = found["cells"]
    (seconds,) = cell["seconds"]["quicoll"]
    # Each host has to send one and a half times the tensor over its one uplink; a path for each pair would take a third
    # of that. The three connections of a host leave some of it, and no more.
    of_the_uplink = 1.5 * (1 << 20) / (500 * 125_000)
    assert all(of_the_uplink < each < 2 * cell["ideal_s"] for each in seconds[1:])


def test_rank_0_s_own_rate_bounds_what_it_receives(capsys: pytest.CaptureFixture[str]) -> None:
    _, found, _ = measured(capsys, "--link", "500mbit 10ms back=50mbit")
    slow, usual = (cell["seconds"]["quicoll"][0] for cell in reversed(found["cells"]))
    assert min(slow) > (1 << 20) / (50 * 125_000) > max(usual[1:])


def test_what_takes_longer_than_its_time_is_given_up_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--link", "100kbit 10ms", "--operations", "2", "--limit", "2"]
    status, found, said = measured(capsys, *slow)
    assert status == 1
    assert "100kbit 10ms, 2 ranks, all_reduce of 1 MiB, bbr: quicoll, run 0:" in said
    assert [cell["over_ideal"]["quicoll"] is None for cell in found["cells"]] == [False, True]
