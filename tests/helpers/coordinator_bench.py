"""A coordinator's core on a bench: its journal and its clock are lists and numbers, and its nodes are puppets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from quicoll.membership import messages as m
from quicoll.membership.coordinator import actions as a
from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.coordinator.core import CoordinatorCore
from quicoll.membership.coordinator.history import History, JournalRecord

if TYPE_CHECKING:
    from quicoll.membership.view import View

MS = 1_000_000
SECOND = 1000 * MS
Message = TypeVar("Message", bound=m.CoordinatorMessage)


class Bench:
    """A coordinator, its journal and its clock; what it told each node is kept until it is read."""

    def __init__(self, world_size: int, *, records: list[JournalRecord] | None = None, **config: Any) -> None:
        self.now = 0
        self.records: list[JournalRecord] = list(records or [])
        self.inbox: dict[str, list[m.CoordinatorMessage]] = {}
        self.carried_out: list[a.CoordinatorAction] = []
        self.incarnations: dict[str, int] = {}
        self.config = CoordinatorConfig(**{"world_size": world_size, "seed": 7, **config})
        self.core = CoordinatorCore(self.config, History.of(self.records), now_ns=0)
        self.drain()

    def drain(self) -> None:
        while (action := self.core.next_action()) is not None:
            self.carried_out.append(action)
            if isinstance(action, a.Persist):
                self.records.append(action.record)
            elif isinstance(action, a.TellMember):
                self.inbox.setdefault(action.node, []).append(action.message)
        at = self.core.next_timer()
        assert at is None or at > self.now

    def say(self, node: str, message: m.MemberMessage) -> None:
        self.core.receive(node, message, now_ns=self.now, incarnation=self.incarnations.get(node))
        self.drain()

    def join(self, *nodes: str, incarnation: int | None = None, **fields: Any) -> None:
        for node in nodes:
            self.incarnations[node] = incarnation if incarnation is not None else self.incarnations.get(node, 1)
            self.say(node, m.Join(incarnation=self.incarnations[node], **fields))

    def lose(self, node: str) -> None:
        self.core.member_lost(node, "silence", now_ns=self.now)
        self.drain()

    def saw(self, node: str, address: tuple[str, int]) -> None:
        self.core.saw(node, address, now_ns=self.now)
        self.drain()

    def advance(self, nanoseconds: int) -> None:
        """Time passes; every timer is served at its very moment."""
        until = self.now + nanoseconds
        while (at := self.core.next_timer()) is not None and at <= until:
            self.now = at
            self.core.handle_timer(at)
            self.drain()
        self.now = until

    def told(self, node: str, kind: type[Message]) -> Message:
        """The last message told to the node, which is of this kind; everything told to it is then forgotten."""
        message = self.inbox.pop(node, [None])[-1]
        assert isinstance(message, kind), message
        return message

    def all_told(self, *nodes: str) -> dict[str, list[type[m.CoordinatorMessage]]]:
        found = {node: [type(message) for message in self.inbox.pop(node, [])] for node in nodes}
        assert not self.inbox
        return found

    def proposed(self) -> View:
        """The last view that was proposed."""
        views = [action.event.view for action in self.notes(a.ViewProposed)]
        return views[-1]

    def notes(self, kind: type[Any]) -> list[Any]:
        return [action for action in self.carried_out if isinstance(action, a.Note) and isinstance(action.event, kind)]

    def confirm(self, *nodes: str) -> View:
        view = self.proposed()
        for node in nodes or view.nodes:
            self.say(node, m.Confirm(view_id=view.view_id))
        return view

    def installed(self, *nodes: str, **fields: Any) -> View:
        self.join(*nodes, **fields)
        view = self.confirm()
        assert self.core.view == view
        self.inbox.clear()
        return view

    @property
    def view_id(self) -> int:
        assert self.core.view is not None
        return self.core.view.view_id

    @property
    def step(self) -> int:
        return self.core.history.committed_step + 1

    def begin(self, *nodes: str) -> None:
        for node in nodes:
            self.say(node, m.BeginStep(view_id=self.view_id, step=self.step))

    def vote(self, *nodes: str, digest: bytes = b"d") -> None:
        for node in nodes:
            self.say(node, m.Vote(view_id=self.view_id, step=self.step, ok=True, digest=digest))

    def commit(self, *nodes: str) -> None:
        """Every member takes one step."""
        self.begin(*nodes)
        self.vote(*nodes)

    def differ(self) -> None:
        """All members have different digests, so that the view ends, and nobody is more to blame than the others."""
        assert self.core.view is not None
        for node in self.core.view.nodes:
            self.vote(node, digest=node.encode())


def letters(count: int) -> list[str]:
    return [chr(ord("a") + index) for index in range(count)]


def declined(bench: Bench, edges: dict[str, str]) -> None:
    """Every member of the last proposal answers: who is in `edges` cannot reach those letters, the others confirm."""
    view = bench.proposed()
    for node in view.nodes:
        if node in edges:
            bench.say(node, m.Decline(view_id=view.view_id, unreachable=tuple(edges[node]), reason="no answer"))
        else:
            bench.say(node, m.Confirm(view_id=view.view_id))


def told_end(bench: Bench, node: str) -> list[m.Decide | m.Aborted]:
    """What the node was told of the end of a step or view, and has not read."""
    return [message for message in bench.inbox.get(node, []) if isinstance(message, m.Decide | m.Aborted)]
