"""One coordinator and several members on a virtual clock, with every fault the protocol knows, replayable by seed.

The network, the processes and the disk are simulated; the cores are the real ones. Checked while it runs and at the
end (REQUIREMENTS S8, S9, S12, C4):

- what one member committed as (step, view, digest) is what the journal says, and so equal on all
- no step is committed twice, none out of order; no member hears both commit and abort of one (view, step)
- a committed step is never lost: at the end every member's log is the journal's
- a view id names one and the same View for ever, proposals and restarts of the coordinator included
- a member acts in one view at a time and never confirms one while it acts in another
- every installed view has a quorum of the one before it
- timers do not spin; and within PROGRESS of the last repair all nodes commit together again
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from depth import deep, some

from quicoll.membership.coordinator import actions
from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.coordinator.core import CoordinatorCore
from quicoll.membership.coordinator.history import Committed, History, InstalledView, JournalRecord, Left, Proposed
from quicoll.membership.incarnation import CHANCE_BYTES, first
from quicoll.membership.member import actions as member_actions
from quicoll.membership.member.core import MemberCore
from quicoll.membership.member.states import MemberState
from quicoll.membership.messages import Confirm, decode, encode

if TYPE_CHECKING:
    from quicoll.membership.view import Member, View

MS = 1_000_000
SECOND = 1000 * MS
FAULTS_UNTIL = 12 * SECOND
PROGRESS = 20 * SECOND
"""Virtual time from the last repair to a view of all nodes that commits: a proposal may have to run into its timeout
(4 s), a member into the loss of an answer (6 s), the longest back-off (4 s) has to pass; with room for a repeat."""

CONFIG = {
    "seed": 7,
    "propose_timeout_ns": 4 * SECOND,
    "gather_ns": 200 * MS,
    "settle_ns": 1500 * MS,
    "quiet_ns": 100 * MS,
    "vote_timeout_ns": 3 * SECOND,
    "retry_min_ns": 500 * MS,
    "retry_max_ns": 4 * SECOND,
}


@dataclass(slots=True, eq=False)
class Link:
    """One link between a member and the coordinator; messages on it arrive in order, until it dies."""

    node: str
    incarnation: int
    alive: bool = True
    arrival: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})


class Process:
    """A worker process: a member core, and a user's loop whose state is the log of the steps it applied."""

    def __init__(self, world: World, node: str, incarnation: int, log: list[tuple[int, int, bytes]]) -> None:
        self.world = world
        self.node = node
        self.log = log
        self.alive = True
        self.leaving = False
        self.learned = False  # it has stepped out of a view since it held the state
        self.stalled_until = 0
        self.backlog: deque[Callable[[], None]] = deque()
        self.link: Link | None = None
        self.active: View | None = None
        self.forming: View | None = None
        self.probe: int | None = None
        self.timer_at: int | None = None
        self.decided: dict[tuple[int, int], bool] = {}
        self.begun: list[tuple[int, int]] = []
        self.vetoed: list[tuple[int, int]] = []
        self.core = MemberCore(
            node,
            incarnation,
            addresses=(("sim", 1),),
            committed_step=len(log),
            form_timeout_ns=3 * SECOND,
            answer_timeout_ns=6 * SECOND,
            decision_margin_ns=1 * SECOND,
        )

    def __repr__(self) -> str:
        return repr(self.core)

    def later(self, delay: int, call: Callable[[], None]) -> None:
        """Run `call` in this process, if it still lives; a stalled one runs nothing, and catches up after."""

        def run() -> None:
            self.backlog.append(call)
            self.work()

        self.world.at(self.world.now + delay, run)

    def work(self) -> None:
        while self.alive and self.backlog:
            if self.world.now < self.stalled_until:
                self.world.at(self.stalled_until, self.work)
                return
            self.backlog.popleft()()
            self.drain()

    def connect(self) -> None:
        if self.link is not None or self.core.state is MemberState.LEFT:
            return
        if self.world.coordinator is None or self.node in self.world.cut:
            self.later(self.world.delay(100, 400), self.connect)
            return
        self.link = self.world.link(self)
        self.core.connected(now_ns=self.world.now)

    def disconnected(self, link: Link) -> None:
        if self.link is link:
            self.link = None
            self.core.disconnected("silence", now_ns=self.world.now)
            self.later(self.world.delay(10, 300), self.connect)

    def drain(self) -> None:
        while self.alive and (action := self.core.next_action()) is not None:
            self.carry_out(action)
        at = self.core.next_timer()
        if self.alive and at is not None and at != self.timer_at:
            self.timer_at = at
            self.later(max(0, at - self.world.now), self.on_timer)

    def on_timer(self) -> None:
        self.timer_at = None
        self.core.handle_timer(self.world.now)
        at = self.core.next_timer()
        assert at is None or at > self.world.now, "the timer spins"

    def carry_out(self, action: member_actions.MemberAction) -> None:
        world = self.world
        match action:
            case member_actions.TellCoordinator(message):
                if isinstance(message, Confirm):
                    assert self.active is None, "confirmed while it acts in another view"
                    assert self.forming is not None
                    assert self.forming.view_id == message.view_id
                if self.link is not None:
                    world.send_up(self.link, encode(message))
            case member_actions.FormLinks(view):
                assert self.active is None
                assert self.forming is None, "two views at a time"
                world.same_view(view)
                self.forming = view
                self.probe = None
                self.later(world.delay(5, 60), lambda: self.form(view, tries=3))
            case member_actions.Activate(view):
                assert self.forming == view
                assert self.active is None
                assert view in world.installed, "acts in a view that the journal does not have"
                self.active = view
                self.enter(view)
                self.later(world.delay(50, 250), lambda: self.watch(view))
            case member_actions.Deactivate(view_id):
                assert self.forming is not None
                assert self.forming.view_id == view_id
                self.forming = self.active = None
            case member_actions.Decided(view_id, step, commit):
                self.on_decided(view_id, step, commit)
            case member_actions.Reconnect():
                if self.link is not None:
                    world.break_link(self.link)
                    self.disconnected(self.link)
            case member_actions.Refused(reason):
                raise AssertionError(f"{self.node} was refused: {reason}")
            case member_actions.StartOver():
                if self.link is not None:
                    world.break_link(self.link)
                    self.link = None
                self.later(world.delay(10, 300), self.connect)
            case member_actions.ProbePaths(number, members):
                self.probe = number
                self.later(world.delay(5, 60), lambda: self.try_paths(number, members))
            case member_actions.JobOver():
                self.leaving = True

    def try_paths(self, number: int, members: tuple[Member, ...]) -> None:
        if self.probe != number:
            return
        if all(self.world.reachable(self.node, member.node, member.incarnation) for member in members):
            self.core.reached(number)
        else:
            self.later(self.world.delay(100, 200), lambda: self.try_paths(number, members))

    def form(self, view: View, *, tries: int) -> None:
        if self.forming is not view or self.active is not None:
            return
        away = self.unreachable(view)
        if not away:
            self.core.links_ready(view.view_id, now_ns=self.world.now)
        elif tries:
            self.later(self.world.delay(100, 200), lambda: self.form(view, tries=tries - 1))
        else:
            self.core.links_failed(view.view_id, away, "no answer", now_ns=self.world.now)

    def unreachable(self, view: View) -> list[str]:
        return [
            member.node
            for member in view.members
            if member.node != self.node and not self.world.reachable(self.node, member.node, member.incarnation)
        ]

    def watch(self, view: View) -> None:
        """A failure detector: peers that cannot be reached are reported, late and one by one."""
        if self.active is view:
            for other in self.unreachable(view):
                self.core.peer_lost(other, "silence", now_ns=self.world.now)
            self.later(self.world.delay(50, 250), lambda: self.watch(view))

    # The user's loop

    def enter(self, view: View) -> None:
        """Get the state from a member that has it, then take steps. Or step out at first, and learn it."""
        if len(self.log) < view.committed_step:
            if not self.learned and self.core.next_step is not None and self.world.rng.random() < 0.3:
                self.learned = True
                self.log.clear()
                self.core.state_lost()
                self.core.step_out()
                self.later(self.world.delay(10, 3000), self.core.learned)
                return
            holders = [member for member in view.members if member.committed_step == view.committed_step]
            donors = [self.world.processes[member.node].log for member in holders]
            for log in donors:
                assert len(log) >= view.committed_step, "a member is said to hold what it does not"
            # Where no member holds it, all of them died since: then it comes from a checkpoint, here the journal's log.
            source = donors[0] if donors else self.world.commits
            self.log[:] = source[: view.committed_step]
            self.core.caught_up(view.committed_step)
            self.learned = False
        assert self.log == self.world.commits[: view.committed_step]
        self.later(self.world.delay(1, 30), lambda: self.begin(view))

    def begin(self, view: View) -> None:
        step = self.core.next_step
        if self.active is not view or step is None:
            return
        self.begun.append((view.view_id, step))
        self.core.begin(step, now_ns=self.world.now)
        self.later(self.world.delay(20, 200), lambda: self.vote(view, step))

    def vote(self, view: View, step: int) -> None:
        if self.active is not view or self.core.open_step != step:
            return
        now, digest = self.world.now, b"%d/%d" % (view.view_id, step)
        chance = 1.0 if self.world.quiet or now >= FAULTS_UNTIL else self.world.rng.random()
        if chance < 0.01:
            self.core.failed("the collective was cancelled", culprit=self.node, now_ns=now)
        elif chance < 0.02:
            self.vetoed.append((view.view_id, step))
            self.core.vote(step, ok=False, digest=digest, reason="not a number", now_ns=now)
        elif chance < 0.03 and view.world_size > 1:
            self.core.vote(step, ok=True, digest=self.node.encode(), now_ns=now)
        else:
            self.core.vote(step, ok=True, digest=digest, now_ns=now)

    def on_decided(self, view_id: int, step: int, commit: bool) -> None:
        assert (view_id, step) in self.begun, "decided what was not begun"
        assert (view_id, step) not in self.decided, "decided twice"
        self.decided[view_id, step] = commit
        if commit:
            assert (view_id, step) not in self.vetoed, "committed against a vote"
            entry = self.world.commits[step - 1]
            assert entry[:2] == (step, view_id), "committed what the journal does not have"
            assert len(self.log) == step - 1, "applied out of order"
            self.log.append(entry)
            if (view := self.active) is not None:
                self.later(self.world.delay(1, 30), lambda: self.begin(view))
        else:
            assert not self.world.history.committed(view_id, step), "aborted what is committed"
            assert self.active is None or self.active.view_id != view_id, "aborted before the view had ended here"
            self.world.aborted.add((view_id, step))


class World:
    """The clock, the network, the disk, and the coordinator's process."""

    def __init__(self, seed: int, *, nodes: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._pushed = 0
        self.names = [f"n{index}" for index in range(nodes)]
        self.config = CoordinatorConfig(world_size=nodes, **CONFIG)
        self.history = History()
        self.records: list[JournalRecord] = []
        self.commits: list[tuple[int, int, bytes]] = []
        self.aborted: set[tuple[int, int]] = set()
        self.views: dict[int, View] = {}
        self.installed: list[View] = []
        self.base: list[str] = []
        self.cut: set[str] = set()  # nodes that cannot reach the coordinator
        self.broken: set[frozenset[str]] = set()  # pairs of nodes that cannot reach each other
        self.coordinator: CoordinatorCore | None = None
        self.links: dict[str, Link] = {}
        self.crash_after: int | None = None
        self.timer_at: int | None = None
        self.processes: dict[str, Process] = {}
        self.quiet = False  # whether users' steps never fail by themselves
        self.start_coordinator()
        for node in self.names:
            self.start(node)

    # Time

    def at(self, at: int, call: Callable[[], None]) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (at, self._pushed, call))

    def run(self, until: int) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, call = heapq.heappop(self._queue)
            call()
        self.now = until

    def delay(self, low_ms: int, high_ms: int) -> int:
        return self.rng.randrange(low_ms * MS, high_ms * MS)

    # Network

    def reachable(self, node: str, other: str, incarnation: int) -> bool:
        peer = self.processes[other]
        fits = peer.alive and peer.core.incarnation == incarnation and peer.core.state is not MemberState.LEFT
        return fits and frozenset((node, other)) not in self.broken

    def link(self, process: Process) -> Link:
        link = Link(process.node, process.core.incarnation)
        self.links[process.node] = link  # the newest; the coordinator's shell forgets an older one
        return link

    def send_up(self, link: Link, data: bytes) -> None:
        def arrive() -> None:
            core = self.coordinator
            if link.alive and core is not None:
                message = decode(data, sender="member")
                core.receive(link.node, message, now_ns=self.now, incarnation=link.incarnation)
                self.drain()

        self._in_order(link, "up", arrive)

    def send_down(self, link: Link, data: bytes) -> None:
        process = self.processes[link.node]

        def arrive() -> None:
            if link.alive and process.link is link:
                process.core.receive(decode(data, sender="coordinator"), now_ns=self.now)

        self._in_order(link, "down", lambda: process.later(0, arrive))

    def _in_order(self, link: Link, way: str, arrive: Callable[[], None]) -> None:
        link.arrival[way] = max(link.arrival[way], self.now + self.delay(1, 40))
        self.at(link.arrival[way], arrive)

    def break_link(self, link: Link) -> None:
        """The link dies; each end notices by itself, the coordinator only if there is no newer link by then."""
        if not link.alive:
            return
        link.alive = False
        process = self.processes[link.node]

        def coordinator_notices() -> None:
            if self.coordinator is not None and self.links.get(link.node) is link:
                self.coordinator.member_lost(link.node, "silence", now_ns=self.now, incarnation=link.incarnation)
                self.drain()

        self.at(self.now + self.delay(10, 800), coordinator_notices)
        process.later(self.delay(10, 800), lambda: process.disconnected(link))

    # Processes

    def start(self, node: str, log: list[tuple[int, int, bytes]] | None = None) -> None:
        self.processes[node] = process = Process(self, node, first(self.rng.randbytes(CHANCE_BYTES)), log or [])
        process.later(self.delay(1, 200), process.connect)

    def kill(self, node: str) -> None:
        process = self.processes[node]
        process.alive = False
        if process.link is not None:
            self.break_link(process.link)

    def restart(self, node: str) -> None:
        """A new process, from no checkpoint, an old one, or the newest."""
        old = self.processes[node]
        if old.alive and not old.leaving:
            return
        self.kill(node)
        self.start(node, old.log[: self.rng.choice((0, len(old.log) // 2, len(old.log)))])

    def leave(self, node: str) -> None:
        """A process goes: half of them say that their work has ended, although the others mostly go on."""
        process = self.processes[node]
        process.leaving = True
        ended = self.rng.random() < 0.5
        process.later(
            0,
            lambda: process.core.leave("done", finished=len(process.log) if ended else None, now_ns=self.now),
        )

    def start_coordinator(self) -> None:
        if self.coordinator is None:
            self.crash_after = None
            assert History.of(self.records) == self.history
            self.coordinator = CoordinatorCore(self.config, History.of(self.records), now_ns=self.now)
            self.drain()

    def crash_coordinator(self) -> None:
        self.coordinator = None
        self.timer_at = None
        for node in self.names:
            if (link := self.links.pop(node, None)) is not None:
                self.break_link(link)

    def drain(self) -> None:
        """The coordinator's shell; it can die between any two actions."""
        while (core := self.coordinator) is not None:
            if self.crash_after == 0:
                self.crash_coordinator()
                return
            action = core.next_action()
            if action is None:
                break
            if self.crash_after is not None:
                self.crash_after -= 1
            match action:
                case actions.Persist(record):
                    self.persist(record)
                case actions.TellMember(node, incarnation, message):
                    link = self.links.get(node)
                    if link is not None and link.incarnation == incarnation:
                        self.send_down(link, encode(message))
                case actions.DropLink(node, _, reason):
                    # a leaver may still say something when the coordinator has taken it off its list
                    assert self.processes[node].leaving, f"{node} was dropped: {reason}"
                    self.break_link(self.links[node])
                case actions.Note():
                    pass
        at = core.next_timer() if core is not None else None
        if at is not None and at != self.timer_at:
            self.timer_at = at
            self.at(max(self.now, at), lambda: self.on_timer(core))

    def on_timer(self, core: CoordinatorCore | None) -> None:
        if core is None or core is not self.coordinator:
            return
        self.timer_at = None
        core.handle_timer(self.now)
        at = core.next_timer()
        assert at is None or at > self.now, "the timer spins"
        self.drain()

    # Disk, and what must never be seen on it

    def persist(self, record: JournalRecord) -> None:
        if isinstance(record, Proposed):
            assert record.view_id not in self.views, "a view id is used twice"
        elif isinstance(record, InstalledView):
            nodes = list(record.view.nodes)
            there = [node for node in self.base if node in nodes]
            enough = len(there) > len(self.base) / 2 if self.base else len(nodes) >= len(self.names)
            assert enough, "a minority view"
            assert record.view.committed_step == len(self.commits)
            self.same_view(record.view)
            self.installed.append(record.view)
            self.base = nodes
        elif isinstance(record, Left):
            if record.node in self.base:
                self.base.remove(record.node)
            else:  # it says that it holds nothing any more, or that its work has ended
                assert any(record.node in view.nodes for view in self.installed), "a stranger"
        elif isinstance(record, Committed):
            assert record.step == len(self.commits) + 1, "committed out of order"
            assert record.view_id == self.installed[-1].view_id, "committed by a view that is over"
            assert (record.view_id, record.step) not in self.aborted, "committed what a member has aborted"
            assert record.digest == b"%d/%d" % (record.view_id, record.step), "committed a wrong digest"
            self.commits.append((record.step, record.view_id, record.digest))
        self.history = self.history.apply(record)
        self.records.append(record)

    def same_view(self, view: View) -> None:
        assert self.views.setdefault(view.view_id, view) == view, "one id, two views"

    # Faults

    def break_something(self) -> None:
        rng, now = self.rng, self.now
        node, other = rng.sample(self.names, 2)
        repair_at = min(FAULTS_UNTIL, now + self.delay(50, 4000))
        match rng.choice(("link", "cut", "crash", "coordinator", "pair", "stall", "leave", "mute")):
            case "link":
                if (link := self.links.get(node)) is not None:
                    self.break_link(link)
            case "cut":
                self.cut.add(node)
                if (link := self.links.get(node)) is not None:
                    self.break_link(link)
                self.at(repair_at, lambda: self.cut.discard(node))
            case "crash":
                self.kill(node)
                self.at(repair_at, lambda: self.restart(node))
            case "coordinator":
                self.crash_after = rng.randrange(12)
                self.at(repair_at, self.start_coordinator)
            case "pair":
                pair = frozenset((node, other))
                self.broken.add(pair)
                self.at(repair_at, lambda: self.broken.discard(pair))
            case "stall":
                # long enough to miss the deadlines of proposals and votes
                process = self.processes[node]
                process.stalled_until = max(process.stalled_until, min(FAULTS_UNTIL, now + self.delay(50, 8000)))
            case "leave":
                self.leave(node)
                self.at(repair_at, lambda: self.restart(node))
            case "mute":
                pairs = [frozenset((node, third)) for third in self.names if third != node]
                self.broken.update(pairs)
                self.at(repair_at, lambda: self.broken.difference_update(pairs))

    def repair_everything(self) -> None:
        self.crash_after = None
        self.cut.clear()
        self.broken.clear()
        self.start_coordinator()
        for node in self.names:
            self.restart(node)

    def all_together(self) -> bool:
        actives = [self.processes[node].active for node in self.names]
        return (
            actives[0] is not None and len(actives[0].members) == len(self.names) and len(set(map(id_of, actives))) == 1
        )


def id_of(view: View | None) -> int:
    return -1 if view is None else view.view_id


def assert_work_goes_on(world: World) -> None:
    """Within PROGRESS all nodes are in one view; they take steps in it, and hold what the journal holds."""
    deadline = world.now + PROGRESS
    while world.now < deadline and not world.all_together():
        world.run(world.now + 1 * SECOND)
    assert world.all_together(), [world.coordinator, *world.processes.values()]
    before = len(world.commits)
    world.run(world.now + 5 * SECOND)
    assert len(world.commits) >= before + 5
    for node in world.names:
        log = world.processes[node].log
        assert log == world.commits[: len(log)]
        assert len(log) >= len(world.commits) - 1  # the last decision may be on its way


def storm(seed: int) -> None:
    world = World(seed, nodes=2 + seed % 4)
    for _ in range(world.rng.randrange(1, 12)):
        world.at(world.rng.randrange(FAULTS_UNTIL), world.break_something)
    world.run(FAULTS_UNTIL)
    world.repair_everything()
    assert_work_goes_on(world)


@pytest.mark.slow
@pytest.mark.parametrize("block", deep(range(4), range(10)))
def test_nothing_wrong_is_committed_and_work_goes_on_after_the_repair(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        try:
            storm(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.slow
def test_the_coordinator_may_die_between_any_two_actions() -> None:
    """Joins, installations, commits, an abort, a newcomer: killed after each action in turn, then started again."""
    for killed_after in range(100):
        world = World(1000 + killed_after % 5, nodes=3)
        world.quiet = True
        world.crash_after = killed_after
        world.at(1 * SECOND, lambda world=world: world.kill("n2"))
        world.at(2 * SECOND, lambda world=world: world.restart("n2"))
        world.at(4 * SECOND, world.start_coordinator)
        world.run(4 * SECOND)
        assert world.crash_after is None, "it had less to do than this"
        assert_work_goes_on(world)


@pytest.mark.parametrize("seed", some(range(10), 3))
def test_a_pair_that_stays_broken_costs_the_others_little(seed: int) -> None:
    world = World(seed, nodes=4)
    world.quiet = True
    world.run(2 * SECOND)
    world.broken.add(frozenset(("n0", "n2")))
    world.run(60 * SECOND)
    calm = World(seed, nodes=3)
    calm.quiet = True
    calm.run(60 * SECOND)
    assert len(world.commits) > len(calm.commits) / 2
    assert len(world.installed) < 40, "the pair makes views churn"


@pytest.mark.parametrize("seed", some(range(10), 3))
def test_a_member_that_stands_still_with_its_link_up_is_left_out(seed: int) -> None:
    world = World(seed, nodes=3)
    world.quiet = True
    world.run(5 * SECOND)
    world.processes["n1"].stalled_until = 60 * SECOND
    world.run(12 * SECOND)
    before = len(world.commits)
    assert world.installed[-1].nodes == ("n0", "n2")
    world.run(60 * SECOND)
    assert len(world.commits) > before + 50
    assert_work_goes_on(world)


@pytest.mark.parametrize("seed", some(range(10), 3))
def test_a_cut_off_member_makes_no_step_and_learns_what_became_of_its_vote(seed: int) -> None:
    """REQUIREMENTS S12: the partitioned rank makes no progress, the others do."""
    world = World(seed, nodes=3)
    world.quiet = True
    world.run(5 * SECOND)
    process = world.processes["n0"]
    world.cut.add("n0")
    world.break_link(world.links["n0"])
    world.run(6 * SECOND)
    assert process.active is None
    held = len(process.log)
    before = len(world.commits)
    world.run(30 * SECOND)
    assert len(process.log) == held
    assert len(world.commits) > before + 50
    world.cut.clear()
    assert_work_goes_on(world)
    assert process.core.doubt is None
