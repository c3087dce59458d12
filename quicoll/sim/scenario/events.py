"""Scheduled faults of a cluster, as data.

A scenario is written in plain Python,

    sim.at(1.2).partition({0, 1}, {2, 3})
    sim.at(2.0).crash(3)
    sim.every(0.5, start=3.0, until=5.0).pause(1, 0.2)
    sim.at(6.0).heal()

and each line becomes an `ScenarioEvent`, a frozen value that knows its own source line. The window around a vote is
short, and no time that is written down meets it. So an event may wait for a vote:

    sim.at_vote(2, start=1.0, after=0.001).crash("coordinator")

strikes a millisecond after the first vote that rank 2 casts from 1.0 s on; a healing that comes first takes it back.

A generated scenario is a list of the same events; so it can be made smaller, and printed as what a person would have
written.

Nodes are named by rank at the start (0 is the host "worker-0"; it keeps the name whatever rank it gets later) or by the
host's name; "coordinator" is the coordinator's, "coordinator-2" and "coordinator-3" are those of others that take over
from it, "database" is where their common journal is, and "relay" is a relay's. Times are seconds of true time since the
beginning, as float for people and kept as integer nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TypeAlias

from quicoll.errors import LocalError
from quicoll.membership.view import natural_key
from quicoll_transport.sim import Conditions

__all__ = [
    "COORDINATOR_HOST",
    "DATABASE_HOST",
    "DISK_FAULTS",
    "ENGINE_FAULTS",
    "FORGERIES",
    "JOURNAL_FAULTS",
    "LANE_FAULTS",
    "MEDDLINGS",
    "MEMORY_FAULTS",
    "RELAY_HOST",
    "TAKEOVERS",
    "Alarm",
    "CorruptPayloads",
    "Crash",
    "DiskFault",
    "Drift",
    "EngineFault",
    "Fault",
    "Forge",
    "Heal",
    "HoldPath",
    "JoinAnew",
    "JournalFault",
    "LaneFault",
    "Leap",
    "LeaveJob",
    "LieTo",
    "Meddle",
    "MemoryFault",
    "NodeRef",
    "PartitionPath",
    "Pause",
    "Rebind",
    "Repair",
    "Restart",
    "Resume",
    "ScaleTo",
    "ScenarioEvent",
    "SetConditions",
    "Slow",
    "StepWall",
    "TakeOver",
    "Terminate",
    "Unplug",
    "coordinator_names",
    "is_coordinator",
    "is_end",
    "is_worker",
    "kinds_of",
    "newcomers",
    "node_name",
]

COORDINATOR_HOST = "coordinator"
DATABASE_HOST = "database"
RELAY_HOST = "relay"
DISK_FAULTS = ("write", "fsync", "full", "power", "kill")
TAKEOVERS = ("crash", "power", "workers", "database", "pause")
JOURNAL_FAULTS = ("refused", "answer", "late", "away", "back")
FORGERIES = ("chunks", "manifest", "state", "version")
ENGINE_FAULTS = ("kill", "hang")
LANE_FAULTS = ("kill", "hang", "cut", "slow", "spoil")
MEMORY_FAULTS = ("spoil", "full", "kill", "late")
MEDDLINGS = ("alter", "misdirect", "repeat", "lose")


NodeRef: TypeAlias = "int | str"


def coordinator_names(count: int) -> tuple[str, ...]:
    """Return the names of so many coordinators' hosts."""
    return (COORDINATOR_HOST, *(f"{COORDINATOR_HOST}-{number}" for number in range(2, count + 1)))


def is_coordinator(name: str) -> bool:
    """Return whether the host of this name has a coordinator."""
    return name == COORDINATOR_HOST or name.startswith(f"{COORDINATOR_HOST}-")


def is_worker(name: str) -> bool:
    """Return whether the host of this name has a worker."""
    return not is_coordinator(name) and name not in (DATABASE_HOST, RELAY_HOST)


def node_name(node: NodeRef) -> str:
    """Return the host's name. Raises LocalError for what can be none."""
    if isinstance(node, bool) or node == "":
        raise LocalError(f"a node is a rank or the name of a host, not {node!r}")
    if isinstance(node, int):
        if node < 0:
            raise LocalError(f"there is no rank {node}")
        return f"worker-{node}"
    return node


@dataclass(frozen=True, slots=True)
class PartitionPath:
    """Nothing passes from `one` to `other`, nor back unless `one_way`."""

    one: tuple[str, ...]
    other: tuple[str, ...]
    one_way: bool = False

    def source(self) -> str:
        return f"partition({_set(self.one)}, {_set(self.other)}{', one_way=True' if self.one_way else ''})"


@dataclass(frozen=True, slots=True)
class Unplug:
    """Nothing passes to or from the host's address of this number, from 1 on; until the healing."""

    node: str
    number: int

    def source(self) -> str:
        return f"unplug({_node(self.node)}, {self.number})"


@dataclass(frozen=True, slots=True)
class HoldPath:
    """Everything from `one` to `other` is kept until the path is repaired."""

    one: tuple[str, ...]
    other: tuple[str, ...]

    def source(self) -> str:
        return f"hold({_set(self.one)}, {_set(self.other)})"


@dataclass(frozen=True, slots=True)
class Repair:
    """Open the paths between `one` and `other` again; all paths if both are empty."""

    one: tuple[str, ...] = ()
    other: tuple[str, ...] = ()

    def source(self) -> str:
        return f"repair({_set(self.one)}, {_set(self.other)})" if self.one or self.other else "repair()"


@dataclass(frozen=True, slots=True)
class Crash:
    """The process is gone, nothing is flushed. power: the machine is off, and its disk forgets what was not synced."""

    node: str
    power: bool = False

    def source(self) -> str:
        return f"crash({_node(self.node)}{', power=True' if self.power else ''})"


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the process (and the machine) again, if it is gone."""

    node: str

    def source(self) -> str:
        return f"restart({_node(self.node)})"


@dataclass(frozen=True, slots=True)
class JoinAnew:
    """A node that was not there at the start comes, under a name of its own."""

    node: str

    def source(self) -> str:
        return f"join({_node(self.node)})"


@dataclass(frozen=True, slots=True)
class LeaveJob:
    """The worker leaves for good and of its own will, where it would enter its next step."""

    node: str

    def source(self) -> str:
        return f"leave({_node(self.node)})"


@dataclass(frozen=True, slots=True)
class ScaleTo:
    """An operator asks for so many ranks, again and again until the coordinator has taken it; workers that are lacking
    are started, those that were told to leave before first. leave: nodes that are asked to go."""

    world_size: int
    leave: tuple[str, ...] = ()

    def source(self) -> str:
        return f"scale({self.world_size}{f', leave={_set(self.leave)}' if self.leave else ''})"


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM: the process is asked to end, in order; it stays down until it is started again."""

    node: str

    def source(self) -> str:
        return f"terminate({_node(self.node)})"


@dataclass(frozen=True, slots=True)
class LieTo:
    """What the worker sends to `to` has other bits than it should, under a checksum that holds; until the healing."""

    node: str
    to: str

    def source(self) -> str:
        return f"lie({_node(self.node)}, {_node(self.to)})"


@dataclass(frozen=True, slots=True)
class Alarm:
    """The worker reports, every `ns`, that its view cannot go on, though nothing is wrong; 0: no more."""

    node: str
    ns: int

    def source(self) -> str:
        return f"alarm({_node(self.node)}, {_seconds(self.ns)})"


@dataclass(frozen=True, slots=True)
class Forge:
    """What the worker gives as its state has another bit than it should, in agreement with itself: in its "chunks" and
    their digests; in its "manifest" as well; in all of the "state", the digest that it tells too; and as one of a
    "version" that was never committed. Until the healing.
    """

    node: str
    what: str

    def source(self) -> str:
        return f"forge({_node(self.node)}, {_text(self.what)})"


@dataclass(frozen=True, slots=True)
class Pause:
    """SIGSTOP; `ns`: for so long, 0: until it is resumed."""

    node: str
    ns: int = 0

    def source(self) -> str:
        return f"pause({_node(self.node)}{f', {_seconds(self.ns)}' if self.ns else ''})"


@dataclass(frozen=True, slots=True)
class Resume:
    node: str

    def source(self) -> str:
        return f"resume({_node(self.node)})"


@dataclass(frozen=True, slots=True)
class Slow:
    """Each callback of the process takes `ns` of true time; 0 is as fast as before."""

    node: str
    ns: int

    def source(self) -> str:
        return f"slow({_node(self.node)}, {_seconds(self.ns)})"


@dataclass(frozen=True, slots=True)
class Drift:
    """The clock goes too fast by `ppm` parts per million (negative: too slow)."""

    node: str
    ppm: int

    def source(self) -> str:
        return f"drift({_node(self.node)}, ppm={self.ppm})"


@dataclass(frozen=True, slots=True)
class Leap:
    """The monotonic clock leaps forward by `ns`, as after the suspension of a virtual machine."""

    node: str
    ns: int

    def source(self) -> str:
        return f"leap({_node(self.node)}, {_seconds(self.ns)})"


@dataclass(frozen=True, slots=True)
class StepWall:
    """The wall clock is set by `ns` forward or back."""

    node: str
    ns: int

    def source(self) -> str:
        return f"step_wall({_node(self.node)}, {_seconds(self.ns)})"


@dataclass(frozen=True, slots=True)
class SetConditions:
    """The paths from `one` to `other`, one way, are like this; both empty: all paths."""

    conditions: Conditions
    one: tuple[str, ...] = ()
    other: tuple[str, ...] = ()

    def source(self) -> str:
        between = f", {_set(self.one)}, {_set(self.other)}" if self.one or self.other else ""
        return f"conditions({conditions_source(self.conditions)}{between})"


@dataclass(frozen=True, slots=True)
class CorruptPayloads:
    """Flip a bit in the next `times` payloads that the node receives, behind QUIC's own checks."""

    node: str
    times: int = 1

    def source(self) -> str:
        return f"corrupt({_node(self.node)}{f', times={self.times}' if self.times != 1 else ''})"


@dataclass(frozen=True, slots=True)
class DiskFault:
    """The node's disk fails at its next `what`: "write" (EIO) or "fsync" (EIO); it is "full" from now on (ENOSPC); or
    the next operation is cut off in its middle, because the "power" goes or the process gets a "kill".
    """

    node: str
    what: str

    def source(self) -> str:
        return f"disk({_node(self.node)}, {_text(self.what)})"


@dataclass(frozen=True, slots=True)
class MemoryFault:
    """What the worker does on a host that it shares fails, until the healing: one of the payloads that it reads there
    has another bit ("spoil"), the one of this number from now on (`after`); it gets a "kill" at the step of this
    number, in memory or of a meeting; there is no memory for it ("full"); who wakes it does so "late".
    """

    node: str
    what: str
    after: int = 1

    def source(self) -> str:
        after = f", after={self.after}" if self.after != 1 else ""
        return f"memory({_node(self.node)}, {_text(self.what)}{after})"


@dataclass(frozen=True, slots=True)
class LaneFault:
    """The worker's lanes fail: their processes end ("kill") or do nothing any more ("hang"); or, until the healing,
    their datagrams are lost ("cut") or take half a second more ("slow"), or what they receive has another bit
    ("spoil"). only: the lane of this number; None for all.
    """

    node: str
    what: str
    only: int | None = None

    def source(self) -> str:
        only = "" if self.only is None else f", only={self.only}"
        return f"lane({_node(self.node)}, {_text(self.what)}{only})"


@dataclass(frozen=True, slots=True)
class EngineFault:
    """The process of the worker's engine ends ("kill"), or does nothing any more ("hang")."""

    node: str
    what: str

    def source(self) -> str:
        return f"engine({_node(self.node)}, {_text(self.what)})"


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Whichever coordinator leads is lost: its process ("crash") or its machine ("power") for good; the paths to all
    "workers" or that to the "database", until the healing; or it stands still for longer than its lease ("pause").
    """

    how: str

    def source(self) -> str:
        return f"take_over({_text(self.how)})"


@dataclass(frozen=True, slots=True)
class JournalFault:
    """The next append to the database is "refused"; or it is done, and its "answer" lost; or it comes so "late" that
    its coordinator has given up, and another may lead. Or the database is "away" until it is "back".
    """

    what: str

    def source(self) -> str:
        return f"journal({_text(self.what)})"


@dataclass(frozen=True, slots=True)
class Rebind:
    """The address translator that the node is behind loses all mappings, and gives others from now on."""

    node: str

    def source(self) -> str:
        return f"rebind({_node(self.node)})"


@dataclass(frozen=True, slots=True)
class Meddle:
    """Whoever is the job's relay meddles with each third datagram that it passes on: it may "alter" it, "misdirect"
    it to another member, "repeat" it together with an old one, or "lose" it. Until the healing.
    """

    what: str

    def source(self) -> str:
        return f"meddle({_text(self.what)})"


@dataclass(frozen=True, slots=True)
class Heal:
    """All is well from now on: paths open, conditions as at the beginning, machines up, processes started, clocks true
    (as to drift), disks sound. What clocks have leapt stays."""

    def source(self) -> str:
        return "heal()"


Fault: TypeAlias = (
    PartitionPath
    | Unplug
    | HoldPath
    | Repair
    | Crash
    | Restart
    | JoinAnew
    | LeaveJob
    | ScaleTo
    | Terminate
    | LieTo
    | Alarm
    | Forge
    | Pause
    | Resume
    | Slow
    | Drift
    | Leap
    | StepWall
    | SetConditions
    | CorruptPayloads
    | DiskFault
    | MemoryFault
    | LaneFault
    | EngineFault
    | TakeOver
    | JournalFault
    | Rebind
    | Meddle
    | Heal
)


@dataclass(frozen=True, slots=True)
class ScenarioEvent:
    """`fault` at `at_ns` of true time since the beginning.

    voter: a node; then from `at_ns` on its next vote is waited for, and `fault` comes `after_ns` later. "": no vote.
    """

    at_ns: int
    fault: Fault
    voter: str = ""
    after_ns: int = 0

    def __str__(self) -> str:
        if not self.voter:
            return f"sim.at({_seconds(self.at_ns)}).{self.fault.source()}"
        after = f", after={_seconds(self.after_ns)}" if self.after_ns else ""
        return f"sim.at_vote({_node(self.voter)}, start={_seconds(self.at_ns)}{after}).{self.fault.source()}"


def newcomers(events: Iterable[ScenarioEvent], ranks: int) -> tuple[str, ...]:
    """Return the nodes that come later, in the order of their names, to those that are there from the beginning."""
    found: dict[str, None] = {}
    for event in events:
        if isinstance(event.fault, JoinAnew):
            found[event.fault.node] = None
        elif isinstance(event.fault, ScaleTo):
            found |= dict.fromkeys(node_name(rank) for rank in range(ranks, event.fault.world_size))
    return tuple(sorted(found, key=natural_key))


def kinds_of(fault: Fault, usual: Conditions) -> tuple[str, ...]:
    """Return the kinds of a fault, by the names that users know. usual: conditions of paths without faults.

    What ends a fault has a name too: heal, repair, resume, and "calm" for conditions that are as usual. What befalls
    a relay, its process or all the paths from it or to it, is of the kind "relay".
    """
    match fault:
        case Meddle():
            return ("relay",)
        case Crash() | Pause() | Slow() if fault.node == RELAY_HOST:
            return ("relay",)
        case PartitionPath() | HoldPath() if (RELAY_HOST,) in (fault.one, fault.other):
            return ("relay",)
        case SetConditions() if (RELAY_HOST,) in (fault.one, fault.other) and fault.conditions != usual:
            return ("relay",)
        case SetConditions():
            found = fault.conditions
            changed = [
                "burst" if name == "loss" and found.burst != 1.0 else kind
                for name, kind in _CONDITION_KINDS
                if getattr(found, name) != getattr(usual, name)
            ]
            return tuple(changed) or ("calm",)
        case PartitionPath():
            return ("one_way" if fault.one_way else "partition",)
        case Crash():
            return ("coordinator_crash" if is_coordinator(fault.node) else "power" if fault.power else "crash",)
        case CorruptPayloads():
            return ("payload",)
        case StepWall():
            return ("wall",)
        case HoldPath():
            return ("hold",)
        case DiskFault():
            return ("disk",)
        case MemoryFault():
            return ("memory",)
        case LaneFault():
            return ("lane",)
        case EngineFault():
            return ("engine",)
        case TakeOver():
            return ("coordinator_takeover",)
        case JournalFault():
            return ("journal",)
        case JoinAnew() | LeaveJob() | LieTo() | ScaleTo():
            return ({JoinAnew: "join", LeaveJob: "leave", LieTo: "lie", ScaleTo: "scale"}[type(fault)],)
        case _:
            return (type(fault).__name__.lower(),)


def is_end(fault: Fault, usual: Conditions) -> bool:
    """Return whether it only ends faults, and so is none itself. A restart is one: a new process comes."""
    match fault:
        case Heal() | Repair() | Resume():
            return True
        case SetConditions():
            return kinds_of(fault, usual) == ("calm",)
        case Slow() | Alarm():
            return fault.ns == 0
        case Drift():
            return fault.ppm == 0
        case JournalFault():
            return fault.what == "back"
        case _:
            return False


_CONDITION_KINDS = (
    ("latency_ns", "latency"),
    ("jitter_ns", "jitter"),
    ("loss", "loss"),
    ("duplicate", "duplicate"),
    ("reorder", "reorder"),
    ("corrupt", "corrupt"),
    ("bytes_per_second", "rate"),
    ("mtu", "mtu"),
)


def conditions_source(conditions: Conditions) -> str:
    """Return `Conditions(...)` with what differs from the defaults."""
    changed = [
        f"{field.name}={getattr(conditions, field.name)!r}"
        for field in fields(Conditions)
        if getattr(conditions, field.name) != field.default
    ]
    return f"Conditions({', '.join(changed)})"


def _node(name: str) -> str:
    prefix, _, number = name.partition("-")
    return number if prefix == "worker" and number.isdecimal() and number == str(int(number)) else _text(name)


def _text(value: str) -> str:
    """A literal in double quotes: a shell takes the whole line in single ones."""
    return json.dumps(value, ensure_ascii=False)


def _set(names: tuple[str, ...]) -> str:
    return "{" + ", ".join(_node(name) for name in names) + "}" if names else "()"


def _seconds(ns: int) -> str:
    """As short as it can be and exact: 1.2, not 1.2000000000000002."""
    return repr(ns / 1e9) if round(ns / 1e9 * 1e9) == ns else f"{ns}e-9"
