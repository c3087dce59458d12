"""The seeds of `make sim`: few that meet as much as a hundred in a row do.

A seed of the swarm enables half of the kinds of fault and three of the operations, so of a hundred in a row most repeat
what others have shown. Which of the first few hundred are taken is worked out from what the generator makes of them
now, without running any; tests/sim/test_swarm.py holds what they have to meet.

    python tests/helpers/swarm_seeds.py        prints them, for --seeds
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import combinations

from quicoll.sim.operations import OPERATIONS
from quicoll.sim.scenario.events import Crash, StepWall, kinds_of
from quicoll.sim.scenario.swarm import FAULT_KINDS, Scenario, generate
from quicoll.sim.translators import opens
from quicoll.sim.workload import Load

__all__ = ["ALGORITHMS", "FROM", "THINGS", "TIMES", "TOGETHER", "Meeting", "chosen", "found_in", "meeting"]

ALGORITHMS = ("auto", "direct", "tree", "exchange", "hierarchical")
THINGS = (
    *(f"fault {kind}" for kind in FAULT_KINDS),
    *(f"operation {name}" for name in OPERATIONS),
    *(f"algorithm {name}" for name in ALGORITHMS),
    *("sites 0", "sites 2", "sites 3", "groups True", "groups False", "at once True", "at once False"),
    *("nats True", "nats False", "relay own", "relay coordinator"),
    *("lanes 0", "lanes 1", "lanes 2"),
)
TIMES = 5
"""So many seeds meet each thing, at least."""
TOGETHER = round(0.88 * math.comb(len(FAULT_KINDS), 2))
"""So many pairs of kinds of fault meet in one seed or another: as in a hundred in a row."""
FROM = range(400)

_RUN = 16
"""What a run costs with no fault at all, in faults."""


@dataclass(frozen=True)
class Meeting:
    """things: what one seed meets. pairs: of kinds of fault. faults: how many there are."""

    things: frozenset[str]
    pairs: frozenset[tuple[str, str]]
    faults: int


def found_in(made: Scenario) -> set[str]:
    """The kinds of fault by which these events were drawn, as far as they show it."""
    found: set[str] = set()
    for event in made.events:
        found |= {"vote"} if event.voter else set(kinds_of(event.fault, made.settings.conditions))
    set_back = [event.fault.node for event in made.events if isinstance(event.fault, StepWall) and event.fault.ns < 0]
    if any(isinstance(event.fault, Crash) and event.fault.node in set_back for event in made.events):
        found.add("clock_back")
    return found


def meeting(seed: int) -> Meeting:
    made, load = generate(seed), Load.of(seed)
    kinds = sorted(found_in(made) & set(FAULT_KINDS))
    things = {f"fault {kind}" for kind in kinds}
    if "lie" not in kinds:  # these do nothing but exchange
        things |= {f"operation {name}" for name in load.operations}
        algorithm = "auto" if made.settings.hosts else load.algorithm  # as quicoll.sim.runner has it
        things |= {f"algorithm {algorithm}", f"sites {len(set(made.settings.sites))}"}
        things |= {f"groups {load.groups is not None}", f"at once {load.at_once}"}
    things |= {f"nats {bool(made.settings.nats)}", f"lanes {made.settings.lanes}"}
    if any(not opens(made.settings.nats, *pair) for pair in combinations(range(made.ranks), 2)):
        things.add(f"relay {made.settings.relay or 'coordinator'}")  # without which it would not go on
    return Meeting(frozenset(things), frozenset(combinations(kinds, 2)), made.faults)


def chosen() -> list[int]:
    """The seed that adds most for what its run costs, again and again, until everything is met."""
    left = {seed: meeting(seed) for seed in FROM}
    counted: Counter[str] = Counter()
    together: set[tuple[str, str]] = set()

    def worth(seed: int) -> tuple[float, int]:
        found = left[seed]
        new = sum(1 for name in THINGS if name in found.things and counted[name] < TIMES)
        pairs = len(found.pairs - together) if len(together) < TOGETHER else 0
        return (2 * new + pairs) / (_RUN + found.faults), -seed

    taken = []
    while any(counted[name] < TIMES for name in THINGS) or len(together) < TOGETHER:
        seed = max(left, key=worth)
        found = left.pop(seed)
        counted.update(found.things)
        together.update(found.pairs)
        taken.append(seed)
    return sorted(taken)


if __name__ == "__main__":
    print(",".join(map(str, chosen())))  # noqa: T201 - that is what it is for
