"""Random scenarios, one from each seed: swarm testing.

Groce, Zhang, Eide, Chen, Regehr 2012, "Swarm Testing" (ISSTA): a test that may use all features uses each so often that
many bugs cannot show; a test that omits a random half of them finds more. Here features are kinds of fault. Each seed
enables every kind with probability 1/2, and draws few events from the enabled ones, close together, on a cluster whose
pace is drawn as well.

    loss, burst, jitter, duplicate,    conditions of some paths or of all: independent and bursty loss, delay that
    reorder, corrupt, rate, mtu,       varies, datagrams twice, late or with flipped bits, a bottleneck with its queue,
    latency                            a smaller MTU, longer paths. One event may change several of them
    partition, one_way, hold           paths between two sides: cut both ways, cut one way, datagrams kept until later
    crash, power, restart              a worker's process ends; its machine loses power; it ends and is started again
    coordinator_crash                  the same for the coordinator, mostly started again
    pause, slow                        SIGSTOP for a while; every callback takes time
    drift, leap, wall                  the monotonic clock runs wrong, leaps forward; the wall clock is set
    payload                            bits flip behind QUIC's own checks
    disk                               a write or an fsync fails, the disk is full, or the power goes in its middle
    vote                               something breaks in the moments around a vote: the voter, the coordinator, or the
                                       path between them
    join, leave, terminate             a node of a new name comes; a worker leaves for good; a process gets SIGTERM
    clock_back                         the wall clock is set back, and the process is started again
    lie, alarm                         bad members: other bits for one peer; reports that end views for nothing
    forge                              a bad member: another state than it has, given to one that comes back
    scale                              an operator asks for another number of ranks, once or several times
    memory                             ranks share a host: bits of its memory flip, there is none, wake-ups are late, a
                                       process is killed in the middle of a store
    rebind, relay                      ranks are behind address translators, which lose their mappings; what passes on
                                       for them is lost, cut off, or meddles (ways.py)
    coordinator_takeover, journal      there are several coordinators, and their journal in a database: who leads is
                                       lost, cut off, or stands still; the database fails
    lane                               ranks have lanes, and messages for them: these end, hang, are cut off or slow, or
                                       spoil what they carry (lanes.py)
    engine                             engines are in processes of their own, which end or hang (engines.py)

Times. Most faults begin within a horizon of 0.2 to 4 s. Steps are computed at a pace that makes the asked number of
them last about as long as the faults do, so that faults meet steps. Few come before the first view, more soon after it,
and often one just after another, where recovery is under way. Lengths lie around the deadlines at which the
code's behaviour changes: the retransmission and redial times, suspicion (0.45 lost_after), loss (lost_after), and
beyond.

Sites. Half of the seeds have the ranks in two or three places, neighbours together or mixed: what is hierarchical is
direct where there is one site. They are drawn by a generator of their own, so that they change nothing else of a seed.

Forgers. Three quarters of the seeds have none, and are what they would be without this kind: it is drawn last, by a
generator of its own. Where a seed has a liar, that one forges: of two bad members that are not the same nothing is
promised. To be seen a forgery needs somebody who has to be given a state, so another rank is started again meanwhile.

Operators. A quarter of the seeds without a liar or a forger have one, drawn by a generator of its own as well. It asks
for one rank at least and two more than there were at most, so that jobs grow and shrink while other things break.

Spares. A seventh of the seeds have one or two workers that stand by, and take the places of those who are lost; most of
them are kept warm. Drawn apart, too. Faults befall them as well; an operator gets no more ranks than there were.

Tiers. An eighth of the seeds change sets of tiers and share pieces of state (quicoll.sim.tiered), which is a setting as
well, and drawn apart. None of them has a forger; where a rank lies, they do not.

Hosts. A seventh of the seeds have ranks that share a host, drawn apart too, and nothing else of them is another one but
what they call. All are on one, or all but the last, or each half on one of two; those that come later are where the
first ones are. Their memory fails in some way once to three times. None of them is behind an address translator.

Ways. An eleventh of the seeds have ranks behind address translators, drawn apart as well, and nothing else of them is
another one. Ranks that come later are behind none.

Lanes. A fifth of the seeds have them, drawn apart as well, and nothing else of them is another one but the length of
chunks and what they call: messages that go by lanes. Hosts, translators, liars and spares come together with them.

Coordinators. A quarter of the seeds have two, drawn by a generator of its own too, and a quarter of these a third one,
by yet another. All else of such a seed is as it was, and what strikes "the coordinator" strikes one of them, which may
lead or not. The lease is between half a second and two; what befalls the leader and the database comes once to three
times.

Every scenario ends with a healing. Clocks that leapt stay so; a wall clock is never set by more than an hour at once,
as certificates are valid from a day before the beginning. What a path is like after the healing lets QUIC work.

Pure: a function of its arguments, in every process and version of Python (random.Random's generator is fixed by its
documentation for `random()` alone, so everything is drawn by that).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from quicoll.errors import LocalError
from quicoll.sim.outcome import Settings
from quicoll.sim.scenario.drawing import SwarmDraw, drawn_for
from quicoll.sim.scenario.engines import disturb_engines, engines_of, with_engines
from quicoll.sim.scenario.events import (
    COORDINATOR_HOST,
    DISK_FAULTS,
    FORGERIES,
    MEMORY_FAULTS,
    TAKEOVERS,
    Alarm,
    CorruptPayloads,
    Crash,
    DiskFault,
    Drift,
    Fault,
    Forge,
    Heal,
    HoldPath,
    JoinAnew,
    JournalFault,
    Leap,
    LeaveJob,
    LieTo,
    MemoryFault,
    PartitionPath,
    Pause,
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
    node_name,
)
from quicoll.sim.scenario.lanes import disturb_lanes, lanes_of, with_lanes
from quicoll.sim.scenario.language import events_source, settings_source
from quicoll.sim.scenario.ways import WAY_KINDS, disturb_ways, ways_of, with_translators
from quicoll.sim.workload import COMPUTE_S
from quicoll_transport.sim import Conditions

__all__ = ["FAULT_KINDS", "Scenario", "generate", "parse_kinds"]

_SEVERAL = ("coordinator_takeover", "journal")  # of several coordinators
_CONDITIONS = ("loss", "burst", "jitter", "duplicate", "reorder", "corrupt", "rate", "mtu", "latency")

FAULT_KINDS: tuple[str, ...] = (
    *_CONDITIONS,
    "partition",
    "one_way",
    "hold",
    "crash",
    "power",
    "restart",
    "coordinator_crash",
    "pause",
    "slow",
    "drift",
    "leap",
    "wall",
    "payload",
    "disk",
    "vote",
    "join",
    "leave",
    "terminate",
    "clock_back",
    "lie",
    "alarm",
    "forge",
    "scale",
    *_SEVERAL,
    *WAY_KINDS,
    "memory",
    "lane",
    "engine",
)
"""All kinds of fault, in the order in which they are drawn."""

_BESIDE = ("memory", "lane", "engine")  # which have settings and draws of their own
_SHARING = 0.15
_HALVES = 0.35  # of those with four ranks or more: two hosts
_MOST_NEWCOMERS = 2
_HORIZONS_MS = (200, 300, 500, 500, 1000, 1000, 2000, 4000)
_FORMED = 18  # latencies until the first view is at work; it needs all ranks, so an earlier crash leaves no steps
_MS = 1_000_000
_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run, as data. `steps`: until every rank has committed so many; compute_s: simulated seconds of each.

    str() is its events as Python; `command` what runs it again.
    """

    seed: int
    steps: int = 8
    compute_s: float = COMPUTE_S
    settings: Settings = field(default_factory=Settings)
    events: tuple[ScenarioEvent, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 1_000_000:
            raise LocalError(f"a scenario has 1 to 1000000 steps, not {self.steps}")
        if not 0 <= self.compute_s < 3600:
            raise LocalError(f"a step computes for less than an hour, not for {self.compute_s} s")

    @property
    def ranks(self) -> int:
        return self.settings.ranks

    @property
    def faults(self) -> int:
        """Events but for healings."""
        return sum(not isinstance(event.fault, Heal) for event in self.events)

    def __str__(self) -> str:
        return events_source(self.events, separator="\n")

    @property
    def command(self) -> str:
        """A line for a shell."""
        words = ["quicoll", "sim", "--seed", str(self.seed), "--ranks", str(self.ranks), "--steps", str(self.steps)]
        if self.compute_s != COMPUTE_S:
            words += ["--compute", repr(self.compute_s)]
        if self.settings != Settings(ranks=self.ranks):
            words += ["--settings", settings_source(self.settings)]
        return shlex.join([*words, "--events", events_source(self.events)])


def parse_kinds(text: str) -> tuple[str, ...]:
    """Kinds of fault by name, with commas between them; "all"; "all,-loss" or "-loss" for all but some.

    Raises LocalError for other names, and where no kind is left: a run without faults would be green for nothing.
    """
    words = text.replace(" ", "").split(",")
    chosen: dict[str, None] = dict.fromkeys(FAULT_KINDS if words[0].startswith("-") else ())
    for word in words:
        name = word.removeprefix("-")
        if name != "all" and name not in FAULT_KINDS:
            raise LocalError(f"there is no kind of fault {name!r} among {', '.join(FAULT_KINDS)}")
        names = FAULT_KINDS if name == "all" else (name,)
        for each in names:
            if word.startswith("-"):
                chosen.pop(each, None)
            else:
                chosen[each] = None
    if not chosen:
        raise LocalError(f"{text!r} leaves no kind of fault")
    return tuple(kind for kind in FAULT_KINDS if kind in chosen)


def generate(
    seed: int,
    *,
    ranks: int = 4,
    steps: int = 8,
    kinds: Iterable[str] = FAULT_KINDS,
    settings: Settings | None = None,
) -> Scenario:
    """The scenario of this seed. settings: taken as they are, with `ranks`; else they are drawn too."""
    wanted = parse_kinds(",".join(kinds)) if kinds else ()
    forges = _forges(seed, wanted)
    scales = _scales(seed, wanted)
    losses = tuple(kind for kind in wanted if kind in _SEVERAL)
    several = _several(seed, wanted) if settings is None or settings.coordinators > 1 else None
    ways = ways_of(seed, wanted) if settings is None or settings.nats else None
    of_ways = tuple(kind for kind in wanted if kind in WAY_KINDS)
    hosts = _hosts(seed, ranks, wanted) if settings is None and ways is None else None
    lanes = lanes_of(seed, ranks, wanted) if settings is None or settings.lanes else None
    engines = engines_of(seed, wanted) if settings is None or settings.engine_processes else None
    wanted = tuple(kind for kind in wanted if kind not in ("forge", "scale", *_SEVERAL, *WAY_KINDS, *_BESIDE))
    draw = drawn_for("", seed)
    enabled = [kind for kind in wanted if draw.chance(0.5)]
    horizon = draw.one_of(_HORIZONS_MS) * _MS
    pace = draw.between(0.3, 1.0)
    drawn = _settings(draw, ranks, enabled)
    if settings is None:
        drawn = _with_spares(seed, drawn, wanted)
        drawn = replace(drawn, tiers=forges is None and _tiers(seed, wanted))
    if several is not None:
        drawn = replace(drawn, coordinators=_how_many(seed), lease=several.one_of((0.5, 1.0, 2.0)))
    if ways is not None:
        drawn = with_translators(ways, drawn)
    if hosts is not None:
        drawn = replace(drawn, hosts=_places(seed, hosts, ranks))
    if lanes is not None:
        drawn = with_lanes(lanes, drawn)
    if engines is not None:
        drawn = with_engines(engines, drawn)
    settings = replace(drawn, sites=_sites(seed, ranks)) if settings is None else replace(settings, ranks=ranks)
    builder = _Builder(draw, settings, horizon)
    count = draw.one_of((1, 1, 2, 2, 3, 3, 4, 5, 6, 8))
    for _ in range(count if enabled else 0):
        builder.add(draw.one_of(enabled), enabled)
    others = builder.times()  # of faults that the two below may come after; neither after one of the other
    if lanes is not None:
        builder.disturb_lanes(lanes, others)
    if engines is not None:
        builder.disturb_engines(engines, others)
    if forges is not None:
        builder.forge(forges)
    elif scales is not None:
        builder.scale(scales)
    if several is not None:
        builder.lose_leaders(several, losses)
    if ways is not None:
        builder.disturb_ways(ways, of_ways)
    if hosts is not None:
        builder.disturb_memory(hosts)
    events = builder.healed()
    compute_s = round(events[-1].at_ns / _S / steps * pace, 4)
    return Scenario(seed=seed, steps=steps, compute_s=compute_s, settings=settings, events=events)


def _settings(draw: SwarmDraw, ranks: int, enabled: Sequence[str]) -> Settings:
    """The pace of the cluster. Paths are such that a job goes on over them."""
    latency_ns = draw.one_of((100_000, 500_000, 500_000, 2 * _MS, 10 * _MS, 30 * _MS))
    lost_after = draw.one_of((0.5, 1.0, 1.0, 2.0))
    if latency_ns >= 30 * _MS:
        lost_after = max(lost_after, 1.0)
    conditions = Conditions(latency_ns=latency_ns)
    if "jitter" in enabled and draw.chance(0.3):
        conditions = replace(conditions, jitter_ns=latency_ns // 2)
    if "loss" in enabled and draw.chance(0.3):
        conditions = replace(conditions, loss=draw.one_of((0.001, 0.01)))
    return Settings(
        ranks=ranks,
        lost_after=lost_after,
        timeout=draw.one_of((2.0, 5.0, 20.0)),
        hold_timeout=draw.one_of((5.0, 20.0, 60.0)),
        chunk_bytes=draw.one_of((1 << 20, 1 << 20, 1000)),  # a share in one message, or in several
        conditions=conditions,
    )


def _sites(seed: int, ranks: int) -> tuple[str, ...]:
    """The site of each rank; none for half of the seeds."""
    draw = drawn_for("sites", seed)
    if ranks < 2 or draw.chance(0.5):
        return ()
    places = ("north", "south", "east")[: draw.one_of((2, 2, 3))]
    if draw.chance(0.5):
        return tuple(places[len(places) * rank // ranks] for rank in range(ranks))
    between = [draw.one_of(places) for _ in range(ranks - 2)]
    return (places[0], *between, places[1])


def _hosts(seed: int, ranks: int, wanted: Sequence[str]) -> SwarmDraw | None:
    """What the shared hosts of this seed, and their faults, are drawn by; None where it has none."""
    draw = drawn_for("hosts", seed)
    alone = list(wanted) == ["memory"]
    return draw if ranks > 1 and "memory" in wanted and draw.chance(1.0 if alone else _SHARING) else None


def _places(seed: int, draw: SwarmDraw, ranks: int) -> tuple[str, ...]:
    """The host of each rank: one, or one for all but the last, without which the others share theirs; or two, each of
    half of them."""
    last = "one" if ranks < 3 or draw.chance(0.8) else "other"
    if ranks > 3 and drawn_for("places", seed).chance(_HALVES):
        return tuple("one" if 2 * rank < ranks else "two" for rank in range(ranks))
    return (*("one",) * (ranks - 1), last)


def _forges(seed: int, wanted: Sequence[str]) -> SwarmDraw | None:
    """What a forger of this seed is drawn by; None where it has none."""
    draw = drawn_for("forge", seed)
    return draw if "forge" in wanted and draw.chance(1.0 if len(wanted) == 1 else 0.25) else None


def _scales(seed: int, wanted: Sequence[str]) -> SwarmDraw | None:
    """What the requests of this seed's operator are drawn by; None where it has none."""
    draw = drawn_for("scale", seed)
    return draw if "scale" in wanted and draw.chance(1.0 if len(wanted) == 1 else 0.25) else None


def _with_spares(seed: int, settings: Settings, wanted: Sequence[str]) -> Settings:
    """The settings of a seed, which may have workers that stand by; most of these are kept warm."""
    draw = drawn_for("spares", seed)
    if not wanted or not draw.chance(0.15):
        return settings
    spares = draw.one_of((1, 1, 2))
    return replace(settings, spares=spares, warm_spares=draw.one_of((0, 1, 1, spares)))


def _tiers(seed: int, wanted: Sequence[str]) -> bool:
    """Whether the workload of this seed has tiers and shared state."""
    draw = drawn_for("tiers", seed)
    return bool(wanted) and draw.chance(0.16)


def _several(seed: int, wanted: Sequence[str]) -> SwarmDraw | None:
    """What the losses of this seed's several coordinators are drawn by; None where it has one."""
    draw = drawn_for("coordinators", seed)
    of_these = [kind for kind in wanted if kind in _SEVERAL]
    return draw if of_these and draw.chance(1.0 if of_these == list(wanted) else 0.25) else None


def _how_many(seed: int) -> int:
    """How many coordinators a seed has that has several."""
    draw = drawn_for("coordinators/third", seed)
    return 3 if draw.chance(0.25) else 2


class _Builder:
    """Draws events of given kinds."""

    def __init__(self, draw: SwarmDraw, settings: Settings, horizon_ns: int) -> None:
        self._draw = draw
        self._settings = settings
        self._horizon = horizon_ns
        self._lost = round(settings.lost_after * _S)
        self._events: list[ScenarioEvent] = []
        self._workers = [node_name(rank) for rank in range(settings.ranks + settings.spares)]
        self._nodes = [COORDINATOR_HOST, *self._workers]
        self._last = 0
        self._sick_ns = 0  # no healing before this time
        self._newcomers = 0
        self._leavers: list[str] = []
        self._makers: dict[str, Callable[[int], None]] = {
            "partition": self._partition,
            "one_way": self._one_way,
            "hold": self._hold,
            "crash": self._crash,
            "power": self._power,
            "restart": self._restart,
            "coordinator_crash": self._coordinator_crash,
            "pause": self._pause,
            "slow": self._slow,
            "drift": self._drift,
            "leap": self._leap,
            "wall": self._wall,
            "payload": self._payload,
            "disk": self._disk,
            "vote": self._vote,
            "join": self._join,
            "leave": self._leave,
            "terminate": self._terminate,
            "clock_back": self._clock_back,
            "lie": self._lie,
            "alarm": self._alarm,
        }

    def add(self, kind: str, enabled: Sequence[str]) -> None:
        """A fault of this kind, and what ends it."""
        at_ns = self._time()
        self._last = at_ns
        if kind in _CONDITIONS:
            others = [each for each in enabled if each in _CONDITIONS and each != kind]
            self._conditions(at_ns, [kind, *(each for each in others if self._draw.chance(0.25))])
        else:
            self._makers[kind](at_ns)

    def forge(self, draw: SwarmDraw) -> None:
        """Let one worker forge its state, and another one come back. draw: by which all of it is drawn."""
        liars = [event.fault.node for event in self._events if isinstance(event.fault, LieTo)]
        if len(self._workers) < 2:
            return
        first, second = draw.sides(self._workers)
        forger = liars[0] if liars else first[0]
        others = [node for node in (*second, *first) if node != forger]
        begin = _FORMED * self._settings.conditions.latency_ns if draw.chance(0.85) else 0
        at_ns = begin + round(self._horizon * draw.between(0.0, 0.6))
        self._put(at_ns, Forge(forger, draw.one_of(FORGERIES)))
        for node in draw.some_of(others) if draw.chance(0.3) else [draw.one_of(others)]:
            down_ns = at_ns + round(draw.between(-0.5, 0.5) * self._lost)
            self._put(max(down_ns, 0), Crash(node))
            up_ns = max(down_ns, 0) + round(self._lost * draw.one_of((0.1, 0.5, 1.2)))
            self._put(up_ns, Restart(node))
            self._sick_ns = max(self._sick_ns, up_ns + 2 * _FORMED * self._settings.conditions.latency_ns + self._lost)

    def scale(self, draw: SwarmDraw) -> None:
        """Let an operator ask for other numbers of ranks. draw: by which all of it is drawn."""
        if any(isinstance(event.fault, LieTo) for event in self._events):
            return
        begin = _FORMED * self._settings.conditions.latency_ns if draw.chance(0.85) else 0
        for _ in range(draw.one_of((1, 1, 2, 3))):
            at_ns = begin + round(self._horizon * draw.between(0.0, 1.0))
            world_size = draw.one_of(range(1, len(self._workers) + 3))
            leave = (draw.one_of(self._workers),) if draw.chance(0.2) else ()
            self._put(at_ns, ScaleTo(world_size, leave))

    def lose_leaders(self, draw: SwarmDraw, kinds: Sequence[str]) -> None:
        """Let leading coordinators be lost, and their database fail. draw: by which all of it is drawn."""
        begin = _FORMED * self._settings.conditions.latency_ns if draw.chance(0.85) else 0
        for _ in range(draw.one_of((1, 1, 2, 3))):
            at_ns = begin + round(self._horizon * draw.between(0.0, 1.0))
            if draw.one_of(kinds) == "coordinator_takeover":
                self._put(at_ns, TakeOver(draw.one_of(TAKEOVERS)))
                continue
            what = draw.one_of(("refused", "answer", "late", "late", "away"))
            self._put(at_ns, JournalFault(what))
            if what == "away" and draw.chance(0.6):
                self._put(
                    at_ns + round(self._settings.lease * _S * draw.one_of((0.2, 0.9, 1.1, 2.0))), JournalFault("back")
                )

    def disturb_ways(self, draw: SwarmDraw, kinds: Sequence[str]) -> None:
        """Let translators and relays fail. draw: by which all of it is drawn."""
        begin = _FORMED * self._settings.conditions.latency_ns if draw.chance(0.85) else 0
        disturb_ways(draw, self._settings, kinds, begin_ns=begin, horizon_ns=self._horizon, put=self._put)

    def times(self) -> list[int]:
        """Return when faults come, as far as there are any yet."""
        return [event.at_ns for event in self._events]

    def disturb_lanes(self, draw: SwarmDraw, others: Sequence[int]) -> None:
        """Let lanes fail. draw: by which all of it is drawn. others: when other faults come."""
        begin = _FORMED * self._settings.conditions.latency_ns if draw.chance(0.85) else 0
        disturb_lanes(draw, self._settings, others, begin_ns=begin, horizon_ns=self._horizon, put=self._put)

    def disturb_engines(self, draw: SwarmDraw, others: Sequence[int]) -> None:
        """Let engines' processes fail. draw: by which all of it is drawn. others: when other faults come."""
        begin = _FORMED * self._settings.conditions.latency_ns if draw.chance(0.85) else 0
        disturb_engines(draw, self._settings, others, begin_ns=begin, horizon_ns=self._horizon, put=self._put)

    def disturb_memory(self, draw: SwarmDraw) -> None:
        """Let the memory of a host fail. draw: by which all of it is drawn."""
        begin = _FORMED * self._settings.conditions.latency_ns if draw.chance(0.7) else 0
        for _ in range(draw.one_of((1, 1, 2, 3))):
            at_ns = begin + round(self._horizon * draw.between(0.0, 1.0))
            node, what = draw.one_of(self._workers), draw.one_of(MEMORY_FAULTS)
            most = {"spoil": 60.0, "kill": 600.0}.get(what)
            self._put(at_ns, MemoryFault(node, what, round(draw.log_between(1.0, most)) if most else 1))

    def healed(self) -> tuple[ScenarioEvent, ...]:
        """All events in their order, with a healing at the end."""
        end = max([self._horizon // 2, *(event.at_ns for event in self._events)])
        healing = max(end + min(self._length(), self._lost * 3 // 2), self._sick_ns)
        self._events.append(ScenarioEvent(_round(healing), Heal()))
        return tuple(sorted(self._events, key=lambda event: event.at_ns))

    def _put(self, at_ns: int, fault: Fault, voter: str = "", after_ns: int = 0) -> None:
        self._events.append(ScenarioEvent(_round(at_ns), fault, voter, after_ns))

    def _time(self) -> int:
        """Return when the next fault begins."""
        if self._events and self._draw.chance(0.4):
            return self._last + round(self._draw.log_between(_MS / 2, 2 * self._lost))
        begin = _FORMED * self._settings.conditions.latency_ns if self._draw.chance(0.85) else 0
        early = self._draw.between(0.0, 1.0)
        return begin + round(self._horizon * early * math.sqrt(early))

    def _length(self) -> int:
        """Return how long it lasts: around a deadline, just short of it or just beyond."""
        lost = self._lost
        deadlines = (2 * _MS, 20 * _MS, 60 * _MS, lost // 4, lost // 2, lost, lost, 3 * lost)
        return round(self._draw.one_of(deadlines) * self._draw.one_of((0.7, 0.95, 1.05, 1.5)))

    def _until(self, at_ns: int, fault: Fault, probability: float = 0.6) -> None:
        """It is ended, perhaps, before the healing."""
        if self._draw.chance(probability):
            self._put(at_ns + self._length(), fault)

    # -- kinds ---------------------------------------------------------------------------------------------------

    def _conditions(self, at_ns: int, kinds: Sequence[str]) -> None:
        draw, usual = self._draw, self._settings.conditions
        one: tuple[str, ...] = ()
        other: tuple[str, ...] = ()
        if draw.chance(0.6):
            first, second = draw.sides(self._nodes)
            one, other = tuple(sorted(first)), tuple(sorted(second))
        found = usual
        for kind in kinds:
            found = self._worse(found, kind)
        self._put(at_ns, SetConditions(found, one, other))
        self._until(at_ns, SetConditions(usual, one, other), 0.4)

    def _worse(self, found: Conditions, kind: str) -> Conditions:
        draw = self._draw
        match kind:
            case "loss":
                return replace(found, loss=draw.one_of((0.01, 0.05, 0.2, 0.5, 0.9)), burst=1.0)
            case "burst":
                return replace(found, loss=draw.one_of((0.01, 0.05, 0.2, 0.4)), burst=draw.one_of((2.0, 8.0, 30.0)))
            case "jitter":
                return replace(found, jitter_ns=_round(draw.log_between(_MS, 200 * _MS)))
            case "duplicate":
                return replace(found, duplicate=draw.one_of((0.01, 0.2, 1.0)))
            case "reorder":
                delay = _round(draw.log_between(_MS, 100 * _MS))
                return replace(found, reorder=draw.one_of((0.01, 0.1, 0.5)), reorder_ns=delay)
            case "corrupt":
                return replace(found, corrupt=draw.one_of((0.001, 0.01, 0.1, 0.5)))
            case "rate":
                rate, queue = draw.one_of((20_000, 100_000, 1_000_000)), draw.one_of((4096, 32_768, 262_144))
                return replace(found, bytes_per_second=rate, queue_bytes=queue)
            case "mtu":
                return replace(found, mtu=draw.one_of((1200, 1252, 1300, 1400)))
            case _:
                return replace(found, latency_ns=_round(draw.log_between(_MS, 300 * _MS)))

    def _split(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        one, other = self._draw.sides(self._nodes)
        return tuple(sorted(one)), tuple(sorted(other))

    def _partition(self, at_ns: int) -> None:
        one, other = self._split()
        self._put(at_ns, PartitionPath(one, other))
        self._until(at_ns, Repair(one, other))

    def _one_way(self, at_ns: int) -> None:
        one, other = self._split()
        self._put(at_ns, PartitionPath(one, other, one_way=True))
        self._until(at_ns, Repair(one, other))

    def _hold(self, at_ns: int) -> None:
        one, other = self._split()
        self._put(at_ns, HoldPath(one, other))
        if self._draw.chance(0.5):
            self._put(at_ns, HoldPath(other, one))
        self._until(at_ns, Repair(one, other))

    def _crash(self, at_ns: int) -> None:
        for node in self._draw.some_of(self._workers) if self._draw.chance(0.2) else [self._draw.one_of(self._workers)]:
            self._put(at_ns, Crash(node))

    def _power(self, at_ns: int) -> None:
        node = self._draw.one_of(self._nodes)
        self._put(at_ns, Crash(node, power=True))
        self._until(at_ns, Restart(node))

    def _restart(self, at_ns: int) -> None:
        node = self._draw.one_of(self._workers)
        self._put(at_ns, Crash(node))
        self._put(at_ns + self._length(), Restart(node))

    def _coordinator_crash(self, at_ns: int) -> None:
        self._put(at_ns, Crash(COORDINATOR_HOST, power=self._draw.chance(0.2)))
        self._until(at_ns, Restart(COORDINATOR_HOST), 0.8)

    def _pause(self, at_ns: int) -> None:
        self._put(at_ns, Pause(self._draw.one_of(self._nodes), _round(self._length())))

    def _slow(self, at_ns: int) -> None:
        node = self._draw.one_of(self._nodes)
        self._put(at_ns, Slow(node, _round(self._draw.log_between(50_000, 5 * _MS))))
        self._until(at_ns, Slow(node, 0), 0.4)

    def _drift(self, at_ns: int) -> None:
        node = self._draw.one_of(self._nodes)
        ppm = self._draw.one_of((50, 200, 10_000, 100_000)) * self._draw.one_of((1, -1))
        self._put(at_ns, Drift(node, ppm))
        self._until(at_ns, Drift(node, 0), 0.3)

    def _leap(self, at_ns: int) -> None:
        self._put(at_ns, Leap(self._draw.one_of(self._nodes), _round(self._length())))

    def _wall(self, at_ns: int) -> None:
        seconds: int = self._draw.one_of((1, 60, 3600)) * self._draw.one_of((1, -1))
        self._put(at_ns, StepWall(self._draw.one_of(self._nodes), seconds * _S))

    def _payload(self, at_ns: int) -> None:
        self._put(at_ns, CorruptPayloads(self._draw.one_of(self._nodes), self._draw.one_of((1, 1, 2, 5))))

    def _disk(self, at_ns: int) -> None:
        node = COORDINATOR_HOST if self._draw.chance(0.6) else self._draw.one_of(self._workers)
        self._put(at_ns, DiskFault(node, self._draw.one_of(DISK_FAULTS)))

    def _vote(self, at_ns: int) -> None:
        """A vote takes one way through the network to the coordinator, the decision another one back."""
        draw = self._draw
        voter = draw.one_of(self._workers)
        latency = self._settings.conditions.latency_ns
        after_ns = round(latency * draw.one_of((0.0, 0.0, 0.5, 0.9, 1.1, 1.5, 1.9, 2.1, 3.0)))
        node = draw.one_of((voter, voter, COORDINATOR_HOST, draw.one_of(self._workers)))
        one, other = ((voter,), (COORDINATOR_HOST,)) if draw.chance(0.5) else ((COORDINATOR_HOST,), (voter,))
        kinds: tuple[tuple[Fault, Fault], ...] = (
            (Crash(node), Restart(node)),
            (Pause(node), Resume(node)),
            (PartitionPath(one, other, one_way=draw.chance(0.7)), Repair(one, other)),
            (HoldPath(one, other), Repair(one, other)),
        )
        fault, end = draw.one_of(kinds)
        self._put(at_ns, fault, voter, after_ns)
        self._until(at_ns, end)

    def _join(self, at_ns: int) -> None:
        if self._newcomers < _MOST_NEWCOMERS:
            self._put(at_ns, JoinAnew(node_name(len(self._workers) + self._newcomers)))
            self._newcomers += 1

    def _leave(self, at_ns: int) -> None:
        """As few as leave a quorum even if nobody hears that they left of their own will."""
        node = self._draw.one_of(self._workers)
        if node not in self._leavers and 2 * (len(self._leavers) + 1) < len(self._workers):
            self._put(at_ns, LeaveJob(node))
            self._leavers.append(node)

    def _terminate(self, at_ns: int) -> None:
        node = self._draw.one_of(self._nodes)
        self._put(at_ns, Terminate(node))
        self._until(at_ns, Restart(node))

    def _clock_back(self, at_ns: int) -> None:
        node = self._draw.one_of(self._nodes)
        self._put(at_ns, StepWall(node, -self._draw.one_of((1, 60, 3600)) * _S))
        self._put(at_ns, Crash(node))
        self._put(at_ns + self._length(), Restart(node))

    def _lie(self, at_ns: int) -> None:
        if len(self._workers) > 1:
            liar, victim = self._draw.sides(self._workers)
            self._put(at_ns, LieTo(liar[0], victim[0]))

    def _alarm(self, at_ns: int) -> None:
        node = self._draw.one_of(self._workers)
        self._put(at_ns, Alarm(node, _round(self._draw.log_between(20 * _MS, self._lost))))
        self._until(at_ns, Alarm(node, 0), 0.4)


def _round(ns: float) -> int:
    """To a tenth of a millisecond: what people read, and what shrinking keeps."""
    return max(1, round(ns / 100_000)) * 100_000
