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
host's name; "coordinator" is the coordinator's. Times are seconds of true time since the beginning, as float for people
and kept as integer nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeAlias

from quicoll.errors import LocalError
from quicoll_transport.sim import Conditions

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "COORDINATOR_HOST",
    "DISK_FAULTS",
    "Alarm",
    "CorruptPayloads",
    "Crash",
    "DiskFault",
    "Drift",
    "Fault",
    "FaultSchedule",
    "Heal",
    "HoldPath",
    "JoinAnew",
    "Leap",
    "LeaveJob",
    "LieTo",
    "NodeRef",
    "PartitionPath",
    "Pause",
    "Repair",
    "Restart",
    "Resume",
    "ScenarioEvent",
    "SetConditions",
    "Slow",
    "StepWall",
    "Terminate",
    "is_end",
    "kinds_of",
    "newcomers",
    "node_name",
]

COORDINATOR_HOST = "coordinator"
DISK_FAULTS = ("write", "fsync", "full", "power", "kill")

_MOST_TIMES = 100_000  # of one `every`
_MOST_DRIFT = 500_000  # ppm, as a simulated clock takes it

NodeRef: TypeAlias = "int | str"


def node_name(node: NodeRef) -> str:
    """Return the host's name. Raises LocalError for what can be none."""
    if isinstance(node, bool) or node == "":
        raise LocalError(f"a node is a rank or the name of a host, not {node!r}")
    if isinstance(node, int):
        if node < 0:
            raise LocalError(f"there is no rank {node}")
        return f"worker-{node}"
    return node


def _names(nodes: NodeRef | Iterable[NodeRef]) -> tuple[str, ...]:
    if isinstance(nodes, int | str):
        nodes = (nodes,)
    return tuple(sorted({node_name(node): None for node in nodes}))  # a dict, as sets have no order


def _ns(seconds: float, what: str) -> int:
    if not 0 <= seconds < 1e9:
        raise LocalError(f"{what} lies between 0 and 1e9 seconds, not {seconds!r}")
    return round(seconds * 1e9)


@dataclass(frozen=True, slots=True)
class PartitionPath:
    """Nothing passes from `one` to `other`, nor back unless `one_way`."""

    one: tuple[str, ...]
    other: tuple[str, ...]
    one_way: bool = False

    def source(self) -> str:
        return f"partition({_set(self.one)}, {_set(self.other)}{', one_way=True' if self.one_way else ''})"


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
class Heal:
    """All is well from now on: paths open, conditions as at the beginning, machines up, processes started, clocks true
    (as to drift), disks sound. What clocks have leapt stays."""

    def source(self) -> str:
        return "heal()"


Fault: TypeAlias = (
    PartitionPath
    | HoldPath
    | Repair
    | Crash
    | Restart
    | JoinAnew
    | LeaveJob
    | Terminate
    | LieTo
    | Alarm
    | Pause
    | Resume
    | Slow
    | Drift
    | Leap
    | StepWall
    | SetConditions
    | CorruptPayloads
    | DiskFault
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


def newcomers(events: Iterable[ScenarioEvent]) -> tuple[str, ...]:
    """Return the nodes that come later, in the order of their names."""
    return tuple(sorted({event.fault.node: None for event in events if isinstance(event.fault, JoinAnew)}))


def kinds_of(fault: Fault, usual: Conditions) -> tuple[str, ...]:
    """Return the kinds of a fault, by the names that users know. usual: conditions of paths without faults.

    What ends a fault has a name too: heal, repair, resume, and "calm" for conditions that are as usual.
    """
    match fault:
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
            return ("coordinator_crash" if fault.node == COORDINATOR_HOST else "power" if fault.power else "crash",)
        case CorruptPayloads():
            return ("payload",)
        case StepWall():
            return ("wall",)
        case HoldPath():
            return ("hold",)
        case DiskFault():
            return ("disk",)
        case JoinAnew() | LeaveJob() | LieTo():
            return ({JoinAnew: "join", LeaveJob: "leave", LieTo: "lie"}[type(fault)],)
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


class FaultSchedule:
    """Schedules faults at the times given to `at` or `every`; each method adds one and returns the schedule itself.

    Bad arguments raise LocalError at once, before anything runs.
    """

    def __init__(self, times: Iterable[int], add: Callable[[ScenarioEvent], None]) -> None:
        self._times = tuple(times)
        self._add = add

    def fault(self, fault: Fault) -> FaultSchedule:
        """Schedule a fault, given as an object."""
        for at_ns in self._times:
            self._add(ScenarioEvent(at_ns, fault))
        return self

    def partition(
        self, one: NodeRef | Iterable[NodeRef], other: NodeRef | Iterable[NodeRef], *, one_way: bool = False
    ) -> FaultSchedule:
        """Lose what is sent between two groups until `repair` or `heal`. What is under way arrives.

        Args:
            one: A rank, a node's name, or several of them.
            other: Likewise.
            one_way: Lose only what is sent from `one` to `other`.
        """
        return self.fault(PartitionPath(*_sides(one, other, "a partition"), one_way))

    def hold(self, one: NodeRef | Iterable[NodeRef], other: NodeRef | Iterable[NodeRef]) -> FaultSchedule:
        """Keep what is sent from `one` to `other` until `repair` or `heal`, and deliver it then, in order."""
        return self.fault(HoldPath(*_sides(one, other, "a hold")))

    def repair(self, one: NodeRef | Iterable[NodeRef] = (), other: NodeRef | Iterable[NodeRef] = ()) -> FaultSchedule:
        """End partitions and holds between `one` and `other`; all of them where neither is given."""
        return self.fault(Repair(_names(one), _names(other)))

    def crash(self, node: NodeRef, *, power: bool = False) -> FaultSchedule:
        """Kill the process; with `power` the machine too, whose disk loses what was not synced."""
        return self.fault(Crash(node_name(node), power))

    def join(self, node: NodeRef) -> FaultSchedule:
        """Start a node that was not there at the start: a rank above those, or a name of its own."""
        return self.fault(JoinAnew(node_name(node)))

    def leave(self, node: NodeRef) -> FaultSchedule:
        """Let the worker leave the job for good, in order, instead of entering its next step."""
        return self.fault(LeaveJob(_worker(node, "leaves")))

    def terminate(self, node: NodeRef) -> FaultSchedule:
        """Ask the process to end, as by SIGTERM: its task is cancelled, and it leaves the job. It stays down until
        `restart` or `heal`."""
        return self.fault(Terminate(node_name(node)))

    def lie(self, node: NodeRef, to: NodeRef) -> FaultSchedule:
        """Spoil what the worker sends to another one before its checksum is made, until `heal`: a bad memory module."""
        liar, victim = _worker(node, "lies"), _worker(to, "is lied to")
        if liar == victim:
            raise LocalError(f"{liar} sends nothing to itself")
        return self.fault(LieTo(liar, victim))

    def alarm(self, node: NodeRef, seconds: float) -> FaultSchedule:
        """Make the worker end its view by a report for nothing, every so many seconds; 0: no more, as from `heal`."""
        ns = _ns(seconds, "the time between two alarms")
        if 0 < ns < 1_000_000:
            raise LocalError(f"alarms are a millisecond apart or more, not {seconds!r} s")
        return self.fault(Alarm(_worker(node, "alarms"), ns))

    def restart(self, node: NodeRef) -> FaultSchedule:
        """Start the process, and its machine, again; nothing where it runs."""
        return self.fault(Restart(node_name(node)))

    def pause(self, node: NodeRef, seconds: float = 0.0) -> FaultSchedule:
        """Stop the process (SIGSTOP) for so many simulated seconds; 0: until `resume`."""
        return self.fault(Pause(node_name(node), _ns(seconds, "a pause")))

    def resume(self, node: NodeRef) -> FaultSchedule:
        """Let a stopped process go on (SIGCONT)."""
        return self.fault(Resume(node_name(node)))

    def slow(self, node: NodeRef, seconds: float) -> FaultSchedule:
        """Make each callback of the process take so many seconds; 0: none, as at the beginning."""
        return self.fault(Slow(node_name(node), _ns(seconds, "the time of a callback")))

    def drift(self, node: NodeRef, *, ppm: int) -> FaultSchedule:
        """Make the monotonic clock too fast by so many parts per million; too slow if they are negative."""
        if not -_MOST_DRIFT <= ppm <= _MOST_DRIFT:
            raise LocalError(f"a clock is off by {_MOST_DRIFT} parts per million at most, not by {ppm}")
        return self.fault(Drift(node_name(node), ppm))

    def leap(self, node: NodeRef, seconds: float) -> FaultSchedule:
        """Make the monotonic clock leap forward by so many seconds, as after a suspension of the machine."""
        return self.fault(Leap(node_name(node), _ns(seconds, "a leap")))

    def step_wall(self, node: NodeRef, seconds: float) -> FaultSchedule:
        """Set the wall clock forward by so many seconds; back if they are negative."""
        ns = -_ns(-seconds, "a step back") if seconds < 0 else _ns(seconds, "a step")
        return self.fault(StepWall(node_name(node), ns))

    def conditions(
        self, conditions: Conditions, one: NodeRef | Iterable[NodeRef] = (), other: NodeRef | Iterable[NodeRef] = ()
    ) -> FaultSchedule:
        """Set conditions of the paths from `one` to `other`, in this direction; of all paths where neither is given."""
        return self.fault(SetConditions(conditions, _names(one), _names(other)))

    def corrupt(self, node: NodeRef, *, times: int = 1) -> FaultSchedule:
        """Flip a bit in each of the next `times` payloads that the node receives, behind QUIC's own checks."""
        if times < 1:
            raise LocalError(f"so many times makes no sense: {times}")
        return self.fault(CorruptPayloads(node_name(node), times))

    def disk(self, node: NodeRef, what: str) -> FaultSchedule:
        """Make the node's disk fail.

        Args:
            node: The node.
            what: "write" or "fsync" for EIO at the next one, "full" from now on, "power" or "kill" for a crash within
                one.
        """
        if what not in DISK_FAULTS:
            raise LocalError(f"a disk fails in one of the ways {', '.join(DISK_FAULTS)}, not {what!r}")
        return self.fault(DiskFault(node_name(node), what))

    def heal(self) -> FaultSchedule:
        """End all faults: paths, machines, processes, disks and rates of clocks are as at the beginning."""
        return self.fault(Heal())


def _worker(node: NodeRef, what: str) -> str:
    name = node_name(node)
    if name == COORDINATOR_HOST:
        raise LocalError(f"a worker {what}, not the coordinator")
    return name


def _sides(
    one: NodeRef | Iterable[NodeRef], other: NodeRef | Iterable[NodeRef], what: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    first, second = _names(one), _names(other)
    both = [name for name in first if name in second]
    if both:
        raise LocalError(f"{both[0]} is on both sides of {what}")
    return first, second


def conditions_source(conditions: Conditions) -> str:
    """Return `Conditions(...)` with what differs from the defaults."""
    changed = [
        f"{field.name}={getattr(conditions, field.name)!r}"
        for field in fields(Conditions)
        if getattr(conditions, field.name) != field.default
    ]
    return f"Conditions({', '.join(changed)})"


def at(seconds: float, add: Callable[[ScenarioEvent], None]) -> FaultSchedule:
    return FaultSchedule((_ns(seconds, "a time"),), add)


def at_vote(
    node: NodeRef, *, start: float = 0.0, after: float = 0.0, add: Callable[[ScenarioEvent], None]
) -> FaultSchedule:
    voter, after_ns = _worker(node, "votes"), _ns(after, "the time after a vote")
    return FaultSchedule((_ns(start, "a start"),), lambda event: add(replace(event, voter=voter, after_ns=after_ns)))


def every(seconds: float, *, start: float, until: float, add: Callable[[ScenarioEvent], None]) -> FaultSchedule:
    step = _ns(seconds, "a period")
    if step < 1_000_000:
        raise LocalError(f"a period is a millisecond or more, not {seconds!r} s")
    times = range(_ns(start, "a start"), _ns(until, "an end"), step)
    if len(times) > _MOST_TIMES:
        raise LocalError(f"something happens {_MOST_TIMES} times at most, not {len(times)} times")
    return FaultSchedule(times, add)


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
