"""What a step's entry does where a rank learns a large state outside of views."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
from step_rank import HOLD, LEARN_FROM, Rank, committed, told, view

import quicoll.state.synchronisation
from quicoll.errors import PeerError
from quicoll.state.manifest import decode_manifest, encode_manifest
from quicoll.state.tree import flatten
from quicoll.state.version import StateVersion

if TYPE_CHECKING:
    import pytest


class Three(Rank):
    """Rank `rank` of three: worker-0 is at step 9 of a large state, worker-1 begins anew, worker-2 is at step 9 too."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        new, held = StateVersion(9, 9), {"w": np.zeros(LEARN_FROM)}
        self.group.rank = self.context.rank = rank
        self.state.register(lambda: held, lambda state: None)
        self.state.version = StateVersion() if rank == 1 else new
        rows = [told(StateVersion() if other == 1 else new, held) for other in range(3)]
        views = [view(2, world=2, committed_step=9), view(1, world=3, committed_step=9)]

        async def tell(mine: Any, *, counts: Any) -> Any:
            if len(mine) != len(rows[0]):  # what each has heard
                return np.concatenate([mine, mine])
            self.group.compared += 1
            return np.concatenate(rows if self.group.compared == 1 else [rows[0], rows[2]])

        self.group.all_gather = tell
        self.engine.answers["wait_view"] = lambda: views.pop() if len(views) > 1 else views[0]


async def test_the_others_go_on_in_the_next_view_where_a_rank_learns() -> None:
    rank = Three(2)
    rank.engine.answers["vote"] = committed(12)
    async with rank.step() as step:
        assert step.view == view(2, world=2, committed_step=9)
        assert step.number == 10
    assert rank.engine.asked("wait_view") == [(HOLD,), (HOLD, 1)]
    assert (rank.group.compared, rank.engine.asked("step_out")) == (2, [])


async def test_a_learner_steps_out_and_asks_to_be_back_however_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def manifest(group: Any, giver: int, digest: bytes, view_id: int) -> Any:
        return decode_manifest(encode_manifest(flatten({"w": np.zeros(LEARN_FROM)})), giver=giver, view_id=view_id)

    monkeypatch.setattr(quicoll.state.synchronisation, "_receive_manifest", manifest)
    for error in (None, PeerError("view 1 is over")):
        rank = Three(1)
        rank.engine.answers["step_out"] = error
        rank.engine.lessons = FakeLessons()
        await rank.protocol.ready()
        await asyncio.sleep(0)
        assert rank.engine.asked("step_out") == [(1,)]
        assert rank.engine.asked("step_in") == [()]
        ((learned,),) = rank.engine.asked("state_learned")
        assert learned["cause"] == ("view 1 is over" if error else "there is a view for this rank, or none any more")
        assert rank.state.torn
        assert rank.state.learned


class FakeLessons:
    """Of a teacher that never answers."""

    async def ask(self, *arguments: Any, **settings: Any) -> None:
        await asyncio.Event().wait()

    def end(self, *arguments: Any) -> None: ...
