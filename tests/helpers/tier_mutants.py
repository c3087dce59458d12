"""Mutants of tiers and shared state, and the scenarios in which the built-in workload finds them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quicoll.sim import Settings
from quicoll.sim.scenario.language import parse_events
from quicoll.sim.scenario.swarm import Scenario
from quicoll.tiers import settling, shared
from quicoll.tiers.pieces import PieceStore
from quicoll.tiers.shared import SharedState
from quicoll.tiers.spreading import Spreader
from quicoll.tiers.tiers import Tiers

if TYPE_CHECKING:
    import pytest

    Patch = pytest.MonkeyPatch

__all__ = ["TIER_MUTANTS", "scenario"]

SETTINGS = Settings(ranks=3, tiers=True, lost_after=0.5, recovery=30.0, limit=120.0)


def scenario(text: str, *, seed: int = 5, steps: int = 10) -> Scenario:
    """Return a scenario with tiers and shared state."""
    return Scenario(seed=seed, steps=steps, compute_s=0.3, settings=SETTINGS, events=parse_events(text))


def what_is_agreed_is_in_force_at_once(patch: Patch) -> None:
    """Before the commit: where the step is aborted, some ranks have gone over."""
    agree = Tiers.agree

    async def hasty(self: Tiers, step: Any) -> Any:
        agreed = await agree(self, step)
        self.load_state({"tier_set": agreed.encoded})
        return agreed

    patch.setattr(Tiers, "agree", hasty)


def ranks_go_over_to_what_they_have_proposed_alone(patch: Patch) -> None:
    decided = Tiers._decided

    def stubborn(self: Tiers, choice: Any, view: Any) -> None:
        if choice.chosen is None or choice.chosen == self._pending:
            decided(self, choice, view)

    patch.setattr(Tiers, "_decided", stubborn)


def each_rank_takes_its_own_pieces_for_strong(patch: Patch) -> None:
    async def own(self: SharedState, *, timeout: float | None = None) -> dict[str, Any]:
        return await self.read()

    patch.setattr(SharedState, "strong", own)


def deletions_are_not_remembered(patch: Patch) -> None:
    """The name is dropped where it is deleted, and nobody hears of it."""
    write = PieceStore.write

    def forgetful(self: PieceStore, values: Any, *, step: int, writer: str, delete: Any = ()) -> None:
        write(self, values, step=step, writer=writer)
        for name in delete:
            if name in self._pieces:
                self._drop(name)

    patch.setattr(PieceStore, "write", forgetful)


def deletions_are_forgotten_and_horizons_are_not_kept(patch: Patch) -> None:
    """Who was cut off gives back what was deleted and forgotten meanwhile."""
    wants = PieceStore.wants
    patch.setattr(PieceStore, "wants", lambda self, entry, horizon=None: wants(self, entry))
    settle = PieceStore.settle

    def careless(self: PieceStore, names: Any, horizon: Any) -> list[str]:
        live = [name for name, piece in self._pieces.items() if not piece.entry.deleted]
        return settle(self, [*names, *live], horizon)

    patch.setattr(PieceStore, "settle", careless)
    honest = settling.settlement

    def all_count(summaries: Any, listings: Any, view: Any, horizon: Any) -> Any:
        return honest([replace_horizon(each, horizon) for each in summaries], listings, view, horizon)

    patch.setattr(shared, "settlement", all_count)


def replace_horizon(summary: Any, horizon: Any) -> Any:
    """Return a summary that tells of another horizon."""
    return settling.PieceSummary(summary.state, summary.digest, horizon, summary.step)


def nothing_spreads(patch: Patch) -> None:
    async def silent(self: Spreader, spread: Any) -> None:
        return None

    patch.setattr(Spreader, "_spread", silent)


A_STEP_IS_ABORTED = scenario(
    "sim.at_vote(2, start=0.3).crash(0); sim.at(1.0).restart(0);"
    "sim.at_vote(2, start=2.0).crash(1); sim.at(3.0).restart(1); sim.at(5.0).heal()",
    seed=4,
)
A_RANK_IS_CUT_OFF = scenario('sim.at(1.0).partition({0}, {1, 2, "coordinator"}); sim.at(9.0).heal()', steps=24, seed=6)
QUIET = scenario("sim.at(0.1).heal()")
ODD = replace(QUIET, steps=9)  # after the last step whose number is even pieces are written once more

TIER_MUTANTS = (
    (what_is_agreed_is_in_force_at_once, A_STEP_IS_ABORTED, "all-or-none"),
    (ranks_go_over_to_what_they_have_proposed_alone, QUIET, "one-set"),
    (each_rank_takes_its_own_pieces_for_strong, replace(QUIET, seed=6), "one-reading"),
    (deletions_are_not_remembered, QUIET, "deleted"),
    (deletions_are_forgotten_and_horizons_are_not_kept, A_RANK_IS_CUT_OFF, "deleted"),
    (nothing_spreads, ODD, "converge"),
)
