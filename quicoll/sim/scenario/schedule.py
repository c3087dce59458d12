"""How a scenario's faults are given their times: `at`, `every`, `at_vote`, and a method for each kind of fault."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from quicoll.checks import MAX_ADDRESSES, MAX_LANES
from quicoll.errors import LocalError
from quicoll.sim.scenario.events import (
    DISK_FAULTS,
    ENGINE_FAULTS,
    FORGERIES,
    JOURNAL_FAULTS,
    LANE_FAULTS,
    MEDDLINGS,
    MEMORY_FAULTS,
    RELAY_HOST,
    TAKEOVERS,
    Alarm,
    CorruptPayloads,
    Crash,
    DiskFault,
    Drift,
    EngineFault,
    Fault,
    Forge,
    Heal,
    HoldPath,
    JoinAnew,
    JournalFault,
    LaneFault,
    Leap,
    LeaveJob,
    LieTo,
    Meddle,
    MemoryFault,
    NodeRef,
    PartitionPath,
    Pause,
    Rebind,
    Repair,
    Restart,
    Resume,
    ScaleTo,
    ScenarioEvent,
    SetConditions,
    Slow,
    StepWall,
    TakeOver,
    Terminate,
    Unplug,
    is_worker,
    node_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll_transport.sim import Conditions

__all__ = ["FaultSchedule", "at", "at_vote", "every"]

_MOST_TIMES = 100_000  # of one `every`
_MOST_RANKS = 256
_DRIFTS = -900_000, 9_000_000  # ppm, as a simulated clock takes it


def _names(nodes: NodeRef | Iterable[NodeRef]) -> tuple[str, ...]:
    if isinstance(nodes, int | str):
        nodes = (nodes,)
    return tuple(sorted({node_name(node): None for node in nodes}))  # a dict, as sets have no order


def _ns(seconds: float, what: str) -> int:
    if not 0 <= seconds < 1e9:
        raise LocalError(f"{what} lies between 0 and 1e9 seconds, not {seconds!r}")
    return round(seconds * 1e9)


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

    def unplug(self, node: NodeRef, number: int) -> FaultSchedule:
        """Lose what is sent to one address of a host, and from there, until `heal` (`Settings(paths=2)`).

        Args:
            node: A rank or a node's name.
            number: Of the address; 1 is the first one.
        """
        if isinstance(number, bool) or not 1 <= number <= MAX_ADDRESSES:
            raise LocalError(f"an address has a number from 1 to {MAX_ADDRESSES}, not {number!r}")
        return self.fault(Unplug(node_name(node), number))

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

    def scale(self, world_size: int, *, leave: NodeRef | Iterable[NodeRef] = ()) -> FaultSchedule:
        """Let an operator ask for so many ranks, as by `quicoll scale`. Workers that are lacking are started.

        Args:
            world_size: Ranks.
            leave: Workers that shall go; else those of the highest ranks.
        """
        if isinstance(world_size, bool) or not 1 <= world_size <= _MOST_RANKS:
            raise LocalError(f"a job has 1 to {_MOST_RANKS} ranks, not {world_size!r}")
        names = _names(leave)
        for name in names:
            _worker(name, "leaves")
        return self.fault(ScaleTo(world_size, names))

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

    def forge(self, node: NodeRef, what: str) -> FaultSchedule:
        """Make the worker give a forged state to ranks that need one, until `heal`.

        Args:
            node: The worker.
            what: "chunks" that fit the digests offered for them; the "manifest" as well; the whole "state", with the
                digest that it tells; or all that, and a "version" that was never committed.
        """
        if what not in FORGERIES:
            raise LocalError(f"what is forged is one of {', '.join(FORGERIES)}, not {what!r}")
        return self.fault(Forge(_worker(node, "forges its state"), what))

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
        least, most = _DRIFTS
        if not least <= ppm <= most:
            raise LocalError(f"a clock is off by {least} to {most} parts per million, not by {ppm}")
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

    def memory(self, node: NodeRef, what: str, *, after: int = 1) -> FaultSchedule:
        """Make what the worker does in its host's memory fail, until `heal`; for workers that share a host.

        Args:
            node: The worker.
            what: "spoil" for another bit in a payload that it reads; "full" for no memory; "kill" for its end in the
                middle of what it does there; "late" for wake-ups that take long.
            after: Which payload that it reads from then on has another bit; at which step it ends.
        """
        if what not in MEMORY_FAULTS:
            raise LocalError(f"memory fails in one of the ways {', '.join(MEMORY_FAULTS)}, not {what!r}")
        if isinstance(after, bool) or not 1 <= after <= _MOST_TIMES:
            raise LocalError(f"memory fails after 1 to {_MOST_TIMES} of its uses, not {after!r}")
        return self.fault(MemoryFault(_worker(node, "uses its host's memory"), what, after))

    def lane(self, node: NodeRef, what: str, *, only: int | None = None) -> FaultSchedule:
        """Make the worker's lanes fail (`Settings(lanes=1)`).

        Args:
            node: The worker.
            what: "kill" for the end of their processes, "hang" for lanes that do nothing any more; until `heal` "cut"
                for datagrams that are lost, "slow" for some that take half a second more, "spoil" for another bit in
                what they receive.
            only: The number of the lane that fails; None for all of the worker.
        """
        if what not in LANE_FAULTS:
            raise LocalError(f"lanes fail in one of the ways {', '.join(LANE_FAULTS)}, not {what!r}")
        if only is not None and (isinstance(only, bool) or not 0 <= only < MAX_LANES):
            raise LocalError(f"a lane has a number from 0 to {MAX_LANES - 1}, not {only!r}")
        return self.fault(LaneFault(_worker(node, "has lanes"), what, only))

    def engine(self, node: NodeRef, what: str) -> FaultSchedule:
        """Make the process of the worker's engine fail (`Settings(engine_processes=1)`).

        Args:
            node: The worker.
            what: "kill" for its end, "hang" for one that does nothing any more.
        """
        if what not in ENGINE_FAULTS:
            raise LocalError(f"an engine fails in one of the ways {', '.join(ENGINE_FAULTS)}, not {what!r}")
        return self.fault(EngineFault(_worker(node, "has an engine"), what))

    def take_over(self, how: str) -> FaultSchedule:
        """Make another coordinator take over (`Settings(coordinators=2)`) from the one that leads by then.

        Args:
            how: Its process ends ("crash") or its machine ("power"); it is cut off from the "workers", or from the
                "database", until `heal`; or there is a "pause" of its process, longer than its lease.
        """
        if how not in TAKEOVERS:
            raise LocalError(f"who leads is lost in one of the ways {', '.join(TAKEOVERS)}, not {how!r}")
        return self.fault(TakeOver(how))

    def journal(self, what: str) -> FaultSchedule:
        """Make the database fail that several coordinators have their journal in.

        Args:
            what: The next append is "refused", or done and its "answer" lost, or comes so "late" that its coordinator
                has given up; or the database is "away", until it is "back" or `heal`.
        """
        if what not in JOURNAL_FAULTS:
            raise LocalError(f"a journal fails in one of the ways {', '.join(JOURNAL_FAULTS)}, not {what!r}")
        return self.fault(JournalFault(what))

    def rebind(self, node: NodeRef) -> FaultSchedule:
        """Make the address translator in front of the node (`Settings.nats`) lose its mappings, as by a restart."""
        return self.fault(Rebind(node_name(node)))

    def meddle(self, what: str) -> FaultSchedule:
        """Make the job's relay, the coordinator or a process of its own (`Settings.relay`), meddle with each third
        datagram that it passes on between workers behind address translators, until `heal`.

        Args:
            what: It may "alter" it, "misdirect" it to another worker, "repeat" it together with an old one, or "lose"
                it.
        """
        if what not in MEDDLINGS:
            raise LocalError(f"a relay meddles in one of the ways {', '.join(MEDDLINGS)}, not {what!r}")
        return self.fault(Meddle(what))

    def heal(self) -> FaultSchedule:
        """End all faults: paths, machines, processes, disks and rates of clocks are as at the beginning."""
        return self.fault(Heal())


def _worker(node: NodeRef, what: str) -> str:
    name = node_name(node)
    if not is_worker(name):
        raise LocalError(f"a worker {what}, not the {name if name == RELAY_HOST else 'coordinator'}")
    return name


def _sides(
    one: NodeRef | Iterable[NodeRef], other: NodeRef | Iterable[NodeRef], what: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    first, second = _names(one), _names(other)
    both = [name for name in first if name in second]
    if both:
        raise LocalError(f"{both[0]} is on both sides of {what}")
    return first, second


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
