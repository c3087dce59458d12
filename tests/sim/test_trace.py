"""A recorded run: the story says what happened and why, the timeline opens, recording changes nothing."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quicoll.errors import LocalError
from quicoll.sim import Conditions, Outcome, Recording, Simulation
from quicoll.sim.scenario import events as faults
from quicoll.sim.trace.spans import Entry, TraceSpan, fault_spans, node_spans
from quicoll.sim.trace.story import list_nodes, tell
from quicoll.sim.workload import COMPUTE_S, worker

if TYPE_CHECKING:
    from quicoll.job import Job


async def work(job: Job, sim: Simulation) -> int:
    return await worker(job, lambda: sim.everyone_at(6))


def disturb(sim: Simulation) -> None:
    sim.at(0.2).partition({0, 1}, {2, 3})
    sim.at(0.5).crash(3)
    sim.at(0.8).crash("coordinator")
    sim.at(0.9).resume(0)
    sim.at(2.0).heal()
    sim.at(2.05).pause(1, 0.1)


@pytest.fixture(scope="module")
def run() -> tuple[Recording, Outcome]:
    recording = Recording(datagrams=50)
    sim = Simulation(work, seed=1, compute=COMPUTE_S, recorder=recording.record)
    disturb(sim)
    outcome = sim.run()
    assert outcome.ok, outcome.error
    return recording, outcome


def test_recording_changes_nothing(run: tuple[Recording, Outcome]) -> None:
    sim = Simulation(work, seed=1, compute=COMPUTE_S)
    disturb(sim)
    assert sim.run().digest == run[1].digest


def test_the_story_says_what_happened_until_when_and_why(run: tuple[Recording, Outcome]) -> None:
    story = run[0].explain(run[1])
    for line in (
        "0.000 s  the coordinator and workers 0-3 started",
        "view 1 formed of workers 0-3, 4 ranks",
        "0.200 s  FAULT  partition({0, 1}, {2, 3}); until 2.000 s (heal())",
        "0.500 s  FAULT  crash(3); down until 2.000 s",
        "the coordinator lost worker 3: worker-3 was lost: nothing listens at its address any more",
        "was not committed: worker-3 was lost",
        '0.800 s  FAULT  crash("coordinator"); down until 2.000 s',
        "0.900 s  FAULT  resume(0): nothing is done",
        "workers 0-2 lost the coordinator",
        "2.000 s  the coordinator and worker 3 started again",
        "2.050 s  FAULT  pause(1, 0.1); until 2.150 s",
        "got the state after step",
        "returned, done",
        "VERDICT  all is well",
    ):
        assert line in story
    moments = [float(line.split()[0]) for line in story.splitlines() if " s  " in line and line.startswith(" ")]
    assert moments == sorted(moments)
    assert len(moments) < len(run[0].entries) / 5, "grouped, not one line for each entry"


def test_a_failed_run_s_story_ends_with_what_led_to_it() -> None:
    async def fail(job: Job, sim: Simulation) -> None:
        async with job.step():
            await job.group.barrier()
            raise ValueError("the user's own mistake")

    recording = Recording()
    sim = Simulation(fail, seed=3, recorder=recording.record)
    sim.at(0.001).slow(2, 0.0001)
    story = recording.explain(sim.run())
    verdict = story.index("VERDICT  FAILED  worker: ValueError: the user's own mistake")
    after = story[verdict:]
    assert "in force: slow(2, 0.0001), since 0.001 s" in after
    assert "collective_ended op=barrier fine=True" in after
    assert "process_ended ValueError: the user's own mistake" in after


def test_the_timeline_has_a_row_for_every_node_and_whole_slices(run: tuple[Recording, Outcome], tmp_path: Path) -> None:
    recording, outcome = run
    path = tmp_path / "trace.json"
    recording.write_chrome(path, outcome)
    trace = json.loads(path.read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    rows = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(rows) == ["faults", "coordinator", "worker-0", "worker-1", "worker-2", "worker-3"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in slices} == {"process", "down", "paused", "view", "step", "collective"}
    end_us = outcome.virtual_s * 1e6
    assert all(event["dur"] >= 0 and event["ts"] + event["dur"] <= end_us + 1e-3 for event in slices)
    steps = [event for event in slices if event["cat"] == "step" and event["pid"] == rows["worker-0"]]
    assert [event["args"]["ended by"] for event in steps].count("committed") == 6
    down = next(event for event in slices if event["cat"] == "down" and event["pid"] == rows["worker-3"])
    assert (down["ts"], down["dur"]) == (500_000, 1_500_000)
    begun = {(event["id"], event["name"]) for event in events if event["ph"] == "b"}
    assert begun == {(event["id"], event["name"]) for event in events if event["ph"] == "e"}
    assert "partition({0, 1}, {2, 3})" in {name for _, name in begun}
    assert sum(event.get("cat") == "send" for event in events) == 50, "datagrams are as many as were asked for"
    assert trace["otherData"]["digest"] == outcome.digest


def test_slices_of_a_row_nest(run: tuple[Recording, Outcome]) -> None:
    by_row: dict[tuple[str, str], list[TraceSpan]] = {}
    for span in node_spans(run[0].entries):
        by_row.setdefault((span.node, span.lane), []).append(span)
    for spans in by_row.values():
        for one, next_one in pairwise(spans):
            assert one.end_ns is not None
            assert one.end_ns <= next_one.start_ns


def test_a_place_that_cannot_be_written_is_said(run: tuple[Recording, Outcome], tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot write the trace"):
        run[0].write_chrome(tmp_path / "none" / "trace.json", run[1])
    with pytest.raises(LocalError, match="not negative"):
        Recording(datagrams=-1)


# -- what lasts ------------------------------------------------------------------------------------------------------


def spans_of(*script: tuple[int, faults.Fault]) -> list[tuple[str, int, int | None, str]]:
    found = fault_spans([Entry(t_ns, "fault", "sim", fault) for t_ns, fault in script])
    return [(span.name, span.start_ns, span.end_ns, span.ended_by) for span in found]


A, B, C = ("worker-0",), ("worker-1",), ("worker-2",)
AB, BC = (*A, *B), (*B, *C)
BAD = faults.SetConditions(Conditions(loss=0.1))


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ([(1, faults.PartitionPath(A, B))], [("partition({0}, {1})", 1, None, "")]),
        ([(1, faults.PartitionPath(A, B)), (5, faults.Heal())], [("partition({0}, {1})", 1, 5, "heal()")]),
        ([(1, faults.PartitionPath(A, B)), (5, faults.Repair())], [("partition({0}, {1})", 1, 5, "repair()")]),
        (
            [(1, faults.PartitionPath(A, BC)), (2, faults.Repair(A, B)), (3, faults.Repair(C, A))],
            [("partition({0}, {1, 2})", 1, 3, "repair({2}, {0})")],
        ),
        (
            [(1, faults.PartitionPath(A, B, True)), (2, faults.HoldPath(A, B)), (3, faults.Heal())],
            [
                ("partition({0}, {1}, one_way=True)", 1, 2, "hold({0}, {1})"),
                ("hold({0}, {1})", 2, 3, "heal()"),
            ],
        ),
        (
            [(1, faults.PartitionPath(A, B)), (2, faults.HoldPath(A, B))],
            [("partition({0}, {1})", 1, None, ""), ("hold({0}, {1})", 2, None, "")],
        ),
        ([(1, BAD), (4, faults.Heal())], [("conditions(Conditions(loss=0.1))", 1, 4, "heal()")]),
        (
            [(1, faults.Slow("worker-0", 5)), (2, faults.Slow("worker-0", 0))],
            [("slow(0, 5e-09)", 1, 2, "slow(0, 0.0)")],
        ),
        (
            [(1, faults.Drift("worker-0", 9)), (2, faults.Drift("worker-1", 9)), (3, faults.Heal())],
            [("drift(0, ppm=9)", 1, 3, "heal()"), ("drift(1, ppm=9)", 2, 3, "heal()")],
        ),
    ],
)
def test_a_fault_lasts_until_what_undoes_it(
    script: list[tuple[int, faults.Fault]], expected: list[tuple[str, int, int | None, str]]
) -> None:
    assert spans_of(*script) == expected


def test_names_are_short_for_people() -> None:
    assert (
        list_nodes(["coordinator", "worker-3", "worker-0", "worker-1", "worker-2"]) == "the coordinator and workers 0-3"
    )
    assert list_nodes(["worker-5", "worker-0", "worker-1"]) == "workers 0, 1 and 5"
    assert list_nodes(["worker-7"]) == "worker 7"
    assert list_nodes([]) == "nobody"


OUTCOME = Outcome(
    seed=1, error=None, injected={}, committed=2, aborted=0, views=1, virtual_s=2, wall_s=1, digest="", events=4
)


def test_a_decision_that_a_rank_hears_of_late_is_told() -> None:
    def committed(t_ns: int, who: str, step: int) -> Entry:
        return Entry(t_ns, "step_committed", who, {"step": step, "view": 1})

    entries = [committed(1_000_000_000 + step, "coordinator", step) for step in (1, 2)]
    entries += [committed(1_000_000_003, f"worker-{rank}", 1) for rank in range(2)]
    entries += [committed(1_000_000_003, "worker-0", 2), committed(1_500_000_000, "worker-1", 2)]
    story = tell(entries, OUTCOME)
    assert "steps 1 to 2 committed" in story
    assert "worker 1 heard only now, 0.5 s late, that step 2 is committed" in story
    assert "worker 0" not in story


def test_after_the_last_step_was_lost_no_decision_is_taken_for_that_of_another_step() -> None:
    """The coordinator goes on counting, and the ranks from the checkpoint that they go on from."""
    entries = [Entry(1_000_000_000, "step_committed", "coordinator", {"step": 5, "view": 1})]
    entries += [Entry(9_000_000_000, "step_committed", "coordinator", {"step": 6, "view": 2})]
    entries += [Entry(9_000_000_001, "step_committed", "worker-0", {"step": 5, "view": 2})]
    assert "heard only now" not in tell(entries, OUTCOME)
