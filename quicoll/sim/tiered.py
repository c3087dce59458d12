"""Tiers and shared state in the built-in workload, in the runs of some seeds (`Settings(tiers=True)`).

In each step every rank agrees on the next set of tiers, which some of them propose at times, others weigh, and whose
nodes may be absent; it changes the pieces of a strong state, one written and at times one deleted; it writes or deletes
one eventual piece; and every second step makes the eventual ones strong. What becomes of the strong pieces is a
function of the history, and part of the state; so is the set of tiers, which hangs on who proposed what. After its last
step a rank stays until all hold the same eventual pieces. quicoll.sim.tiered_checks looks at all of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim.tiered_checks import History, TieredChecker
    from quicoll.step.context import Step
    from quicoll.tiers import TierSet

__all__ = ["TieredWork", "hot_after", "hot_state"]

CONVERGE_S = 60.0
_TIERS = ("embedding", "dense", "expert", "archive")
_NAMES = ("a", "b", "c", "d", "e")
_LOOK_S = 0.2
_HOT = "hot/"


def hot_after(pieces: Mapping[str, Any], step: int, number: int) -> dict[str, Any]:
    """Return the strong pieces after a step. number: the mark of the step."""
    return {name: pieces[name] for name in pieces if name not in _gone(step)} | _new(step, number)


def hot_state(pieces: Mapping[str, Any]) -> dict[str, Any]:
    """Return strong pieces as the state has them."""
    return {f"{_HOT}{name}": value for name, value in pieces.items()}


def _new(step: int, number: int) -> dict[str, Any]:
    return {f"h{step % 4}": np.array([number, step])}


def _gone(step: int) -> tuple[str, ...]:
    return (f"h{(step + 2) % 4}",) if step % 3 == 0 else ()


class TieredWork:
    """What one process does with tiers and shared state."""

    def __init__(self, job: Job, checker: TieredChecker) -> None:
        self._job = job
        self._checker = checker
        self._hot = job.shared_state("hot", max_bytes=1 << 12)
        self._cold = job.shared_state("cold", consistency="eventual", max_bytes=1 << 12)
        checker.holds(job.node, self._cold.store)
        job.tiers.weigh(self._weighed)

    def state(self) -> dict[str, Any]:
        """Return its part of the state."""
        encoded = self._job.tiers.state()["tier_set"]
        return {"tiers": np.frombuffer(encoded, np.uint8).copy(), **hot_state(self._hot.state())}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over its part of a state."""
        self._job.tiers.load_state({"tier_set": state["tiers"].tobytes()})
        self._hot.load_state({name.removeprefix(_HOT): state[name] for name in state if name.startswith(_HOT)})

    async def work(self, step: Step, mark: int, history: History) -> None:
        """Do one step's part. mark: of the step. history: of the state from which it begins."""
        job, number, view_id = self._job, step.number, self._job.view.view_id
        self._checker.in_force(job.node, history, job.tiers.current)
        self._checker.read(job.node, "hot", view_id, number, await self._hot.read())
        # Drawn by what is being done, so that nothing else of the run hangs on how often it was drawn.
        draw = random.Random(f"quicoll.sim/tiered/{job.view.seed}/{job.node}/{view_id}/{number}").random  # noqa: S311 - a simulation
        await self._change_cold(draw(), _NAMES[int(draw() * len(_NAMES))])
        if draw() < 0.4:
            first, node = int(draw() * len(_TIERS)), job.node if draw() < 0.7 else f"worker-{int(6 * draw())}"
            placement = {"archive": [job.node], _TIERS[first]: [node]}
            job.tiers.propose(job.tiers.current.changed(active=_TIERS[first : first + 2], placement=placement))
        await job.tiers.agree(step)
        after = (*history, (view_id, job.world_size))
        step.on_commit(lambda: self._checker.in_force(job.node, after, job.tiers.current))
        self._hot.stage(step, _new(number, mark), delete=_gone(number))
        if number % 2 == 0:
            self._checker.strong_began(job.node, view_id, number)
            values = await self._cold.strong()
            self._checker.read(job.node, "cold", view_id, number, values)
            self._checker.strong_ended(job.node, view_id, number, [int(value[0]) for value in values.values()])

    async def _change_cold(self, chance: float, name: str) -> None:
        values = await self._cold.read()
        self._checker.looked(self._job.node, [int(value[0]) for value in values.values()])
        if chance < 0.35 and name in values:
            await self._cold.write({}, delete=[name])
            self._checker.deleted(self._job.node, int(values[name][0]))
        else:
            await self._cold.write({name: np.array([self._checker.number()])})

    def _weighed(self, proposed: TierSet) -> str:
        refuses = "dense" in proposed.active and proposed.version % 3 == 0 and self._job.node.endswith("1")
        return "no room for it" if refuses else ""

    async def converge(self) -> None:
        """Stay until all ranks of the view hold the same eventual pieces."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while not self._checker.converged():
            if clock() - began > CONVERGE_S:
                self._checker.apart(self._job.node, CONVERGE_S)
                return
            await asyncio.sleep(_LOOK_S)
