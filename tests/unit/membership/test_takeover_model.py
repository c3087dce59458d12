"""Every interleaving of view, commit and take-over: three members, two coordinators, one journal.

A breadth-first search over all states of a small model. What the journal means is the real `History`; whether a member
is answered by a leader that may be deposed is the real `rests_on_journal`; a quorum is the real `has_quorum`. The rest
is what the two protocols do, one action at a time:

    a coordinator takes the lease       at any moment: the model has no clock, so no clock can be wrong in it
    it crashes, or its append fails     its memory is gone; the record may have been written all the same
    a leader forms a view, decides      from the members that are linked to it, by an append that the database judges
    a member votes, loses its link      and joins either coordinator again, with the step that it is in doubt of

Links may be lost at any moment, and with them whatever was under way on them; so a message is modelled by what its
receiver may read of its sender while they are linked.

Invariants, looked at in every state: a step is committed once; a member applies what is in the journal and nothing
else; a member that is told "not committed" is told so for good; nobody is refused by a leader of the past.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from quicoll.errors import LocalError
from quicoll.membership import messages as m
from quicoll.membership.coordinator.actions import TellMember, rests_on_journal
from quicoll.membership.coordinator.history import Committed, History, InstalledView, JournalRecord, Proposed, Seeded
from quicoll.membership.view import Member, View, has_quorum

MEMBERS = 3
STEPS = 2
TAKINGS = 3
DIGEST = b"d"

Entry = tuple[str | int, ...]
"""A record, as a value that can be looked up."""


@dataclass(frozen=True, slots=True)
class Node:
    """A member: the coordinator that it is linked to (None: none), whether that has welcomed it, what it holds."""

    link: int | None = None
    welcomed: bool = False
    view: int = 0  # that it acts in, 0: none
    voted: int = 0  # the step of its vote in that view, 0: none
    doubt: tuple[int, int] | None = None
    applied: int = 0
    denied: tuple[tuple[int, int], ...] = ()  # (view, step) that it was told are not committed


@dataclass(frozen=True, slots=True)
class Leader:
    """A coordinator's memory: its token (0: it stands by) and how much of the journal it knows."""

    token: int = 0
    known: int = 0  # records that it has read or written
    views: tuple[int, ...] = ()  # that it has proposed or installed itself
    ended: tuple[int, ...] = ()  # of these, which it has given up


@dataclass(frozen=True, slots=True)
class State:
    token: int = 0
    entries: tuple[Entry, ...] = ()
    leaders: tuple[Leader, Leader] = (Leader(), Leader())
    nodes: tuple[Node, ...] = (Node(),) * MEMBERS

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


class Explorer:
    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.broken: list[str] = []

    def run(self, most: int) -> int:
        """Visit all states, `most` of them at most; return how many there are."""
        first = State()
        seen = {first}
        todo = deque([first])
        while todo and not self.broken:
            for state in self.after(todo.popleft()):
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
            for view, step in node.denied:
                if history.committed(view, step):
                    self.broken.append(f"step {step} of view {view} is committed, and was said not to be")

    def after(self, state: State) -> Iterator[State]:
        for at in (0, 1):
            yield from self._taken(state, at)
            if state.leaders[at].token:
                yield ended(state, at)  # a crash
                yield from self._formed(state, at)
                yield from self._decided(state, at)
        for number in range(MEMBERS):
            yield from self._member(state, number)

    def _taken(self, state: State, at: int) -> Iterator[State]:
        if state.token < TAKINGS and not state.leaders[at].token:
            taken = replace(state, token=state.token + 1)
            leader = Leader(token=taken.token, known=len(state.entries))
            yield led(taken, at, leader)
            if not state.entries:
                yield from self._append(led(taken, at, leader), at, ("seeded",))

    def _append(self, state: State, at: int, entry: Entry) -> Iterator[State]:
        """The states after a leader's append: it went in, or was refused; or went in, and its answer was lost."""
        leader = state.leaders[at]
        if self.rules.fenced and leader.token != state.token:
            yield ended(state, at)
            return
        try:
            folded((*state.entries, entry))
        except LocalError as error:  # the journal holds what contradicts the record: without a fence that can be
            self.broken.append(str(error))
            return
        written = replace(state, entries=(*state.entries, entry))
        yield led(written, at, replace(leader, known=len(written.entries)))
        yield ended(written, at)

    def _formed(self, state: State, at: int) -> Iterator[State]:
        """A leader proposes a view of the members that it has welcomed, and installs it: two appends, one after the
        other, between which anything can happen."""
        leader = state.leaders[at]
        history = state.history(leader.known)
        if history.seed is None:
            return
        here = [number for number, node in enumerate(state.nodes) if node.link == at and node.welcomed]
        names = [str(number) for number in here]
        everybody = [str(number) for number in range(MEMBERS)]
        if leader.views and leader.views[-1] not in leader.ended and leader.views[-1] == history.last_view_id:
            view_id = leader.views[-1]
            installed = history.view is not None and history.view.view_id == view_id
            if not installed and has_quorum(names, history.base or everybody):
                joined = all(state.nodes[number].view == 0 for number in here)
                if joined and any(state.nodes[number].applied >= history.committed_step for number in here):
                    entry = ("installed", view_id, "".join(names), history.committed_step, history.committed_view)
                    yield from self._append(state, at, entry)
            yield led(state, at, replace(leader, ended=(*leader.ended, view_id)))  # a member is lost, a vote is late
            return
        if history.last_view_id < TAKINGS and has_quorum(names, history.base or everybody):
            proposed = led(state, at, replace(leader, views=(*leader.views, history.last_view_id + 1)))
            yield from self._append(proposed, at, ("proposed", history.last_view_id + 1))

    def _decided(self, state: State, at: int) -> Iterator[State]:
        """A leader that has all votes of its view commits the step."""
        leader = state.leaders[at]
        history = state.history(leader.known)
        view = history.view
        if view is None or view.view_id not in leader.views or view.view_id in leader.ended:
            return
        step = history.committed_step + 1
        nodes = [state.nodes[int(name)] for name in view.nodes]
        if step <= STEPS and all(n.link == at and n.view == view.view_id and n.voted == step for n in nodes):
            if not self.rules.written_first:
                ahead = tuple(
                    replace(n, voted=0, applied=step) if n.link == at and n.voted == step else n for n in state.nodes
                )
                yield replace(state, nodes=ahead)
            yield from self._append(state, at, ("committed", step, view.view_id))

    def _member(self, state: State, number: int) -> Iterator[State]:
        node = state.nodes[number]
        if node.link is None:
            for at in (0, 1):
                yield with_node(state, number, replace(node, link=at))
            return
        in_doubt = (node.view, node.voted) if node.voted else node.doubt
        yield with_node(state, number, replace(node, link=None, welcomed=False, view=0, voted=0, doubt=in_doubt))
        leader = state.leaders[node.link]
        if not leader.token:
            return
        history = state.history(leader.known)
        if not node.welcomed:
            yield from self._welcomed(state, number, leader, history)
            return
        view = history.view
        current = view is not None and view.view_id in leader.views and view.view_id not in leader.ended
        if view is not None and current and node.view == 0 and str(number) in view.nodes:
            # told of the installation; whoever is behind has got the state of the view's last step from the others
            yield with_node(state, number, replace(node, view=view.view_id, applied=history.committed_step))
        elif node.view and node.view in leader.ended:
            # told that the view is over: only this leader could have committed a step of it, and it did not
            committed = bool(node.voted) and history.committed(node.view, node.voted)
            denied = told(node, (node.view, node.voted)) if node.voted and not committed else node.denied
            applied = node.voted if committed else node.applied
            yield with_node(state, number, replace(node, view=0, voted=0, applied=applied, denied=denied))
        elif node.view and node.voted and history.committed(node.view, node.voted):
            yield with_node(state, number, replace(node, voted=0, applied=node.voted))
        elif node.view and not node.voted and node.applied == history.committed_step < STEPS:
            yield with_node(state, number, replace(node, voted=node.applied + 1))

    def _welcomed(self, state: State, number: int, leader: Leader, history: History) -> Iterator[State]:
        """The answer to a Join, which rests on the journal."""
        node = state.nodes[number]
        answer = TellMember(str(number), 1, m.Welcome(seed=1, committed_step=history.committed_step))
        if self.rules.confirmed and rests_on_journal(answer) and leader.token != state.token:
            yield ended(state, 0 if leader is state.leaders[0] else 1)
            return
        if node.applied > history.committed_step or (node.doubt or (0, 0))[0] > history.last_view_id:
            self.broken.append("a member is refused, for good, by a leader of the past")
            return
        applied, denied = node.applied, node.denied
        if node.doubt is not None:
            if history.committed(*node.doubt) and self.rules.settled:
                applied = max(applied, node.doubt[1])
            else:
                denied = told(node, node.doubt)
        welcomed = replace(node, welcomed=True, doubt=None, applied=applied, denied=denied)
        # who was in a view of this leader and joins anew has ended it
        views = tuple(view for view in leader.views if view not in leader.ended)
        after = with_node(state, number, welcomed)
        at = 0 if leader is state.leaders[0] else 1
        yield led(after, at, replace(leader, ended=(*leader.ended, *views)))


def told(node: Node, vote: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Return the votes of which a node was told that they are not committed, with this one."""
    return tuple(sorted({*node.denied, vote}))


def led(state: State, at: int, leader: Leader) -> State:
    leaders = (leader, state.leaders[1]) if at == 0 else (state.leaders[0], leader)
    return replace(state, leaders=leaders)


def ended(state: State, at: int) -> State:
    """A coordinator's process ends: its memory and its links are gone; another stands by in its place."""
    nodes = []
    for node in state.nodes:
        if node.link == at:
            in_doubt = (node.view, node.voted) if node.voted else node.doubt
            node = replace(node, link=None, welcomed=False, view=0, voted=0, doubt=in_doubt)
        nodes.append(node)
    return led(replace(state, nodes=tuple(nodes)), at, Leader())


def with_node(state: State, number: int, node: Node) -> State:
    return replace(state, nodes=(*state.nodes[:number], node, *state.nodes[number + 1 :]))


def test_no_interleaving_loses_a_commit_or_lets_a_deposed_leader_decide() -> None:
    explorer = Explorer(Rules())
    states = explorer.run(400_000)
    assert explorer.broken == []
    assert states > 1000


@pytest.mark.parametrize("rule", ["fenced", "confirmed", "written_first", "settled"])
def test_without_any_one_of_the_rules_the_search_finds_a_breach(rule: str) -> None:
    explorer = Explorer(replace(Rules(), **{rule: False}))
    explorer.run(400_000)
    assert explorer.broken
