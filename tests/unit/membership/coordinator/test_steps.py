"""What a commit looks at, so that it need not be looked at a second time before the decision goes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from coordinator_bench import MS, SECOND, Bench

from quicoll.membership import messages as m
from quicoll.membership.coordinator.actions import ViewProposed
from quicoll.membership.coordinator.reconsidering import Reconsidering

if TYPE_CHECKING:
    from collections.abc import Callable

NODES = ("a", "b", "c", "d", "e")


def look_always(self: Reconsidering, now_ns: int, *, stays: bool = False) -> None:
    LOOK(self, now_ns)


LOOK: Callable[..., None] = Reconsidering.look


class Life:
    """A coordinator whose nodes come, vote, differ, ask to leave and are lost, as a seed has it."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch | None) -> None:
        self.chance = random.Random(seed)
        if patch is not None:
            patch.setattr(Reconsidering, "look", look_always)
        self.odd = self.chance.choice((0.05, 0.5, 0.7))  # of the steps, in which a result differs
        spares = self.chance.choice((0, 0, 1))
        self.bench = Bench(3, min_world_size=2, max_world_size=4, warm_spares=spares)
        self.bench.join("a", "b", "c")
        self.timers: list[int | None] = []
        self.commits = 0

    def live(self, turns: int) -> None:
        for _ in range(turns):
            self.turn()
            self.timers.append(self.bench.core.next_timer())

    def turn(self) -> None:
        bench, chance, core = self.bench, self.chance, self.bench.core
        here = [node for node in NODES if node in bench.incarnations]
        away = [node for node in NODES if node not in bench.incarnations]
        what = chance.random()
        bench.advance(chance.choice((0, 1, 1, 30, 400)) * MS)
        if what < 0.08 and away:
            bench.join(chance.choice(away), incarnation=1 + bench.now // MS)
        elif what < 0.13 and len(here) > 2:
            node = chance.choice(here)
            bench.lose(node)
            del bench.incarnations[node]
        elif what < 0.18:
            bench.say(chance.choice(here), m.AskToLeave())
        elif what < 0.21:
            core.scale(chance.choice((2, 3, 4)), now_ns=bench.now)
            bench.drain()
        elif core.view is None:
            bench.advance(SECOND // 2)
            if bench.notes(ViewProposed) and core.view is None:
                for node in bench.proposed().nodes:
                    bench.say(node, m.Confirm(view_id=bench.proposed().view_id))
        else:
            odd = chance.choice(core.view.nodes) if chance.random() < self.odd else ""
            step, view_id = bench.step, core.view.view_id
            for node in chance.sample(core.view.nodes, len(core.view.nodes)):
                if core.view is not None and core.view.view_id == view_id and bench.step == step:
                    bench.say(node, m.Vote(view_id=view_id, step=step, ok=True, digest=b"x" if node == odd else b"d"))
            self.commits += bench.step > step


@pytest.mark.parametrize("seed", range(40))
def test_a_second_look_after_a_commit_would_find_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    once = Life(seed, None)
    once.live(200)
    with monkeypatch.context() as patch:
        twice = Life(seed, patch)
        twice.live(200)
    assert once.commits
    assert once.bench.carried_out == twice.bench.carried_out
    assert once.timers == twice.timers
