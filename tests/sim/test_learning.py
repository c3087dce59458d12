"""A rank that comes back to a large state learns it beside the others' steps, and what may fail meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from depth import some

from quicoll.errors import Diverged, JobDone, LocalError, QuicollError
from quicoll.sim import Settings, Simulation
from quicoll.sim.invariants import state_digest
from quicoll.sim.trace.recording import Recording

if TYPE_CHECKING:
    from quicoll.job import Job

STEPS = 25
KIB = 1024
FROZEN = (np.arange(48 * KIB) % 251).astype(np.uint8)


def reference(step: int) -> bytes:
    return state_digest({"frozen": FROZEN if step else np.zeros_like(FROZEN), "hot": np.full(8, float(step))})


async def train(job: Job, sim: Any, *, dense: bool = False) -> int:
    """Of a state of 48 KiB the first step fills nearly all, and the others change the rest; or each changes all."""
    mine: dict[str, Any] = {"frozen": np.zeros_like(FROZEN), "hot": np.zeros(8)}

    def load(state: Any) -> None:
        for name, value in state.items():
            np.copyto(mine[name], value)

    def apply(total: Any) -> None:
        if not mine["hot"][0]:
            mine["frozen"][:] = FROZEN
        mine["hot"] += total / total[1]
        if dense:
            mine["frozen"] += 1

    job.register_state(lambda: mine, load)
    while not sim.everyone_at(STEPS):
        try:
            async with job.step() as step:
                await asyncio.sleep(0.05)
                total = await job.group.all_reduce(np.ones(8))
                step.on_commit(lambda total=total: apply(total))
        except (LocalError, Diverged, JobDone):
            raise
        except QuicollError:
            continue
    return job.committed_step


class Run:
    """A run in which worker-2 comes back at 0.6 s, and what was told of it: (seconds, node, kind, fields)."""

    def __init__(
        self,
        script: Callable[[Simulation], Any] = lambda sim: None,
        *,
        worker: Any = train,
        ranks: int = 3,
        reference: Any = reference,
        **settings: Any,
    ):
        settings = {"learn_from_bytes": 8 * KIB, "lost_after": 0.5, "limit": 90.0, "recovery": 20.0} | settings
        recording = Recording()
        sim = Simulation(
            worker, seed=5, settings=Settings(ranks=ranks, **settings), reference=reference, recorder=recording.record,
        )  # fmt: skip
        sim.at(0.3).crash(ranks - 1)
        sim.at(0.6).restart(ranks - 1)
        script(sim)
        self.outcome = sim.run()
        self.told = [(entry.t_ns / 1e9, entry.who, entry.kind, entry.what) for entry in recording.entries]

    def of(self, kind: str, node: str = "worker-2") -> list[tuple[float, Any]]:
        return [(at, detail) for at, who, what, detail in self.told if (who, what) == (node, kind)]

    def committed(self, begin: float, end: float) -> int:
        return sum(begin < at < end for at, _ in self.of("step_committed", "coordinator"))


def test_the_others_commit_steps_while_a_rank_learns_and_the_view_moves_only_what_changed() -> None:
    run = Run()
    assert run.outcome.error is None, run.outcome.error
    assert len(set(run.outcome.results)) == 1
    ((began, learning),) = run.of("state_learning")
    ((ended, learned),) = run.of("state_learned")
    assert (learning["from_node"], learned["cause"], learned["passes"]) == ("worker-0", "", 2)
    assert learning["chunks"] <= learned["chunks"] <= learning["chunks"] + 8
    assert run.committed(began, ended) > 8
    ((received, _),) = run.of("state_received")
    assert received - ended < 0.2
    views = [(at, what["nodes"]) for at, what in run.of("view_installed") if at > 0.5]
    assert [nodes for _, nodes in views[:2]] == [[f"worker-{rank}" for rank in range(3)]] * 2
    assert views[0][0] < began < ended < views[1][0]
    with_two = [what["world_size"] for at, what in run.of("view_installed", "worker-0") if began < at < ended]
    assert with_two == [2]


def test_a_small_state_is_handed_over_at_once() -> None:
    run = Run(learn_from_bytes=256 * KIB)
    assert run.outcome.error is None, run.outcome.error
    assert run.of("state_learning") == []
    assert len(run.of("state_received")) == 1


def test_the_one_of_two_ranks_that_is_left_goes_on_alone_while_the_other_learns() -> None:
    run = Run(ranks=2)
    assert run.outcome.error is None, run.outcome.error
    ((began, _),) = run.of("state_learning", "worker-1")
    ((ended, learned),) = run.of("state_learned", "worker-1")
    assert learned["cause"] == ""
    assert run.committed(began, ended) > 8


def dense(job: Job, sim: Any) -> Any:
    return train(job, sim, dense=True)


def test_a_state_of_which_every_step_changes_all_is_handed_over_without_being_learned() -> None:
    run = Run(worker=dense, reference=None)
    assert run.outcome.error is None, run.outcome.error
    assert len(set(run.outcome.results)) == 1
    ((began, _),) = run.of("state_learning")
    ((ended, learned),) = run.of("state_learned")
    assert (learned["passes"], learned["chunks"], learned["cause"]) == (0, 0, "nearly all of it changes in every step")
    assert ended - began < 0.3
    assert len(run.of("state_received")) == 1


def test_each_of_two_ranks_that_learn_at_once_has_a_teacher_of_its_own() -> None:
    run = Run(lambda sim: sim.at(0.3).crash(3) and sim.at(0.6).restart(3), ranks=5)
    assert run.outcome.error is None, run.outcome.error
    taught = {
        node: [what["from_node"] for _, what in run.of("state_learning", node)] for node in ("worker-3", "worker-4")
    }
    assert taught == {"worker-3": ["worker-0"], "worker-4": ["worker-1"]}
    assert all(what["cause"] == "" for node in taught for _, what in run.of("state_learned", node))


NO_MORE = "there is a view for this rank, or none any more"
FAULTS: dict[str, tuple[str, Callable[[Simulation], Any]]] = {
    "the teacher is killed": ("lost: ", lambda sim: sim.at(0.9).crash(0) and sim.at(1.4).restart(0)),
    "the teacher stays away": ("lost: ", lambda sim: sim.at(0.9).crash(0) and sim.at(4.0).heal()),
    "the teacher stands still": ("lost: silent", lambda sim: sim.at(0.9).pause(0, 2.0) and sim.at(4.0).heal()),
    "the teacher leaves": ("lost: closed", lambda sim: sim.at(0.9).leave(0) and sim.at(2.0).heal()),
    "the teacher lies": ("", lambda sim: sim.at(0.9).lie(0, to=2) and sim.at(1.3).heal()),
    "the link is cut": ("lost: silent", lambda sim: sim.at(0.9).partition({0}, {2}) and sim.at(3.0).heal()),
    "the link is cut for a moment": ("", lambda sim: sim.at(0.9).partition({0}, {2}) and sim.at(1.1).heal()),
    "bits flip on the way": ("", lambda sim: sim.at(0.9).corrupt(2, times=4) and sim.at(2.0).heal()),
    "the learner is killed": ("", lambda sim: sim.at(0.9).crash(2) and sim.at(1.4).restart(2)),
    "the learner is asked to stop": ("it ended", lambda sim: sim.at(0.9).terminate(2) and sim.at(2.0).heal()),
    "the learner is cut off": (
        "lost: silent",
        lambda sim: sim.at(0.9).partition({2}, {0, 1, "coordinator"}) and sim.at(3.0).heal(),
    ),
    "another member is killed": ("", lambda sim: sim.at(0.9).crash(1) and sim.at(1.4).restart(1)),
    "the coordinator starts anew": (
        NO_MORE,
        lambda sim: sim.at(0.9).crash("coordinator") and sim.at(1.2).restart("coordinator"),
    ),
}


OFTEN = ("the teacher is killed", "the link is cut", "the learner is killed", "the coordinator starts anew")


@pytest.mark.parametrize(
    "name",
    [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in some([n for n in FAULTS if n not in OFTEN], 2))],
)
def test_what_fails_while_a_rank_learns_costs_its_learning_alone(name: str) -> None:
    """The invariants hold, all come to the end, and the learner says why it has learned no more."""
    cause, script = FAULTS[name]
    run = Run(script)
    assert run.outcome.error is None, run.outcome.error
    (began, _), *_ = run.of("state_learning")
    (_, learned), *_ = run.of("state_learned")
    assert 0.6 < began < 0.9
    assert learned["cause"].startswith(cause)
    assert bool(learned["cause"]) == bool(cause)


def test_the_end_of_the_job_ends_the_learning() -> None:
    """The others stop while it learns; nobody waits for it, and it does not begin anew."""

    async def until(job: Job, sim: Simulation) -> int:
        ends = sim.now + 1.0
        return await train(job, _Until(lambda step: job.node != "worker-2" and sim.now > ends))

    run = Run(worker=until)
    assert run.outcome.error is None, run.outcome.error
    ((_, learned),) = run.of("state_learned")
    assert learned["cause"].startswith("lost: closed")
    assert run.of("job_done")


class _Until:
    def __init__(self, everyone_at: Callable[[int], bool]) -> None:
        self.everyone_at = everyone_at
