"""Looking names up: one thread a question, nobody waits longer than they want to, and nothing waits for the thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from quicoll_transport.errors import AddressError
from quicoll_transport.net.resolver import MOST, Resolver, resolve_all

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

BOUND_S = 60.0  # a hang, not a figure: the thing waited for takes milliseconds


class SlowServer:
    """A resolver that answers when it is told to; `asked` holds the questions in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.answer = threading.Event()
        self.failure: BaseException | None = None

    def getaddrinfo(self, host: str, port: int, *, family: int, type: int) -> list[tuple[Any, ...]]:
        self.asked.append((host, port, family))
        assert self.answer.wait(BOUND_S)
        if self.failure is not None:
            raise self.failure
        return [
            (socket.AF_INET6, type, 17, "", ("2001:DB8::1", port, 7, 0)),
            (socket.AF_INET, type, 17, "", ("192.0.2.1", port)),
        ]

    def threads(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("look-up of")]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, no_name_server: None) -> Iterator[SlowServer]:
    server = SlowServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    yield server
    server.answer.set()
    for thread in server.threads():
        thread.join(BOUND_S)


def forms(port: int) -> list[Address]:
    return [("2001:db8::1", port, 0, 0), ("192.0.2.1", port)]


async def test_the_answer_is_canonical_and_in_the_resolver_s_order(server: SlowServer) -> None:
    server.answer.set()
    assert await Resolver().resolve("peer", 5, family=socket.AF_INET) == forms(5)
    assert server.asked == [("peer", 5, socket.AF_INET)]


async def test_who_asks_what_is_being_asked_joins_the_wait_and_another_question_has_a_thread_of_its_own(
    server: SlowServer,
) -> None:
    resolver = Resolver()
    same = [asyncio.ensure_future(resolver.resolve("peer", 5)) for _ in range(50)]
    other = asyncio.ensure_future(resolver.resolve("peer", 6))
    await asyncio.sleep(0)
    assert len(server.threads()) == 2
    server.answer.set()
    assert await asyncio.gather(*same, other) == [forms(5)] * 50 + [forms(6)]
    assert sorted(server.asked) == [("peer", 5, 0), ("peer", 6, 0)]


async def test_the_threads_are_bounded_and_there_is_room_again_when_an_answer_has_come(server: SlowServer) -> None:
    resolver = Resolver()
    waiting = [asyncio.ensure_future(resolver.resolve(f"peer-{number}", 5)) for number in range(MOST)]
    await asyncio.sleep(0)
    assert len(server.threads()) == MOST
    with pytest.raises(AddressError, match=f"'one more': {MOST} look-ups are under way already"):
        await resolver.resolve("one more", 5)
    joined = asyncio.ensure_future(resolver.resolve("peer-0", 5))
    await asyncio.sleep(0)
    assert len(server.threads()) == MOST
    server.answer.set()
    assert await asyncio.gather(*waiting, joined) == [forms(5)] * (MOST + 1)
    for thread in server.threads():
        thread.join(BOUND_S)
    assert await resolver.resolve("one more", 5) == forms(5)


async def test_an_answer_is_not_remembered_for_the_next_question(server: SlowServer) -> None:
    server.answer.set()
    resolver = Resolver()
    for _ in range(2):
        await resolver.resolve("peer", 5)
        for thread in server.threads():
            thread.join(BOUND_S)
    assert len(server.asked) == 2


async def test_one_that_waits_no_longer_leaves_the_others_waiting(server: SlowServer) -> None:
    resolver = Resolver()
    first, second = (asyncio.ensure_future(resolver.resolve("peer", 5)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    server.answer.set()
    assert await second == forms(5)


def test_a_resolver_that_does_not_answer_keeps_neither_the_loop_nor_its_executor(
    server: SlowServer, caplog: pytest.LogCaptureFixture
) -> None:
    resolver = Resolver()

    async def main() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(resolver.resolve("peer", 5), 0.01)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    thread.join(BOUND_S / 2)
    assert not thread.is_alive(), "asyncio.run waits for the look-up"
    (late,) = server.threads()
    assert late.daemon, "the interpreter's end would wait for it"
    server.answer.set()  # its loop is closed by now
    late.join(BOUND_S)
    assert caplog.records == []


def test_waiting_without_a_loop_ends_in_time_and_says_so(server: SlowServer) -> None:
    resolver = Resolver()
    with pytest.raises(AddressError, match=r"no answer to the look-up of 'peer' within 0\.01 s"):
        resolver.resolve_blocking("peer", 5, timeout=0.01)
    server.answer.set()
    assert resolver.resolve_blocking("peer", 5, timeout=BOUND_S) == forms(5)


@pytest.mark.parametrize(
    ("failure", "raised", "said"),
    [
        (socket.gaierror(socket.EAI_NONAME, "not known"), AddressError, "cannot resolve 'peer': .*not known"),
        (UnicodeError("label too long"), AddressError, "cannot resolve 'peer': label too long"),
        (MemoryError("none left"), MemoryError, "none left"),
    ],
)
async def test_a_failure_reaches_all_who_wait_whatever_it_is(
    server: SlowServer, failure: BaseException, raised: type[BaseException], said: str
) -> None:
    server.failure = failure
    resolver = Resolver()
    waiting = [asyncio.ensure_future(resolver.resolve("peer", 5)) for _ in range(2)]
    await asyncio.sleep(0)
    server.answer.set()
    for one in waiting:
        with pytest.raises(raised, match=said):
            await one


async def test_a_host_without_threads_is_an_answer_and_the_next_question_is_asked(
    server: SlowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer.set()
    resolver = Resolver()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", refuse)
        with pytest.raises(AddressError, match="cannot resolve 'peer': can't start new thread"):
            await resolver.resolve("peer", 5)
    assert await resolver.resolve("peer", 5) == forms(5)


async def test_looking_up_many_keeps_their_order_and_says_what_is_missing_and_why(server: SlowServer) -> None:
    async def resolve(host: str, port: int) -> list[Address]:
        if host == "unknown":
            raise AddressError("cannot resolve 'unknown'")
        if host == "silent":
            await asyncio.get_running_loop().create_future()
        return [(host, port), (host, port + 1)]

    asked = [("b", 1), ("silent", 1), ("unknown", 1), ("a", 1)]
    found, failed = await resolve_all(asked, resolve, timeout=0.05)
    assert found == [("b", 1), ("b", 2), ("a", 1), ("a", 2)]
    assert failed == ["no answer to the look-up of 'silent' within 0.05 s", "cannot resolve 'unknown'"]
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not task.cancelling()] == []
