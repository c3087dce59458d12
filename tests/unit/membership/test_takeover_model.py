"""Every interleaving of view, commit and take-over: three members, two or three coordinators, one journal.

A breadth-first search over all states of a small model. What the journal means is the real `History`; whether a member
is answered by a leader that may be deposed is the real `rests_on_journal`; a quorum is the real `has_quorum`. The rest
is what the two protocols do, one action at a time:

    a coordinator takes the lease       at any moment: the model has no clock, so no clock can be wrong in it; and it
                                        asks for no reason, so also from a leader that lives and leads no view
    it crashes, or its append fails     its memory is gone; the record may have been written all the same
    it gives an append up               which stays under way, and arrives at any later moment, or never. Its process
                                        stands by meanwhile, and may lead again when it arrives
    a leader forms a view, decides      from the members that are linked to it, by an append that the database judges
    a member votes, loses its link      and joins either coordinator again, with the step that it is in doubt of

Links may be lost at any moment, and with them whatever was under way on them; so a message is modelled by what its
receiver may read of its sender while they are linked.

Invariants, looked at in every state: a step is committed once; a member applies what is in the journal and nothing
else; a member that is told "not committed" is told so for good; nobody is refused by a leader of the past, nor by one
that leads again and remembers what it knew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from depth import deep

from quicoll.errors import LocalError
from quicoll.membership import messages as m
from quicoll.membership.coordinator.actions import TellMember, rests_on_journal
from quicoll.membership.coordinator.history import Committed, History, InstalledView, JournalRecord, Proposed, Seeded
from quicoll.membership.view import Member, View, has_quorum

MEMBERS = 3
DIGEST = b"d"

Entry = tuple[str | int, ...]
"""A record, as a value that can be looked up."""


class Node(NamedTuple):
    """A member: the leader that it is linked to and welcomed by (None: none), what it holds."""

    link: int | None = None
    view: int = 0  # that it acts in, 0: none
    voted: int = 0  # the step of its vote in that view, 0: none
    doubt: tuple[int, int] | None = None
    applied: int = 0


class UnderWay(NamedTuple):
    """An append that its coordinator has given up: whose it is (-1: that makes no difference), and what it bears."""

    at: int
    token: int
    number: int
    entry: Entry


class Leader(NamedTuple):
    """A coordinator's memory: its token (0: it stands by) and how much of the journal it knows."""

    token: int = 0
    known: int = 0  # records that it has read or written
    view: int = 0  # that it has proposed or installed itself and has not given up, 0: none


class State(NamedTuple):
    token: int = 0
    entries: tuple[Entry, ...] = (("seeded",),)
    leaders: tuple[Leader, ...] = ()
    nodes: tuple[Node, ...] = (Node(),) * MEMBERS
    denied: tuple[tuple[int, int], ...] = ()  # (view, step) that somebody was told are not committed
    under_way: UnderWay | None = None

    def history(self, known: int | None = None) -> History:
        return folded(self.entries[:known])


_folds: dict[tuple[Entry, ...], History] = {}


def folded(entries: tuple[Entry, ...]) -> History:
    if entries not in _folds:
        _folds[entries] = folded(entries[:-1]).apply(record_of(entries[-1])) if entries else History()
    return _folds[entries]


def record_of(entry: Entry) -> JournalRecord:
    match entry:
        case ("seeded",):
            return Seeded(1)
        case ("proposed", int(view_id)):
            return Proposed(view_id)
        case ("committed", int(step), int(view_id)):
            return Committed(step, view_id, DIGEST)
        case ("installed", int(view_id), str(nodes), int(step), int(by)):
            members = tuple(
                Member(rank=rank, node=node, incarnation=1, addresses=(), committed_step=step)
                for rank, node in enumerate(nodes)
            )
            return InstalledView(View(view_id=view_id, members=members, seed=1, committed_step=step, committed_view=by))
    raise AssertionError(entry)


@dataclass(frozen=True, slots=True)
class Rules:
    """What protects the journal; each can be left out, to see that the search would find it."""

    fenced: bool = True  # an append names its token, and the database compares it
    confirmed: bool = True  # what rests on the journal is told after the database has confirmed the token
    written_first: bool = True  # a decision is told after its append
    settled: bool = True  # a doubt is answered from the journal
    own_token: bool = True  # an append bears the token of who has sent it, not the one that its process has by now
    read_anew: bool = True  # who leads again reads the journal, and forgets what it knew


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many steps, views and takings of the lease there are: each more is several times as many states."""

    steps: int = 1
    views: int = 2
    takings: int = 2
    coordinators: int = 2
    late: bool = False  # whether an append may be given up, and arrive later


LATE = Bounds(late=True)
THREE = Bounds(views=1, takings=3, coordinators=3)


class Explorer:
    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.rules = rules
        self.bounds = bounds
        self.broken: list[str] = []

    def run(self, most: int) -> int:
        """Visit all states, `most` of them at most; return how many there are."""
        first = State(leaders=(Leader(),) * self.bounds.coordinators)
        seen = {first}
        todo = deque([first])
        while todo and not self.broken:
            for state in map(canonical, self.after(todo.popleft())):
                if state not in seen:
                    assert len(seen) < most, "the model has grown"
                    seen.add(state)
                    todo.append(state)
                    self.check(state)
        return len(seen)

    def check(self, state: State) -> None:
        history = state.history()  # which refuses a step that is committed twice, and a view id used twice
        for node in state.nodes:
            if node.applied > history.committed_step:
                self.broken.append(f"step {node.applied} is applied, the journal ends at {history.committed_step}")
        for view, step in state.denied:
            if history.committed(view, step):
                self.broken.append(f"step {step} of view {view} is committed, and was said not to be")

    def after(self, state: State) -> Iterator[State]:
        for at in range(len(state.leaders)):
            yield from self._taken(state, at)
            if state.leaders[at].token:
                yield ended(state, at)  # a crash
                yield from self._formed(state, at)
                yield from self._decided(state, at)
        for number in range(MEMBERS):
            yield from self._member(state, number)
        if state.under_way is not None:
            yield self._arrived(state, state.under_way)

    def _taken(self, state: State, at: int) -> Iterator[State]:
        if state.token < self.bounds.takings and not state.leaders[at].token:
            taken = state._replace(token=state.token + 1)
            known = state.leaders[at].known  # of an earlier leadership, where that is kept
            leader = Leader(token=taken.token, known=known or len(state.entries))
            yield led(taken, at, leader)

    def _append(self, state: State, at: int, entry: Entry) -> Iterator[State]:
        """The states after a leader's append: given up, taken in, or refused. A lost answer is a crash after it."""
        leader = state.leaders[at]
        if self.bounds.late and state.under_way is None:
            whose = -1 if self.rules.own_token else at
            sent = UnderWay(whose, leader.token, leader.known + 1, entry)
            yield self._stood_by(state._replace(under_way=sent), at)
        written = self._carried_out(state, leader.token, leader.known + 1, entry)
        if written is None:
            yield self._stood_by(state, at)
        else:
            yield led(written, at, leader._replace(known=len(written.entries)))

    def _arrived(self, state: State, sent: UnderWay) -> State:
        """The state after an append that was given up has reached the database. Nobody hears its answer."""
        token = sent.token if sent.at < 0 else state.leaders[sent.at].token
        written = self._carried_out(state, token, sent.number, sent.entry)
        return (state if written is None else written)._replace(under_way=None)

    def _carried_out(self, state: State, token: int, number: int, entry: Entry) -> State | None:
        """The database's part: the record is taken, or refused (None) for its token or its number."""
        if (self.rules.fenced and token != state.token) or number != len(state.entries) + 1:
            return None
        try:
            folded((*state.entries, entry))
        except LocalError as error:  # the journal holds what contradicts the record: without a fence that can be
            self.broken.append(str(error))
            return None
        return state._replace(entries=(*state.entries, entry))

    def _stood_by(self, state: State, at: int) -> State:
        """A leader loses the lead: its process stands by, and its links are gone."""
        known = 0 if self.rules.read_anew else state.leaders[at].known
        return led(ended(state, at), at, Leader(known=known))

    def _formed(self, state: State, at: int) -> Iterator[State]:
        """A leader proposes a view of the members that it has welcomed, and installs it: two appends, one after the
        other, between which anything can happen."""
        leader = state.leaders[at]
        history = state.history(leader.known)
        here = [number for number, node in enumerate(state.nodes) if node.link == at]
        names = [str(number) for number in here]
        everybody = [str(number) for number in range(MEMBERS)]
        if leader.view:
            installed = history.view is not None and history.view.view_id == leader.view
            if not installed and has_quorum(names, history.base or everybody):
                joined = all(state.nodes[number].view == 0 for number in here)
                if joined and any(state.nodes[number].applied >= history.committed_step for number in here):
                    entry = ("installed", leader.view, "".join(names), history.committed_step, history.committed_view)
                    yield from self._append(state, at, entry)
            yield led(state, at, leader._replace(view=0))  # a member is lost, a vote is late
            return
        if history.last_view_id < self.bounds.views and has_quorum(names, history.base or everybody):
            proposed = led(state, at, leader._replace(view=history.last_view_id + 1))
            yield from self._append(proposed, at, ("proposed", history.last_view_id + 1))

    def _decided(self, state: State, at: int) -> Iterator[State]:
        """A leader that has all votes of its view commits the step."""
        leader = state.leaders[at]
        history = state.history(leader.known)
        view = history.view
        if view is None or view.view_id != leader.view:
            return
        step = history.committed_step + 1
        nodes = [state.nodes[int(name)] for name in view.nodes]
        if step <= self.bounds.steps and all(
            n.link == at and n.view == view.view_id and n.voted == step for n in nodes
        ):
            if not self.rules.written_first:
                ahead = tuple(
                    n._replace(voted=0, applied=step) if n.link == at and n.voted == step else n for n in state.nodes
                )
                yield state._replace(nodes=ahead)
            yield from self._append(state, at, ("committed", step, view.view_id))

    def _member(self, state: State, number: int) -> Iterator[State]:
        node = state.nodes[number]
        if node.link is None:
            for at in range(len(state.leaders)):
                if state.leaders[at].token:
                    yield from self._welcomed(state, number, at)
            return
        in_doubt = (node.view, node.voted) if node.voted else node.doubt
        yield with_node(state, number, node._replace(link=None, view=0, voted=0, doubt=in_doubt))
        leader = state.leaders[node.link]
        history = state.history(leader.known)
        view = history.view
        if view is not None and view.view_id == leader.view and node.view == 0 and str(number) in view.nodes:
            # told of the installation; whoever is behind has got the state of the view's last step from the others
            yield with_node(state, number, node._replace(view=view.view_id, applied=history.committed_step))
        elif node.view and node.view != leader.view:
            # told that the view is over: only this leader could have committed a step of it, and it did not
            committed = bool(node.voted) and history.committed(node.view, node.voted)
            after = state if committed or not node.voted else denying(state, (node.view, node.voted))
            applied = node.voted if committed else node.applied
            yield with_node(after, number, node._replace(view=0, voted=0, applied=applied))
        elif node.view and node.voted and history.committed(node.view, node.voted):
            yield with_node(state, number, node._replace(voted=0, applied=node.voted))
        elif node.view and not node.voted and node.applied == history.committed_step < self.bounds.steps:
            yield with_node(state, number, node._replace(voted=node.applied + 1))

    def _welcomed(self, state: State, number: int, at: int) -> Iterator[State]:
        """A Join and its answer, which rests on the journal. What the leader knows is what it knows as it answers."""
        node, leader = state.nodes[number], state.leaders[at]
        history = state.history(leader.known)
        answer = TellMember(str(number), 1, m.Welcome(seed=1, committed_step=history.committed_step))
        if self.rules.confirmed and rests_on_journal(answer) and leader.token != state.token:
            yield self._stood_by(state, at)
            return
        if node.applied > history.committed_step or (node.doubt or (0, 0))[0] > history.last_view_id:
            self.broken.append("a member is refused, for good, by a leader of the past")
            return
        applied = node.applied
        if node.doubt is not None:
            if history.committed(*node.doubt) and self.rules.settled:
                applied = max(applied, node.doubt[1])
            else:
                state = denying(state, node.doubt)
        after = with_node(state, number, node._replace(link=at, doubt=None, applied=applied))
        yield led(after, at, leader._replace(view=0))  # who was in a view of this leader and joins anew has ended it


def canonical(state: State) -> State:
    """Return the one of all states that differ from this only in who is called what."""
    nodes, leaders, entries, sent = state.nodes, state.leaders, state.entries, state.under_way
    turn = sorted(range(len(leaders)), key=lambda at: -leaders[at].token)
    if turn != sorted(turn):
        leaders = tuple(leaders[at] for at in turn)
        nodes = tuple(node if node.link is None else node._replace(link=turn.index(node.link)) for node in nodes)
        if sent is not None and sent.at >= 0:
            sent = sent._replace(at=turn.index(sent.at))
    every = entries if sent is None else (*entries, sent.entry)
    views = [str(entry[2]) for entry in every if entry[0] == "installed"]

    def features(number: int) -> tuple[object, ...]:
        """Return all that there is about a member: two that have these in common are the same."""
        node = nodes[number]
        link = -1 if node.link is None else node.link
        held = (link, node.view, node.voted, node.doubt or (0, 0), node.applied)
        return (*held, [str(number) in view for view in views])

    order = sorted(range(len(nodes)), key=features)
    if order != sorted(order):
        names = {str(number): str(at) for at, number in enumerate(order)}
        nodes = tuple(nodes[number] for number in order)
        entries = tuple(renamed(entry, names) for entry in entries)
        sent = None if sent is None else sent._replace(entry=renamed(sent.entry, names))
    return State(state.token, entries, leaders, nodes, state.denied, sent)


def renamed(entry: Entry, names: dict[str, str]) -> Entry:
    """Return a record with other names for its nodes."""
    if entry[0] != "installed":
        return entry
    return (*entry[:2], "".join(sorted(names[name] for name in str(entry[2]))), *entry[3:])


def denying(state: State, vote: tuple[int, int]) -> State:
    """Return the state after somebody was told that its vote for this (view, step) did not end in a commit."""
    return state._replace(denied=tuple(sorted({*state.denied, vote})))


def led(state: State, at: int, leader: Leader) -> State:
    return state._replace(leaders=(*state.leaders[:at], leader, *state.leaders[at + 1 :]))


def ended(state: State, at: int) -> State:
    """A coordinator's process ends: its memory and its links are gone; another stands by in its place."""
    nodes = []
    for node in state.nodes:
        if node.link == at:
            in_doubt = (node.view, node.voted) if node.voted else node.doubt
            node = node._replace(link=None, view=0, voted=0, doubt=in_doubt)
        nodes.append(node)
    return led(state._replace(nodes=tuple(nodes)), at, Leader())


def with_node(state: State, number: int, node: Node) -> State:
    return state._replace(nodes=(*state.nodes[:number], node, *state.nodes[number + 1 :]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "bounds", deep([Bounds(steps=2), THREE, LATE], [Bounds(steps=2), THREE, LATE, Bounds(takings=3)]), ids=repr
)
def test_no_interleaving_loses_a_commit_or_lets_a_deposed_leader_decide(bounds: Bounds) -> None:
    explorer = Explorer(Rules(), bounds)
    states = explorer.run(400_000)
    assert explorer.broken == []
    assert states > 5_000


@pytest.mark.parametrize("rule", ["fenced", "confirmed", "written_first", "settled", "own_token", "read_anew"])
def test_without_any_one_of_the_rules_the_search_finds_a_breach(rule: str) -> None:
    explorer = Explorer(replace(Rules(), **{rule: False}), LATE)
    explorer.run(50_000)
    assert explorer.broken
