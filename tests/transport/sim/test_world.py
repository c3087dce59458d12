"""The world: one order of events, runs that always end, and what it says when one does not end well."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.sim import Deadlock, Forbidden, OutOfTime, SimulatedSocket, Spinning, World
from quicoll_transport.sim import timeline as timeline_module

SECOND = 1_000_000_000


@pytest.fixture
def world() -> Iterator[World]:
    with World(1) as made:
        yield made


# -- hosts -----------------------------------------------------------------------------------------------------------


def test_hosts_have_names_and_addresses_of_their_own(world: World) -> None:
    hosts = [world.host(f"h{n}") for n in range(300)]
    assert len({host.ip for host in hosts}) == 300
    assert all(
        world.network.by_ip(host.ip) is host.interface and world.network.resolve(host.name) == host.ip for host in hosts
    )
    assert world.network.by_ip("10.9.9.9") is None
    assert world.network.resolve("nobody") is None
    with pytest.raises(ConfigurationError, match="there is a host 'h7' already"):
        world.host("h7")


def test_a_host_that_is_made_after_a_look_up_is_found(world: World) -> None:
    assert world.network.by_ip("10.0.0.1") is None
    assert world.network.by_ip(world.host("late").ip) is world.hosts["late"].interface


# -- order and time --------------------------------------------------------------------------------------------------


def test_events_of_the_world_come_by_time_and_then_in_the_order_of_setting(world: World) -> None:
    seen: list[tuple[int, str]] = []

    def note(word: str) -> None:
        seen.append((world.elapsed_ns, word))

    world.after(5, note, "c")
    world.after(3, note, "a")
    world.after(5, note, "d")
    world.after(3, note, "b")
    world.at(0, note, "past")
    world.run(limit_ns=10)
    assert seen == [(0, "past"), (3, "a"), (3, "b"), (5, "c"), (5, "d")]
    assert world.elapsed_ns == 10


def test_time_jumps_to_what_is_due_and_stops_at_the_limit(world: World) -> None:
    seen: list[int] = []
    world.after(10**15, lambda: seen.append(world.elapsed_ns))
    world.run(limit_ns=10**15 - 1)
    assert (seen, world.elapsed_ns) == ([], 10**15 - 1)
    world.run(limit_ns=1)
    assert seen == [10**15]


def test_a_run_ends_as_soon_as_its_condition_holds(world: World) -> None:
    seen: list[int] = []
    loop = world.host("h").start()
    for n in range(5):
        loop.call_later(n, seen.append, n)
    world.run(lambda: len(seen) == 3, limit_ns=100 * SECOND)
    assert world.elapsed_ns == 2 * SECOND
    world.run(lambda: True, limit_ns=0)
    assert seen == [0, 1, 2]


def test_a_run_without_a_condition_goes_to_its_limit_though_nothing_happens(world: World) -> None:
    world.run(limit_ns=7 * SECOND)
    assert world.elapsed_ns == 7 * SECOND


# -- ends that are none ----------------------------------------------------------------------------------------------


async def wait_for_ever() -> None:
    await asyncio.get_running_loop().create_future()


def test_a_deadlock_is_found_at_once_and_says_who_waits_where(world: World) -> None:
    for name in ("a", "b"):
        world.host(name).start().create_task(wait_for_ever(), name=f"task of {name}")
    with pytest.raises(Deadlock) as caught:
        world.run(lambda: False, limit_ns=10**18)
    text = str(caught.value)
    assert "nothing is ready or scheduled" in text
    assert "a (running): task of a at wait_for_ever:" in text
    assert "b (running): task of b at wait_for_ever:" in text
    assert world.elapsed_ns == 0


def test_tasks_that_wait_for_each_other_are_a_deadlock(world: World) -> None:
    async def take(first: asyncio.Lock, second: asyncio.Lock) -> None:
        async with first:
            await asyncio.sleep(1)
            async with second:
                pass

    loop = world.host("a").start()
    one, other = asyncio.Lock(), asyncio.Lock()
    tasks = [loop.create_task(take(one, other)), loop.create_task(take(other, one))]
    with pytest.raises(Deadlock, match=r"waiting: a .* at Lock\.acquire:\d+ in .*take:\d+;"):
        world.run(lambda: all(task.done() for task in tasks), limit_ns=100 * SECOND)


def test_timers_of_the_dead_and_cancelled_ones_keep_nothing_going(world: World) -> None:
    first, second = world.host("a").start(), world.host("b").start()
    first.call_later(50, int)
    second.call_later(60, int).cancel()
    world.hosts["a"].kill()
    with pytest.raises(Deadlock, match="nobody waits"):
        world.run(lambda: False, limit_ns=100 * SECOND)
    assert world.elapsed_ns == 0


def test_a_paused_process_that_nobody_resumes_is_a_deadlock(world: World) -> None:
    host = world.host("a")
    host.start().create_task(asyncio.sleep(1), name="sleeper")
    host.pause()
    with pytest.raises(Deadlock, match=r"a \(paused\): sleeper"):
        world.run(lambda: False, limit_ns=100 * SECOND)


def test_work_that_never_ends_is_found_though_time_stands_still(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "_TURNS", 10_000)

    async def spin() -> None:
        while True:  # noqa: ASYNC110 - what is to be found
            await asyncio.sleep(0)

    world.host("a").start().create_task(spin())
    with pytest.raises(Spinning, match=r"10001 callbacks at 0\.000000 s and time stands still; the last one: .*spin"):
        world.run(limit_ns=SECOND)


def test_events_of_the_world_that_never_let_time_pass_are_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "_TURNS", 10_000)

    def again() -> None:
        world.after(0, again)

    world.after(5, again)
    with pytest.raises(Spinning, match=r"0\.000000 s and time stands still"):
        world.run(limit_ns=SECOND)


def test_timers_that_are_due_at_once_again_and_again_are_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "_TURNS", 10_000)
    loop = world.host("a").start()

    def again() -> None:
        loop.call_later(0, again)

    loop.call_later(1, again)
    with pytest.raises(Spinning, match=r"1\.000000 s and time stands still"):
        world.run(limit_ns=5 * SECOND)


def test_a_run_that_takes_too_long_says_who_is_still_there(world: World) -> None:
    async def tick() -> None:
        while True:  # noqa: ASYNC110 - what is to be stopped
            await asyncio.sleep(1)

    world.host("a").start().create_task(tick(), name="ticker")
    with pytest.raises(
        OutOfTime, match=r"not done after 5 s of simulated time; waiting: a \(running\): ticker at .*tick"
    ):
        world.run(lambda: False, limit_ns=5 * SECOND)
    assert world.elapsed_ns == 5 * SECOND


def test_an_error_of_a_world_s_event_or_of_the_condition_is_the_caller_s(world: World) -> None:
    def fail() -> bool:
        raise ZeroDivisionError

    world.after(1, fail)
    with pytest.raises(ZeroDivisionError):
        world.run(limit_ns=5)
    with pytest.raises(ZeroDivisionError):
        world.run(fail, limit_ns=5)
    world.run(limit_ns=5)


def test_another_thread_may_neither_run_it_nor_schedule() -> None:
    world = World(1)  # not open, so that a thread can be made at all
    loop = world.host("a").start()
    caught: list[BaseException] = []

    def attempt() -> None:
        acts: list[Callable[[], object]] = [lambda: world.run(limit_ns=0), lambda: loop.call_soon_threadsafe(int)]
        for act in acts:
            try:
                act()
            except Forbidden as error:
                caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert [str(error) for error in caught] == ["called from another thread: a simulation has one"] * 2


# -- the end ---------------------------------------------------------------------------------------------------------


def test_closing_ends_every_process_and_closes_what_it_left_in_order(world: World) -> None:
    seen: list[str] = []

    async def life(name: str) -> None:
        try:
            await wait_for_ever()
        finally:
            seen.append(name)
            world.network.partition(["a"], ["b"])

    for name in ("a", "b"):
        loop = world.host(name).start()
        SimulatedSocket(loop, 1)
        loop.create_task(life(f"{name}1"))
        loop.create_task(life(f"{name}2"))
    world.run(limit_ns=1)
    digest = world.digest
    told: list[Any] = []
    world.recorder = lambda *entry: told.append(entry)
    world.close()
    assert seen == ["a1", "a2", "b1", "b2"]
    assert all(not host.up and not host.sockets and host.loop is None for host in world.hosts.values())
    assert told == []
    assert len(digest) == 32
    world.close()
    assert world.failures == []
