"""Links, what is the least time over them, and the figures of what was measured."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from quicoll.bench import wan_emulated
from quicoll.bench.contenders import Contender
from quicoll.bench.wan import LINKS, WanCell, WanFigure, WanLink, parse_link, wan_report
from quicoll.bench.wan_emulated import demand_emulator, emulator_commands, tcp_control
from quicoll.bench.wan_ranks import RankPlan
from quicoll.bench.wan_timing import WanSamples, time_operations
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.bench.cases import Case


def cell(link: str = "wan", **options: Any) -> WanCell:
    usual = {"kind": "all_reduce", "mib": 4, "ranks": 2, "congestion": "bbr", "operations": 6}
    return WanCell(LINKS[link], **{**usual, **options})


def test_the_ideal_is_the_bytes_at_the_rate_and_the_delays_of_a_ring() -> None:
    assert cell().ideal_s == pytest.approx((4 << 20) / 25e6 + 2 * 0.025)
    assert cell(ranks=4).ideal_s == pytest.approx(1.5 * (4 << 20) / 25e6 + 6 * 0.025)
    assert cell(kind="transfer").ideal_s == pytest.approx((4 << 20) / 25e6 + 0.025)


def test_the_slower_way_decides_where_both_are_used() -> None:
    assert cell("asymmetric").ideal_s == pytest.approx((4 << 20) / 6.25e6 + 0.05)
    assert cell("asymmetric", kind="transfer").ideal_s == pytest.approx((4 << 20) / 25e6 + 0.025)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("200mbit 50ms", WanLink("200mbit 50ms", 200, 50)),
        ("1gbit 300us 0.1%", WanLink("1gbit 300us 0.1%", 1000, 0.3, 0.001)),
        ("50ms  200Mbit 2%", WanLink("50ms 200mbit 2%", 200, 50, 0.02)),
        (
            "500kbit 1s .5% burst=8 queue=0.25 back=250kbit",
            WanLink("500kbit 1s .5% burst=8 queue=0.25 back=250kbit", 0.5, 1000, 0.005, 8, 0.25, 0.25),
        ),
    ],
)
def test_a_link_is_read_as_people_write_it(text: str, link: WanLink) -> None:
    found = parse_link(text)
    assert found.name == link.name
    for what in ("mbit", "rtt_ms", "loss", "burst", "queue", "back_mbit"):
        assert getattr(found, what) == pytest.approx(getattr(link, what)), what


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a rate and a round trip"),
        ("200mbit", "needs a rate and a round trip"),
        ("back=200mbit 50ms", "needs a rate and a round trip"),
        ("200 50ms", "'200' is nothing of that"),
        ("200mbit 50ms fast", "'fast' is nothing of that"),
        ("200mbit 50ms 300mbit", "'300mbit' is there twice"),
        ("200mbit 50ms burst=8ms", "'burst=8ms' is nothing of that"),
        ("200mbit 50ms back=8ms", "'back=8ms' is nothing of that"),
        ("200mbit 50ms -1%", "'-1%' is nothing of that"),
        ("200mbit 50ms 60%", r"loss is 0 to 0\.3, not 0\.6"),
        ("0.01mbit 50ms", r"mbit is 0\.1 to 100000, not 0\.01"),
        ("200mbit 11s", r"rtt_ms is 0\.1 to 10000, not 11000"),
        ("200mbit 50ms burst=0.5", r"burst is 1 to 1000, not 0\.5"),
    ],
)
def test_what_is_no_link_is_refused_with_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(LocalError, match=message):
        parse_link(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mib": 0}, "MiB are 1 to 256, not 0"),
        ({"mib": 257}, "MiB are 1 to 256, not 257"),
        ({"mib": 256, "ranks": 5}, "tensors of all ranks have 1024 MiB at most, not 1280"),
        ({"ranks": 1}, "ranks are 2 to 16, not 1"),
        ({"operations": 1}, "operations are 2 to 100, not 1"),
        ({"limit_s": 0.5}, "1 to 3600 seconds, not 0.5"),
        ({"congestion": "vegas"}, "bbr, cubic, reno, not 'vegas'"),
        ({"kind": "barrier"}, "all_reduce and transfer, not 'barrier'"),
        ({"kind": "transfer", "ranks": 4}, "transfer is between 2 ranks, not 4"),
    ],
)
def test_a_cell_out_of_bounds_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LocalError, match=message):
        cell(**options)


def test_the_first_operation_of_each_run_is_told_of_by_itself() -> None:
    figure = WanFigure.of([[9.0, 1.0, 2.0, 3.0], [7.0, 4.0, 5.0, 40.0], [8.0, 1.0, 1.0, 1.0]], ideal_s=2.0)
    assert figure == WanFigure(first=4.0, median=1.0, p90=20.0, operations=9)


def test_without_a_second_operation_there_is_no_figure() -> None:
    assert WanFigure.of([[9.0], []], ideal_s=1.0) is None
    assert wan_report(cell(), {"quicoll": [[9.0]]})["over_ideal"] == {"quicoll": None}


def test_the_plan_of_a_rank_is_the_same_after_the_way_to_it() -> None:
    plan = RankPlan(cell("bursts", limit_s=30.0), True, "bench", "/certs", 7100, "/result")
    assert msgspec.json.decode(msgspec.json.encode(plan), type=RankPlan) == plan


class Group:
    """Two ranks, of which the other takes twice as long."""

    async def barrier(self) -> None:
        return

    async def all_gather_object(self, value: list[float]) -> list[list[float]]:
        return [value, [2 * each for each in value]]


class Job:
    group = Group()


class Clocked(Contender):
    """Moves the clock by so much with each operation, and fails where that is none."""

    name = "clocked"

    def __init__(self, *seconds: float | None) -> None:
        self.time = 0.0
        self._seconds = iter(seconds)

    async def prepare(self, case: Case) -> None:
        assert (case.kind, case.size) == ("all_reduce", 4 << 20)

    async def call(self, case: Case) -> None:
        seconds = next(self._seconds)
        if seconds is None:
            raise LocalError("no more")
        self.time += seconds

    async def close(self) -> None:
        return


def timed(contender: Clocked, **options: Any) -> WanSamples:
    job: Any = Job()
    return asyncio.run(time_operations(job, contender, cell(**options), lambda: contender.time))


def test_the_slowest_rank_counts() -> None:
    assert timed(Clocked(1.0, 2.0), operations=2) == WanSamples((2.0, 4.0))


def test_an_operation_that_would_not_end_in_time_is_not_begun() -> None:
    """As told by the slowest rank: 4 s are gone after two operations, and a third one of 2 s would end after 5 s."""
    assert timed(Clocked(1.0, 1.0, 1.0), limit_s=5.0) == WanSamples((2.0, 2.0))


def test_what_was_measured_before_a_failure_is_kept_with_its_reason() -> None:
    assert timed(Clocked(1.0, 2.0, None)) == WanSamples((2.0, 4.0), "LocalError: no more")


def test_the_emulator_is_told_of_rates_queues_delay_and_loss() -> None:
    assert emulator_commands(LINKS["bursts"]) == [
        "set up 100000000 down 100000000 upqueue 625000 downqueue 625000",
        "set delay 25000us loss 0.01 burst 8",
    ]
    assert emulator_commands(LINKS["asymmetric"]) == [
        "set up 200000000 down 200000000 upqueue 1250000 downqueue 1250000",
        "set delay 25000us loss 0.001 burst 0",
        "set 0 down 50000000 downqueue 312500",
    ]


def test_gloo_is_measured_over_bbr_where_the_kernel_has_it(tmp_path: Path) -> None:
    controls = tmp_path / "controls"
    controls.write_text("reno cubic bbr\n")
    assert tcp_control(controls) == "bbr"
    controls.write_text("reno cubic\n")
    assert tcp_control(controls) == "cubic"
    assert tcp_control(tmp_path / "none") == "cubic"


def test_all_that_an_emulated_link_needs_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(wan_emulated, "find_spec", lambda name: None)
    with pytest.raises(LocalError) as refused:
        demand_emulator(tmp_path / "wanem.py", gloo=True)
    for missing in (f"no file {tmp_path}/wanem.py", "root", "the program gcc", "the program ip", "torch", "simulated"):
        assert missing in str(refused.value), missing
