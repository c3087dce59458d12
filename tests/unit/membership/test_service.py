"""The coordinator's service on a loop whose time is set by hand: what each action of the core becomes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quicoll import Event, LocalError
from quicoll.errors import JournalError
from quicoll.membership import messages as m
from quicoll.membership import service as module
from quicoll.membership.coordinator.history import Proposed, Seeded
from quicoll.membership.coordinator.lease import Following
from quicoll.membership.journal import LeaseLost, MemoryJournal
from quicoll.membership.operators import (
    LOOK_AGE_NS,
    OPERATOR,
    READER,
    Inquire,
    Look,
    OperatorAnswer,
    OperatorMessage,
    Scale,
    StandsBy,
    decode_answer,
    encode_operation,
)
from quicoll.membership.service import CoordinatorService, coordinator_config
from quicoll.membership.status import JobStatus
from quicoll.observability.events import Observers
from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.errors import LinkLost
from quicoll_transport.link.core import LinkStats
from quicoll_transport.security.access import Access
from quicoll_transport.security.identity import Identity


class Loop:
    """A loop's clock and timers; time passes in `pass_to`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[SimpleNamespace] = []

    def time(self) -> float:
        return self.now

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def call_at(self, at: float, callback: Callable[..., None], *arguments: object) -> SimpleNamespace:
        timer = SimpleNamespace(at=at, run=lambda: callback(*arguments))
        timer.cancel = lambda: timer in self.timers and self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def call_later(self, seconds: float, callback: Callable[..., None], *arguments: object) -> SimpleNamespace:
        return self.call_at(self.now + seconds, callback, *arguments)

    def pass_to(self, at: float) -> None:
        while due := sorted((each for each in self.timers if each.at <= at), key=lambda each: each.at):
            self.now = due[0].at
            self.timers.remove(due[0])
            due[0].run()
        self.now = at


NUMBERS = itertools.count(1)


class Link:
    """A link to a node as the service sees it."""

    def __init__(self, node: str, incarnation: int = 1) -> None:
        self.node = node
        self.identity = Identity("job", "worker", node)
        self.remote_incarnation = incarnation
        self.number = next(NUMBERS)
        self.ended = False
        self.cause = ""
        self.told: list[m.CoordinatorMessage] = []
        self.closed: list[str] = []
        self.proved_address: tuple[Any, ...] | None = None
        self.rtt_ns: int | None = None
        self.silent_for = 0.0
        self.suspect = False
        self.stats = LinkStats()

    def listen(self, on_app: Callable[[Any, bytes], None], on_state: Callable[[Any], None]) -> None:
        self.on_app, self.on_state = on_app, on_state

    def send_app(self, data: bytes) -> None:
        if self.ended:
            raise LinkLost("gone", peer=self.node)
        self.told.append(m.decode(data, sender="coordinator"))

    def close(self, reason: str) -> None:
        self.closed.append(reason)

    def say(self, message: m.MemberMessage) -> None:
        self.on_app(self, m.encode(message))

    def end(self, cause: str) -> None:
        self.ended, self.cause = True, cause
        self.on_state(self)


class FakeEndpoint:
    """Takes what an Endpoint takes."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.address = ("127.0.0.1", 4433)
        self.rotated: list[Any] = []
        self.links: dict[int, Link] = {}
        self.closed = ""

    def rotate(self, credentials: Any) -> None:
        self.rotated.append(credentials)

    def deny(self, fingerprint: str) -> None:
        self.given["authorize"].deny(fingerprint)

    async def aclose(self, *, reason: str) -> None:
        self.closed = reason


class Bench:
    """A service for `world_size` members, its journal, and the events it told."""

    def __init__(
        self,
        world_size: int = 1,
        journal: MemoryJournal | None = None,
        *,
        standby: bool = False,
        relay: str = "",
        **options: Any,
    ) -> None:
        self.loop = Loop()
        self.journal = journal or MemoryJournal()
        self.events: list[Event] = []
        self.service = CoordinatorService(
            credentials=SimpleNamespace(),
            io=SimpleNamespace(),
            journal=None if standby else self.journal,
            config=coordinator_config(world_size, 1.0, seed=7, relay=relay),
            transport=EndpointConfig(),
            loop=self.loop,
            incarnation=1,
            observers=Observers("coordinator", lambda: round(self.loop.now * 1e9), self.events.append),
            **options,
        )
        self.endpoint: Any = self.service.endpoint

    def link(self, node: str, incarnation: int = 1) -> Link:
        link = Link(node, incarnation)
        self.come(link)
        return link

    def come(self, link: Link) -> None:
        """A link has come up; the endpoint has it until it ends."""
        self.endpoint.links[link.number] = link
        self.endpoint.given["on_link"](link)

    def joined(self, node: str, incarnation: int = 1) -> Link:
        link = self.link(node, incarnation)
        link.say(m.Join(incarnation=incarnation))
        return link

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@pytest.fixture(autouse=True)
def endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Endpoint", FakeEndpoint)


async def test_a_view_is_formed_written_and_told_to_its_member() -> None:
    bench = Bench()
    a = bench.joined("a")
    assert [type(each) for each in a.told] == [m.Welcome, m.Propose]
    assert isinstance(a.told[1], m.Propose)
    view = a.told[1].view
    a.say(m.Confirm(view_id=view.view_id))
    assert a.told[2] == m.Install(view_id=view.view_id)
    assert bench.journal.load().view == view
    assert bench.kinds() == ["listening", "held", "node_joined", "view_proposed", "view_installed"]
    assert bench.events[-1].fields == {"view": view.view_id, "world_size": 1, "nodes": ["a"]}


async def test_only_workers_come_in_and_none_that_is_denied() -> None:
    policy = Bench(denied=("1" * 64,)).endpoint.given["authorize"]
    assert policy(SimpleNamespace(role="worker", node="a")) is None
    assert policy(SimpleNamespace(role="coordinator", node="a")) is not None
    assert policy.denied == ("1" * 64,)


async def test_a_message_that_cannot_be_read_ends_its_link_and_tells_the_core_nothing() -> None:
    bench = Bench()
    a = bench.link("a")
    a.on_app(a, b"\xc1")
    assert a.closed == ["malformed message"]
    assert bench.kinds() == ["listening", "held"]


async def test_a_node_that_is_refused_hears_why_before_its_link_is_closed() -> None:
    bench = Bench(world_size=2)
    a = bench.link("a")
    a.say(m.Join(incarnation=1, world_size=3))
    assert [type(each) for each in a.told] == [m.RefuseJoin]
    assert a.closed == []
    bench.loop.pass_to(bench.loop.now + 1.0)
    assert len(a.closed) == 1


async def test_a_join_of_another_process_than_the_links_is_refused_and_leaves_nothing_behind() -> None:
    """A ghost: whatever it is told goes nowhere, so each view with it would fail at its deadline."""
    bench = Bench(world_size=1)
    a = bench.link("a", 5)
    for incarnation in (4, 6):
        a = bench.link("a", 5)
        a.say(m.Join(incarnation=incarnation))
        assert a.told == [
            m.RefuseJoin(reason=f"a joins as incarnation {incarnation} over a link of incarnation 5"),
        ]
        bench.loop.pass_to(bench.loop.now + 1.0)
        assert len(a.closed) == 1
        a.end("closed")
    assert "view_proposed" not in bench.kinds()
    assert "node_joined" not in bench.kinds()
    assert isinstance(bench.joined("a", 5).told[1], m.Propose)  # nothing is remembered of 6


async def test_a_ghost_does_not_take_the_place_of_the_living() -> None:
    bench = Bench(world_size=2)
    a, b = bench.joined("a"), bench.joined("b")
    for link in (a, b):
        link.say(m.Confirm(view_id=1))
    seen = len(bench.events)
    b.say(m.Join(incarnation=9))
    assert b.closed == ["joined twice"]
    assert bench.events[seen:] == []


async def test_a_link_joins_once() -> None:
    """Each Join ends the view of its node; over one link there would be thousands a second."""
    bench = Bench(world_size=2)
    a = bench.joined("a")
    seen = len(bench.events)
    a.say(m.Join(incarnation=1))
    assert a.closed == ["joined twice"]
    assert bench.events[seen:] == []
    again = bench.link("a", 1)
    again.say(m.Join(incarnation=1))
    assert [type(each) for each in again.told] == [m.Welcome]


async def test_a_link_that_is_to_be_closed_is_not_listened_to_any_more() -> None:
    """What it says meanwhile would be answered each time, and each time a timer would be set."""
    bench = Bench(world_size=2)
    a = bench.link("a")
    for _ in range(1000):
        a.say(m.BeginStep(view_id=1, step=1))
    assert len(bench.loop.timers) == 1
    a.say(m.Join(incarnation=1))
    assert a.told == []
    bench.loop.pass_to(bench.loop.now + 1.0)
    assert a.closed == ["BeginStep before Join"]
    a.end("closed")
    assert [type(each) for each in bench.joined("a").told] == [m.Welcome]


async def test_what_is_meant_for_an_earlier_process_of_a_node_is_not_sent_to_the_later_one() -> None:
    bench = Bench()
    old = bench.joined("a", 1)
    new = bench.link("a", 2)  # it has not said Join yet
    before = len(old.told)
    bench.loop.pass_to(bench.loop.now + 60.0)  # the proposal fails, and is told to the process it was made for
    assert (len(old.told), new.told) == (before, [])


async def test_a_link_that_ends_is_a_member_lost_and_its_successor_is_not() -> None:
    bench = Bench(world_size=2)
    old = bench.joined("a", 1)
    new = bench.joined("a", 2)
    seen = len(bench.events)
    old.end("silent")
    assert bench.events[seen:] == []
    new.end("silent for 1 s")
    lost = bench.events[seen]
    assert lost.kind == "peer_lost"
    assert lost.fields == {"peer": "a", "cause": "a was lost: silent for 1 s", "left": False}


async def test_what_cannot_be_sent_because_the_link_has_just_ended_is_no_error() -> None:
    bench = Bench()
    a = bench.link("a")
    a.ended = True
    a.say(m.Join(incarnation=1))
    assert a.told == []


async def test_a_proposal_without_an_answer_is_over_at_its_deadline_by_the_timer() -> None:
    bench = Bench()
    bench.joined("a")
    bench.loop.pass_to(bench.loop.now + 3.9)
    assert "view_ended" not in bench.kinds()
    bench.loop.pass_to(bench.loop.now + 0.2)  # lost_after 1 s: 4 s for a proposal
    assert "view_ended" in bench.kinds()


async def test_a_journal_that_cannot_be_written_ends_the_service_and_announces_nothing() -> None:
    class FullDisk(MemoryJournal):
        def append(self, record: Any) -> None:
            if "view_proposed" in kinds:
                raise JournalError("the disk is full", path="journal.db")
            super().append(record)

    kinds: list[str] = []
    bench = Bench(journal=FullDisk())
    a = bench.joined("a")
    kinds += bench.kinds()
    told = len(a.told)
    assert isinstance(a.told[-1], m.Propose)
    a.say(m.Confirm(view_id=a.told[-1].view.view_id))
    assert len(a.told) == told
    with pytest.raises(JournalError, match="the disk is full"):
        await bench.service.wait_failed()
    a.say(m.Leave())  # nothing is carried out any more
    assert bench.kinds() == kinds


async def test_reload_uses_the_new_files_and_says_so() -> None:
    credentials: Any = SimpleNamespace(fingerprint="f" * 64)
    bench = Bench(read_access=lambda: Access(credentials, ("1" * 64,)))
    bench.service.reload()
    assert bench.endpoint.rotated == [credentials]
    assert [(event.kind, event.fields) for event in bench.events[2:]] == [
        ("certificates_rotated", {"fingerprint": "f" * 64}),
        ("certificate_denied", {"fingerprint": "1" * 64}),
    ]


async def test_reload_without_files_is_an_error() -> None:
    with pytest.raises(LocalError, match="are not files"):
        Bench().service.reload()


async def test_the_transports_events_are_told_on_request_only() -> None:
    assert Bench().endpoint.given["observer"] is None
    assert Bench(transport_events=True).endpoint.given["observer"] is not None


async def test_a_closed_service_has_no_timer_and_no_endpoint_and_hears_nothing() -> None:
    bench = Bench()
    a = bench.joined("a")
    await bench.service.aclose()
    assert bench.endpoint.closed == "stopped"
    assert bench.loop.timers == []
    seen = len(bench.events)
    a.end("closed")
    assert len(bench.events) == seen


class SlowJournal:
    """Stands for the journal's thread: each call ends in `answer`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], None], asyncio.Future[None]]] = []

    def run_in_executor(self, executor: object, call: Callable[[], None]) -> asyncio.Future[None]:
        ended = asyncio.get_running_loop().create_future()
        self.calls.append((call, ended))
        return ended

    async def answer(self, error: Exception | None = None) -> None:
        call, ended = self.calls.pop(0)
        if error is None:
            call()
            ended.set_result(None)
        else:
            ended.set_exception(error)
        await asyncio.sleep(0)


class OperatorEnd(Link):
    """A link to an operator."""

    def __init__(self, role: str = OPERATOR) -> None:
        super().__init__("operator")
        self.identity = Identity("job", role, "operator")
        self.answers: list[OperatorAnswer] = []
        self.sightings: list[JobStatus | StandsBy] = []

    def send_app(self, data: bytes) -> None:
        answer = decode_answer(data, node="coordinator")
        if isinstance(answer, OperatorAnswer):
            self.answers.append(answer)
        else:
            self.sightings.append(answer)

    def look(self) -> JobStatus:
        """What it sees of one that leads."""
        self.ask(Look())
        status = self.sightings.pop()
        assert isinstance(status, JobStatus)
        return status

    def ask(self, message: OperatorMessage) -> None:
        self.on_app(self, encode_operation(message))


async def led(bench: Bench, journal: MemoryJournal | None = None) -> SlowJournal:
    """It leads with a journal on a thread, which has taken what the start has written."""
    slow = SlowJournal()
    bench.loop.run_in_executor = slow.run_in_executor
    executor: Any = object()
    bench.service.lead(journal or bench.journal, executor, coordinator_config(1, 1.0, seed=7))
    while slow.calls:
        await slow.answer()
    return slow


async def operated(bench: Bench) -> tuple[SlowJournal, OperatorEnd]:
    """One that leads, and an operator's link to it."""
    slow = await led(bench)
    operator = OperatorEnd()
    bench.come(operator)
    return slow, operator


async def test_an_operator_is_answered_once_the_request_is_in_the_journal_and_that_is_confirmed() -> None:
    slow, operator = await operated(bench := Bench(standby=True))
    operator.ask(Scale(world_size=3))
    assert (operator.answers, bench.journal.load().wanted) == ([], None)
    operator.ask(Inquire())  # which says no more than the journal holds either
    await slow.answer()
    assert (operator.answers, bench.journal.load().wanted) == ([], 3)
    await slow.answer()
    assert [answer.world_size for answer in operator.answers] == [3, 3]
    operator.ask(Scale(world_size=3))  # there is nothing to write, and another may lead by now
    assert len(operator.answers) == 2
    await slow.answer(JournalError("another leads", path="database"))
    assert len(operator.answers) == 2
    assert bench.service.failed
    with pytest.raises(JournalError):
        await bench.service.wait_failed()


async def test_an_operator_is_not_answered_where_the_request_could_not_be_written() -> None:
    slow, operator = await operated(bench := Bench(standby=True))
    operator.ask(Scale(world_size=3))
    await slow.answer(JournalError("another leads", path="database"))
    assert (operator.answers, slow.calls) == ([], [])
    with pytest.raises(JournalError):
        await bench.service.wait_failed()


async def test_one_that_stands_by_counts_who_stays_though_it_was_told_who_leads() -> None:
    bench = Bench(standby=True)
    a = bench.joined("a")
    assert bench.service.following() == Following(0)  # it may be about to go to who leads
    bench.service.stand_by("10.0.0.1:4433")
    b = bench.joined("b")
    assert bench.service.following() == Following(1)
    b.end("gone to who leads")
    assert bench.service.following() == Following(1)
    a.end("gone to who leads")
    a = bench.joined("a")  # in vain: it is back
    assert bench.service.following() == Following(1)


async def test_a_leader_counts_who_is_linked_and_says_whether_it_has_led_a_view_since_it_was_asked() -> None:
    bench = Bench()
    assert bench.service.following() == Following(0)
    a = bench.joined("a")
    assert bench.service.following() == Following(1)
    proposal = a.told[1]
    assert isinstance(proposal, m.Propose)
    a.say(m.Confirm(view_id=proposal.view.view_id))
    assert [bench.service.following() for _ in range(2)] == [Following(1, at_work=True)] * 2
    a.end("gone")
    assert bench.service.following() == Following(0)
    a = bench.joined("a")
    proposal = a.told[-1]
    assert isinstance(proposal, m.Propose)
    a.say(m.Confirm(view_id=proposal.view.view_id))
    a.end("gone at once")
    assert bench.service.following() == Following(0, at_work=True)  # for a moment it did
    assert bench.service.following() == Following(0)


async def test_an_operator_is_told_by_one_that_stands_by_that_another_leads() -> None:
    bench = Bench(standby=True)
    operator = OperatorEnd()
    bench.endpoint.given["on_link"](operator)
    operator.ask(Scale(world_size=3))
    assert (operator.answers, operator.closed) == ([], ["another coordinator leads the job"])


def reader(bench: Bench) -> OperatorEnd:
    link = OperatorEnd(READER)
    bench.come(link)
    return link


async def test_who_looks_sees_members_with_their_links_and_what_has_happened_in_words() -> None:
    bench = Bench(world_size=2)
    a = bench.joined("a")
    b = bench.joined("b")
    for link in (a, b):
        link.say(m.Confirm(view_id=1))
    a.rtt_ns, a.proved_address = 1_500_000, ("10.0.0.7", 5000)
    b.silent_for, b.suspect, b.stats = 0.75, True, LinkStats(resends=4)
    bench.loop.now += 3.0
    status = reader(bench).look()
    assert (status.stage, status.view_id, status.world_size, status.token) == ("installed", 1, 2, 0)
    seen = {each.node: each for each in status.members}
    assert (seen["a"].rtt_ns, seen["a"].address, seen["a"].doubted) == (1_500_000, "10.0.0.7:5000", False)
    assert (seen["b"].silent_ns, seen["b"].doubted, seen["b"].resends) == (750_000_000, True, 4)
    newest = status.events[0]
    assert (newest.kind, newest.ago_ns) == ("view_installed", 3 * 10**9)
    assert newest.said == "view 1 is at work, 2 ranks: a, b"


async def test_who_looks_sees_a_lost_node_with_why_and_no_link() -> None:
    bench = Bench(world_size=2)
    a, b = bench.joined("a"), bench.joined("b")
    for link in (a, b):
        link.say(m.Confirm(view_id=1))
    b.end("silent for 1 s")
    (lost,) = (each for each in reader(bench).look().members if each.node == "b")
    assert (lost.state, lost.why, lost.rtt_ns) == ("lost", "b was lost: silent for 1 s", None)


async def test_who_looks_is_answered_while_the_journal_is_not_and_hears_for_how_long() -> None:
    bench = Bench(standby=True)
    slow = SlowJournal()
    bench.loop.run_in_executor = slow.run_in_executor
    executor: Any = object()
    bench.service.lead(bench.journal, executor, coordinator_config(1, 1.0, seed=7), token=12)
    link = reader(bench)
    status = link.look()
    assert (status.token, status.journal_ns) == (12, 0)
    bench.loop.now += 4.0
    assert link.look().journal_ns == 4 * 10**9
    while slow.calls:
        await slow.answer()
    bench.loop.now += LOOK_AGE_NS / 1e9
    assert link.look().journal_ns == 0


async def test_who_looks_at_one_that_stands_by_hears_who_leads_and_never_what_it_was_before() -> None:
    bench = Bench(standby=True)
    await led(bench)
    link = reader(bench)
    assert isinstance(link.look(), JobStatus)
    bench.service.step_down("the lease is lost", "10.0.0.2:4433")
    again = reader(bench)
    again.ask(Look())
    assert again.sightings == [StandsBy(leader="10.0.0.2:4433")]
    bench.service.stand_by("10.0.0.3:4433")
    again.ask(Look())
    assert again.sightings[1:] == [StandsBy(leader="10.0.0.3:4433")]


async def test_a_readers_link_is_no_members() -> None:
    bench = Bench()
    link = reader(bench)
    assert bench.kinds() == ["listening", "held"]
    link.on_app(link, m.encode(m.Join(incarnation=1)))
    assert link.closed == ["malformed message"]
    assert "node_joined" not in bench.kinds()


async def test_a_view_has_where_a_link_shows_its_node_to_be() -> None:
    bench = Bench()
    link = bench.link("a")
    link.proved_address = ("203.0.113.1", 40000)
    link.say(m.Join(incarnation=1, addresses=(("10.0.0.1", 5),)))
    proposals = [message for message in link.told if isinstance(message, m.Propose)]
    assert [message.view.members[0].seen_at for message in proposals] == [("203.0.113.1", 40000)]


async def test_a_node_whose_link_shows_it_elsewhere_is_told_of_without_a_word_of_it() -> None:
    bench = Bench(2)
    a, b = bench.link("a"), bench.link("b")
    for link, host in ((a, "10.0.0.1"), (b, "10.0.0.2")):
        link.proved_address = ("203.0.113.1", 40000)
        link.say(m.Join(incarnation=1, addresses=((host, 5),)))
    told = len(b.told)
    stranger = bench.link("c")
    stranger.proved_address = a.proved_address = ("203.0.113.1", 40001)
    stranger.on_state(stranger)
    assert len(b.told) == told, "nobody has joined there"
    a.on_state(a)
    expected = [message for message in b.told[told:] if isinstance(message, m.Expect)]
    assert [(one.member.node, one.member.seen_at) for one in expected] == [("a", ("203.0.113.1", 40001))]
    a.on_state(a)
    assert len(b.told) == told + 1


@pytest.mark.parametrize("address", [None, ("fe80::1", 40000, 0, 2)], ids=["none yet", "of one interface here"])
async def test_what_means_nothing_to_others_is_not_told_them(address: tuple[Any, ...] | None) -> None:
    bench = Bench()
    link = bench.link("a")
    link.proved_address = address
    link.say(m.Join(incarnation=1, addresses=(("10.0.0.1", 5),)))
    proposals = [message for message in link.told if isinstance(message, m.Propose)]
    assert [message.view.members[0].seen_at for message in proposals] == [None]


async def test_a_coordinator_that_is_the_relay_answers_who_has_joined_and_nobody_else() -> None:
    bench = Bench(2)
    stranger, member = bench.link("a"), bench.joined("b")
    stranger.say(m.AskRelay(peer="b"))
    assert stranger.told == []
    member.say(m.AskRelay(peer="a"))
    answer = member.told[-1]
    assert isinstance(answer, m.RelayAnswer)
    assert (answer.peer, len(answer.label)) == ("a", 8)
    assert len(bench.service.desk.table) == 1
    member.end("silence")
    assert len(bench.service.desk.table) == 0


@pytest.mark.parametrize("relay", ["none", "192.0.2.8:4434"])
async def test_a_coordinator_that_is_not_the_relay_says_who_is_and_answers_nobody(relay: str) -> None:
    bench = Bench(2, relay=relay)
    member = bench.joined("b")
    welcome = member.told[0]
    assert isinstance(welcome, m.Welcome)
    assert welcome.relay == relay
    member.say(m.AskRelay(peer="a"))
    assert member.told == [welcome]


def test_a_relay_s_address_has_to_be_one() -> None:
    with pytest.raises(LocalError, match="the relay's address"):
        coordinator_config(1, 1.0, 7, relay="nowhere")


async def test_one_that_steps_down_ends_all_links_and_says_who_leads_now() -> None:
    bench = Bench(standby=True)
    slow, operator = await operated(bench)
    a = bench.joined("a")
    while slow.calls:
        await slow.answer()
    bench.service.step_down("another has taken the lease", "10.0.0.2:4433")
    assert not bench.service.leads
    for link in (a, operator):
        assert link.closed == ["this coordinator does not lead any more: 10.0.0.2:4433 leads"]
    assert bench.loop.timers == []
    assert bench.events[-1].kind == "stands_by"
    assert bench.events[-1].fields == {"cause": "another has taken the lease", "leader": "10.0.0.2:4433"}
    assert bench.service.following() == Following(0)
    assert bench.joined("a").told == [m.Standby(leader="10.0.0.2:4433")]
    with pytest.raises(LocalError, match="stands by"):
        bench.service.step_down("once more", "")


async def test_one_that_steps_down_without_knowing_who_leads_says_that() -> None:
    bench = Bench(standby=True)
    await led(bench)
    a = bench.joined("a")
    bench.service.step_down("the database gave no answer", "")
    assert a.closed == ["this coordinator does not lead any more: it does not know who does"]
    assert bench.joined("a").told == [m.Standby(leader="")]


async def test_an_append_that_was_under_way_has_no_effect_on_the_term_that_follows() -> None:
    """Neither what it brings nor what was to be done after it: the term that has begun it is over."""
    bench = Bench(standby=True)
    old = await led(bench)
    a = bench.joined("a")
    told = list(a.told)
    assert len(old.calls) == 1  # Welcome rests on the journal; the proposal waits behind
    bench.service.step_down("deposed", "")
    journal = MemoryJournal()
    journal.append(Seeded(7))
    new = await led(bench, journal)
    seen, written = bench.kinds(), list(journal.records)
    await old.answer()
    assert (old.calls, new.calls) == ([], [])  # nothing follows from it
    assert (a.told, bench.kinds(), journal.records) == (told, seen, written)
    assert not bench.service.failed


async def test_an_append_that_fails_after_the_term_is_over_fails_no_other() -> None:
    bench = Bench(standby=True)
    old = await led(bench)
    bench.joined("a")
    bench.service.step_down("deposed", "")
    await led(bench)
    await old.answer(JournalError("no answer", path="database"))
    assert not bench.service.failed


async def test_a_timer_of_the_old_term_does_not_fire_in_the_new_one() -> None:
    bench = Bench(standby=True)
    slow = await led(bench)
    bench.joined("a")
    while slow.calls:  # a view is proposed, which has a deadline
        await slow.answer()
    assert bench.loop.timers
    old = list(bench.loop.timers)
    bench.service.step_down("deposed", "")
    assert bench.loop.timers == []
    slow = await led(bench)
    seen = bench.kinds()
    for timer in old:
        timer.run()  # as if it had been due in the same turn
    bench.loop.pass_to(bench.loop.now + 60.0)
    assert (bench.kinds(), slow.calls) == (seen, [])


async def test_a_link_that_was_to_be_closed_in_a_moment_is_closed_with_the_others() -> None:
    bench = Bench(standby=True)
    await led(bench)
    stranger = bench.link("a")
    stranger.say(m.BeginStep(view_id=1, step=1))
    assert len(bench.loop.timers) == 1
    bench.service.step_down("deposed", "")
    assert (bench.loop.timers, len(stranger.closed)) == ([], 1)


async def test_what_comes_on_a_link_of_the_old_term_is_not_heard_by_the_new_one() -> None:
    bench = Bench(standby=True)
    slow = await led(bench)
    a = bench.joined("a")
    while slow.calls:
        await slow.answer()
    proposals = [message for message in a.told if isinstance(message, m.Propose)]
    bench.service.step_down("deposed", "")
    slow = await led(bench)
    told = list(a.told)
    a.say(m.Confirm(view_id=proposals[-1].view.view_id))
    a.say(m.Join(incarnation=1))
    a.end("closed")
    assert (a.told, slow.calls) == (told, [])
    assert len(bench.service.desk.table) == 0


async def test_the_term_that_follows_is_made_from_the_journal_and_not_from_memory() -> None:
    bench = Bench(standby=True)
    slow = await led(bench)
    a = bench.joined("a")
    while slow.calls:
        await slow.answer()
    view = next(message.view for message in a.told if isinstance(message, m.Propose))
    bench.service.step_down("deposed", "")
    meanwhile = MemoryJournal()  # another coordinator has led
    for record in (Seeded(7), Proposed(view.view_id), Proposed(view.view_id + 5)):
        meanwhile.append(record)
    slow = await led(bench, meanwhile)
    assert bench.service.core.history.last_view_id == view.view_id + 5
    again = bench.joined("a")
    while slow.calls:
        await slow.answer()
    assert [message.view.view_id for message in again.told if isinstance(message, m.Propose)] == [view.view_id + 6]


async def test_a_relay_passes_on_for_nobody_whose_link_was_of_the_old_term() -> None:
    bench = Bench(2, standby=True)
    await led(bench)
    a = bench.joined("a")
    a.say(m.AskRelay(peer="b"))
    assert len(bench.service.desk.table) == 1
    bench.service.step_down("deposed", "")
    a.end("closed")
    assert len(bench.service.desk.table) == 0


async def test_a_term_of_its_own_can_be_waited_for_each_time() -> None:
    bench = Bench(standby=True)
    with pytest.raises(LocalError, match="stands by"):
        await bench.service.wait_failed()
    for _ in range(2):
        slow = await led(bench)
        bench.joined("a")
        await slow.answer(LeaseLost("deposed", path="database", leader="b:1"))
        with pytest.raises(LeaseLost):
            await bench.service.wait_failed()
        bench.service.step_down("deposed", "b:1")
