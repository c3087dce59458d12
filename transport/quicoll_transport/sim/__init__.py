"""A network of hosts on one virtual clock: the real transport, run from one seed.

    world       the hosts and their network, run until a condition holds
    confine     keeps the real world out
    host        a machine with its clock, and the life of its process
    socket      UDP sockets of a process
    loop        the event loop of a process
    executor    what a process calls that is outside of it
    network     the paths between hosts
    access      what all paths of a host share
    nat         address translators in front of hosts
    timeline    time, the order of events, randomness, the trace

Each needs only those below it. Nothing here knows of ranks or steps; `quicoll.sim` builds clusters of it.
"""

from quicoll_transport.sim.access import AccessLink
from quicoll_transport.sim.clock import HostClock
from quicoll_transport.sim.confine import WALL_EPOCH_NS, confined
from quicoll_transport.sim.errors import Deadlock, Forbidden, OutOfTime, SimulationError, Spinning
from quicoll_transport.sim.executor import SimulatedExecutor
from quicoll_transport.sim.host import Host, HostState
from quicoll_transport.sim.loop import HostLoop
from quicoll_transport.sim.nat import Nat, NatKind
from quicoll_transport.sim.network import Conditions, Network
from quicoll_transport.sim.socket import SimulatedSocket
from quicoll_transport.sim.timeline import Recorder, Timeline
from quicoll_transport.sim.world import World

__all__ = [
    "WALL_EPOCH_NS",
    "AccessLink",
    "Conditions",
    "Deadlock",
    "Forbidden",
    "Host",
    "HostClock",
    "HostLoop",
    "HostState",
    "Nat",
    "NatKind",
    "Network",
    "OutOfTime",
    "Recorder",
    "SimulatedExecutor",
    "SimulatedSocket",
    "SimulationError",
    "Spinning",
    "Timeline",
    "World",
    "confined",
]
