"""A network of hosts on one virtual clock: the real transport, run from one seed.

`world` has time and the order of events, `host` a machine with its clock and the life of its process, `loop` the event
loop that runs on it, `network` the paths between hosts, `confine` what keeps the real world out. Nothing here knows of
ranks or steps; `quicoll.sim` builds clusters of it.
"""

from quicoll_transport.sim.clock import HostClock
from quicoll_transport.sim.confine import WALL_EPOCH_NS, confined
from quicoll_transport.sim.errors import Deadlock, Forbidden, OutOfTime, SimulationError, Spinning
from quicoll_transport.sim.host import Host, HostState
from quicoll_transport.sim.loop import HostLoop
from quicoll_transport.sim.network import Conditions, Network, SimulatedSocket
from quicoll_transport.sim.world import Recorder, World

__all__ = [
    "WALL_EPOCH_NS",
    "Conditions",
    "Deadlock",
    "Forbidden",
    "Host",
    "HostClock",
    "HostLoop",
    "HostState",
    "Network",
    "OutOfTime",
    "Recorder",
    "SimulatedSocket",
    "SimulationError",
    "Spinning",
    "World",
    "confined",
]
