"""A simulated process's event loop: asyncio as ever, in one total order, and clear errors for what it does not have."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import math
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from quicoll_transport.sim import Forbidden, HostLoop, World
from quicoll_transport.sim.loop import EXECUTOR_NS

SECOND = 1_000_000_000


@pytest.fixture
def world() -> Iterator[World]:
    with World(1) as made:
        yield made


def run(world: World, main: Callable[[], Awaitable[Any]], *, limit_s: int = 100) -> Any:
    """`main()` on a host of its own, to its end."""

    async def life() -> Any:
        return await main()

    task = world.host(f"main{len(world.hosts)}").start().create_task(life())
    world.run(task.done, limit_ns=limit_s * SECOND)
    return task.result()


# -- order -----------------------------------------------------------------------------------------------------------


def test_callbacks_run_first_in_first_out_also_across_hosts(world: World) -> None:
    loops = [world.host(name).start() for name in "abc"]
    seen: list[tuple[str, int]] = []
    for n in range(4):
        for loop in loops:
            loop.call_soon(seen.append, (loop.host.name, n))
    world.run(limit_ns=0)
    assert seen == [(name, n) for n in range(4) for name in "abc"]


def test_timers_run_by_due_time_and_equal_ones_in_the_order_of_setting(world: World) -> None:
    a, b = world.host("a").start(), world.host("b").start()
    seen: list[str] = []
    a.call_later(2, seen.append, "a2")
    b.call_later(1, seen.append, "b1 first")
    a.call_later(1, seen.append, "a1 second")
    b.call_later(1, seen.append, "b1 third")
    a.call_soon(seen.append, "soon")
    a.call_later(0, seen.append, "zero")
    a.call_later(-5, seen.append, "past")
    world.run(limit_ns=5 * SECOND)
    assert seen == ["soon", "zero", "past", "b1 first", "a1 second", "b1 third", "a2"]


def test_a_callback_that_schedules_waits_its_turn(world: World) -> None:
    loop = world.host("a").start()
    seen: list[int] = []
    loop.call_soon(lambda: (seen.append(1), loop.call_soon(seen.append, 3)))
    loop.call_soon(seen.append, 2)
    world.run(limit_ns=0)
    assert seen == [1, 2, 3]


def test_time_is_exact_at_every_timer(world: World) -> None:
    loop = world.host("a").start()
    seen: list[tuple[float, float]] = []

    def look(due: float) -> None:
        seen.append((due, loop.time()))

    for n in range(1, 200):
        due = loop.time() + n * 0.0137 + 1e-9 * n
        loop.call_at(due, look, due)
    world.run(limit_ns=5 * SECOND)
    assert len(seen) == 199
    assert all(0 <= now - due < 2e-9 or math.isclose(now, due, abs_tol=1e-9) for due, now in seen)


def test_a_cancelled_timer_or_callback_does_not_run(world: World) -> None:
    loop = world.host("a").start()
    seen: list[int] = []
    handles = [loop.call_later(1, seen.append, n) for n in range(4)]
    soon = loop.call_soon(seen.append, 100)
    handles[1].cancel()
    soon.cancel()
    loop.call_later(0.5, handles[2].cancel)
    world.run(limit_ns=2 * SECOND)
    assert seen == [0, 3]
    assert handles[0].when() - loop.time() == -1.0


def test_a_timer_cancelled_by_another_one_of_the_same_moment_does_not_run(world: World) -> None:
    loop = world.host("a").start()
    seen: list[int] = []
    later: list[asyncio.TimerHandle] = []
    loop.call_later(1, lambda: later[0].cancel())
    later.append(loop.call_later(1, seen.append, 1))
    world.run(limit_ns=2 * SECOND)
    assert seen == []


def test_many_cancelled_timers_are_forgotten(world: World) -> None:
    loop = world.host("a").start()
    for _ in range(50_000):
        loop.call_later(1000, int).cancel()
    assert len(world._timers) < 20_000
    seen: list[int] = []
    loop.call_later(1, seen.append, 1)
    world.run(limit_ns=2 * SECOND)
    assert seen == [1]


def test_a_timer_at_infinity_never_runs_and_one_at_no_number_is_refused(world: World) -> None:
    loop = world.host("a").start()
    loop.call_at(math.inf, int)
    with pytest.raises(ValueError, match="not a number"):
        loop.call_at(math.nan, int)
    world.run(limit_ns=SECOND)
    assert loop.timers == []


def test_context_variables_go_with_their_callbacks(world: World) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("v", default="outside")
    loop, seen = world.host("a").start(), []
    context = contextvars.copy_context()
    context.run(variable.set, "inside")
    loop.call_soon(lambda: seen.append(variable.get()), context=context)
    loop.call_later(1, lambda: seen.append(variable.get()), context=context)
    loop.call_soon_threadsafe(lambda: seen.append(variable.get()), context=context)
    loop.call_soon(lambda: seen.append(variable.get()))
    world.run(limit_ns=2 * SECOND)
    assert seen == ["inside", "inside", "outside", "inside"]


# -- asyncio on top of it --------------------------------------------------------------------------------------------


def test_sleeps_timeouts_locks_queues_and_groups_behave_as_ever(world: World) -> None:
    async def main() -> list[Any]:
        loop = asyncio.get_running_loop()
        start, seen = loop.time(), []
        await asyncio.sleep(3600)
        seen.append(loop.time() - start)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await loop.create_future()
        seen.append(loop.time() - start)
        queue: asyncio.Queue[int] = asyncio.Queue(1)

        async def produce() -> None:
            for n in range(3):
                await queue.put(n)

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            seen += [await queue.get() for _ in range(3)]
        lock = asyncio.Lock()
        async with lock:
            assert lock.locked()

        async def fails() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(10))
                group.create_task(asyncio.wait_for(loop.create_future(), 1))

        with pytest.raises(ExceptionGroup):
            await fails()
        seen.append(loop.time() - start)
        done, pending = await asyncio.wait([asyncio.ensure_future(asyncio.sleep(9))], timeout=1)
        for task in pending:
            task.cancel()
        return [*seen, len(done), len(pending)]

    assert run(world, main, limit_s=4000) == [3600.0, 3605.0, 0, 1, 2, 3606.0, 0, 1]


def test_the_running_loop_is_the_host_s(world: World) -> None:
    async def main() -> tuple[bool, bool, bool]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HostLoop)
        return loop.is_running(), loop.is_closed(), loop.get_debug()

    assert run(world, main) == (True, False, False)
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


async def test_a_world_that_runs_and_is_closed_inside_a_running_loop_leaves_that_loop_running() -> None:
    """As in a cell of a notebook. Something is suspended still when it is closed."""
    here = asyncio.get_running_loop()
    with World(1) as world:
        world.host("a").start().create_task(asyncio.sleep(100))
        world.run(limit_ns=SECOND)
        assert asyncio.get_running_loop() is here
    assert asyncio.get_running_loop() is here


def test_tasks_are_listed_in_the_order_of_their_making_until_they_are_done(world: World) -> None:
    loop = world.host("a").start()
    tasks = [loop.create_task(asyncio.sleep(seconds), name=f"t{seconds}") for seconds in (3, 1, 2)]
    assert loop.tasks == tasks
    world.run(limit_ns=SECOND + 1)
    assert [task.get_name() for task in loop.tasks] == ["t3", "t2"]
    assert tasks[1].done()


def test_a_task_factory_makes_the_tasks(world: World) -> None:
    loop = world.host("a").start()
    made: list[asyncio.Task[Any]] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **settings: Any) -> asyncio.Task[Any]:
        made.append(asyncio.Task(coro, loop=loop, **settings))
        return made[-1]

    loop.set_task_factory(factory)
    assert loop.get_task_factory() is factory
    task = loop.create_task(asyncio.sleep(0))
    world.run(limit_ns=0)
    assert made == [task]
    assert task.done()


def test_what_nobody_catches_reaches_the_handler_or_the_world_s_failures(world: World) -> None:
    loop = world.host("a").start()

    def fail() -> None:
        raise ValueError("nobody catches it")

    loop.call_soon(fail)
    world.run(limit_ns=0)
    [(host, text)] = world.failures
    assert host == "a"
    assert "ValueError: nobody catches it" in text
    heard: list[dict[str, Any]] = []
    handler = lambda loop, context: heard.append(context)  # noqa: E731 - compared below
    loop.set_exception_handler(handler)
    assert loop.get_exception_handler() is handler
    loop.call_soon(fail)
    world.run(limit_ns=0)
    assert len(world.failures) == 1
    assert isinstance(heard[0]["exception"], ValueError)


def test_a_task_whose_error_nobody_takes_is_a_failure(world: World) -> None:
    loop = world.host("a").start()

    async def fail() -> None:
        raise ValueError("nobody awaits it")

    loop.create_task(fail())
    world.run(limit_ns=0)
    gc.collect()
    assert "Task exception was never retrieved" in world.failures[0][1]


def test_a_process_that_asks_for_its_end_is_told_to_who_starts_it_or_is_a_failure(world: World) -> None:
    host = world.host("a")
    loop = host.start()
    loop.call_soon(sys.exit, 3)
    world.run(limit_ns=0)
    assert world.failures == [("a", "SystemExit: 3")]
    heard: list[object] = []
    host.on_exit = lambda error: heard.append(error.code)

    async def leave() -> None:
        sys.exit(4)

    loop.create_task(leave())
    loop.call_later(1.0, heard.append, "others go on")
    world.run(limit_ns=2 * SECOND)
    assert heard == [4, "others go on"]
    assert len(world.failures) == 1


def test_errors_that_end_a_program_get_through(world: World) -> None:
    def leave() -> None:
        raise KeyboardInterrupt

    loop = world.host("a").start()
    loop.call_soon(leave)
    with pytest.raises(KeyboardInterrupt):
        world.run(limit_ns=0)
    assert world.current is None
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def test_an_asynchronous_generator_that_is_left_is_closed_by_its_loop(world: World) -> None:
    seen: list[Any] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for n in range(10):
                yield n
        finally:
            await asyncio.sleep(0)
            seen.append("closed")

    async def main() -> None:
        async for n in numbers():
            seen.append(n)
            if n == 1:
                break
        gc.collect()
        await asyncio.sleep(1)

    before = sys.get_asyncgen_hooks()
    run(world, main)
    assert seen == [0, 1, "closed"]
    assert sys.get_asyncgen_hooks() == before


def test_an_asynchronous_generator_of_a_dead_process_is_not(world: World) -> None:
    seen: list[Any] = []
    kept: list[Any] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            seen.append("closed")
            await asyncio.sleep(0)

    async def main() -> None:
        generator = numbers()
        seen.append(await anext(generator))
        kept.append(generator)

    host = world.host("a")
    host.start().create_task(main())
    world.run(limit_ns=SECOND)
    host.kill()
    kept.clear()
    gc.collect()
    world.run(limit_ns=SECOND)
    assert seen == [1]


# -- threads and names -----------------------------------------------------------------------------------------------


def test_a_function_in_an_executor_runs_alone_and_its_result_comes_later(world: World) -> None:
    async def main() -> tuple[int, int, list[str]]:
        seen: list[str] = []
        start = world.now_ns
        task = asyncio.ensure_future(asyncio.to_thread(lambda: seen.append("ran") or 7))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert seen == ["ran"]
        assert not task.done()
        return await task, world.now_ns - start, seen

    assert run(world, main) == (7, EXECUTOR_NS, ["ran"])


def test_an_error_in_an_executor_is_the_caller_s(world: World) -> None:
    def fail() -> None:
        raise ValueError("in the thread")

    async def main() -> None:
        with pytest.raises(ValueError, match="in the thread"):
            await asyncio.to_thread(fail)

    run(world, main)
    assert world.failures == []


def test_a_cancelled_executor_call_brings_nothing(world: World) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(asyncio.to_thread(int))
        await asyncio.sleep(EXECUTOR_NS / 2e9)
        task.cancel()
        await asyncio.sleep(1)
        assert task.cancelled()

    run(world, main)
    assert world.failures == []


def test_a_process_killed_while_its_thread_works_hears_nothing_of_it(world: World) -> None:
    host, seen = world.host("a"), []

    async def main() -> None:
        seen.append(await asyncio.to_thread(lambda: 1))

    host.start().create_task(main())
    world.run(limit_ns=EXECUTOR_NS // 2)
    host.kill()
    world.run(limit_ns=SECOND)
    assert seen == []


def test_names_of_hosts_and_numeric_addresses_are_found(world: World) -> None:
    peer = world.host("peer")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        expected = (socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_UDP, "", (peer.ip, 7))
        assert await loop.getaddrinfo("peer", 7) == [expected]
        assert await loop.getaddrinfo(peer.ip, 7) == [expected]
        with pytest.raises(socket.gaierror, match="no host 'nobody'"):
            await loop.getaddrinfo("nobody", 7)

    run(world, main)


def test_an_address_without_a_port_or_of_the_other_family_is_found(world: World) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert (await loop.getaddrinfo("10.0.0.9", None))[0][4] == ("10.0.0.9", 0)
        assert (await loop.getaddrinfo("::1", 5))[0][0] == socket.AF_INET6

    run(world, main)


# -- what there is not -----------------------------------------------------------------------------------------------

NETWORK = [
    "add_reader",
    "add_writer",
    "remove_reader",
    "remove_writer",
    "connect_accepted_socket",
    "create_connection",
    "create_datagram_endpoint",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "getnameinfo",
    "sendfile",
    "start_tls",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_recv_into",
    "sock_recvfrom",
    "sock_recvfrom_into",
    "sock_sendall",
    "sock_sendfile",
    "sock_sendto",
]
PROCESS = [
    "add_signal_handler",
    "remove_signal_handler",
    "connect_read_pipe",
    "connect_write_pipe",
    "subprocess_exec",
    "subprocess_shell",
]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        *((name, "the simulated network carries datagrams only") for name in NETWORK),
        *((name, "a simulated process starts no other and gets no signals") for name in PROCESS),
        ("set_default_executor", "asyncio.to_thread runs the function at once"),
    ],
)
def test_what_touches_the_real_world_says_what_to_use_instead(world: World, name: str, instead: str) -> None:
    loop = world.host("a").start()
    with pytest.raises(Forbidden, match=rf"loop\.{name} on a simulated host: {instead}"):
        getattr(loop, name)(1, 2)


def test_nothing_of_asyncio_s_loop_is_forgotten() -> None:
    """What is neither built nor refused would raise a bare NotImplementedError."""
    inherited = [
        name
        for name in vars(asyncio.AbstractEventLoop)
        if not name.startswith("_") and getattr(HostLoop, name) is getattr(asyncio.AbstractEventLoop, name)
    ]
    assert inherited == []


def test_a_loop_is_run_by_its_world_alone(world: World) -> None:
    loop = world.host("a").start()
    for refused in (loop.run_forever, loop.stop, loop.close):
        with pytest.raises(Forbidden, match="the simulation runs this loop"):
            refused()
    with pytest.raises(Forbidden, match="await instead"):
        loop.run_until_complete(asyncio.sleep(1))
    with pytest.raises(Forbidden, match="await instead"):
        loop.run_until_complete(loop.create_future())


def test_a_forbidden_thing_inside_a_process_is_its_own_error(world: World) -> None:
    async def main() -> None:
        with pytest.raises(Forbidden, match="open a SimulatedSocket"):
            await asyncio.open_connection("10.0.0.1", 80)
        with pytest.raises(Forbidden, match="starts no other"):
            await asyncio.create_subprocess_exec("true")

    run(world, main)


def test_what_an_asynchronous_generator_of_a_dead_process_awaits_has_its_last_words_heard_by_nobody() -> None:
    """Python ends a task that awaits a generator without reaching into it, and then complains of what was in there."""
    seen: list[str] = []

    async def inner() -> int:
        try:
            await asyncio.sleep(100)
        finally:
            seen.append("closed")
            if asyncio.current_task() is None:
                raise ValueError("nobody to tell")
        return 1

    async def numbers() -> AsyncIterator[int]:
        while True:
            yield await inner()

    async def main() -> None:
        async for _ in numbers():
            pass

    complaints: list[Any] = []
    before, sys.unraisablehook = sys.unraisablehook, complaints.append
    try:
        with World(1) as world:
            host = world.host("a")
            host.start().create_task(main())
            world.run(limit_ns=SECOND)
            host.kill()
            world.run(limit_ns=SECOND)
            assert not seen
        gc.collect()
    finally:
        sys.unraisablehook = before
    assert seen == ["closed"]
    assert not complaints
