"""A whole cluster on a virtual clock, from one seed: the real code, networks that break, and checks that bite.

events      what breaks, as data, and the language to write it in
decorator   a user's test of all this, for pytest
cluster     one run: coordinator, ranks, the user's own coroutine
machine     a node: host, disk, process
disk        files in memory that a crash treats as a disk does
invariants  what has to hold, checked during and after every run
workload    what runs where the user gives nothing
subgroups   what that does in sub-groups, with some seeds
trace       a run recorded: the timeline, and with spans and story what happened in words
"""

from quicoll.sim.cluster import Simulation
from quicoll.sim.decorator import scenario
from quicoll.sim.errors import InvariantBroken, RunFailed
from quicoll.sim.outcome import Outcome, Settings
from quicoll.sim.scenario.events import ScenarioEvent
from quicoll.sim.scenario.schedule import FaultSchedule
from quicoll.sim.trace.recording import Recording
from quicoll_transport.sim import AccessLink, Conditions

__all__ = [
    "AccessLink",
    "Conditions",
    "FaultSchedule",
    "InvariantBroken",
    "Outcome",
    "Recording",
    "RunFailed",
    "ScenarioEvent",
    "Settings",
    "Simulation",
    "scenario",
]
