"""Inside a world there is no real clock, chance, sleep, thread or socket; outside of it all is as before."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from aioquic.quic import connection as quic_connection

from quicoll_transport.sim import WALL_EPOCH_NS, Forbidden, World

SECOND = 1_000_000_000

REPLACED = [
    (os, "urandom"),
    (time, "time"),
    (time, "time_ns"),
    (time, "monotonic"),
    (time, "monotonic_ns"),
    (time, "perf_counter"),
    (time, "perf_counter_ns"),
    (time, "sleep"),
    (threading.Thread, "start"),
    (socket.socket, "__init__"),
]


def on_host(world: World, look: Callable[[], Any], *, name: str = "h", after_s: float = 0.0) -> Any:
    """What `look()` gives when the code of a host calls it."""
    seen: list[Any] = []
    host = world.hosts.get(name) or world.host(name)
    loop = host.loop or host.start()
    loop.call_later(after_s, lambda: seen.append(look()))
    world.run(lambda: bool(seen), limit_ns=round((after_s + 1) * SECOND))
    return seen[0]


def clocks() -> tuple[int, int, float, float, int]:
    return time.monotonic_ns(), time.perf_counter_ns(), time.monotonic(), time.time(), time.time_ns()


def test_a_host_s_code_sees_its_own_clocks_and_other_code_the_world_s() -> None:
    with World(1) as world:
        assert time.monotonic_ns() == time.perf_counter_ns() == world.now_ns
        assert time.time_ns() == WALL_EPOCH_NS
        host = world.host("h")
        host.clock.step_wall(-3 * SECOND)
        host.set_drift(100_000)
        monotonic, counter, seconds, wall, wall_ns = on_host(world, clocks, after_s=11)
        begun = 1001 * SECOND  # a host's monotonic clock is not the world's
        assert monotonic == counter == begun + 11 * SECOND
        assert seconds == monotonic / 1e9
        assert wall_ns == WALL_EPOCH_NS + 8 * SECOND
        assert wall == wall_ns / 1e9
        assert time.time_ns() == WALL_EPOCH_NS + world.elapsed_ns == WALL_EPOCH_NS + 10 * SECOND


def test_sleep_threads_and_sockets_are_refused_and_say_where_and_what_instead() -> None:
    with World(1) as world:

        def attempt(act: Callable[[], object]) -> str:
            with pytest.raises(Forbidden) as caught:
                act()
            return str(caught.value)

        acts: list[tuple[Callable[[], object], str]] = [
            (lambda: time.sleep(0), "time.sleep"),
            (lambda: threading.Thread(target=int).start(), "a thread was started"),
            (lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM), "a real socket was made"),
        ]
        for act, what in acts:
            assert attempt(act).startswith(f"{what} inside a simulation: ")
            assert on_host(world, lambda act=act: attempt(act)).startswith(f"{what} on the simulated host h: ")


def test_a_blocking_sleep_in_a_task_is_the_task_s_error() -> None:
    async def life() -> None:
        time.sleep(1)  # noqa: ASYNC251 - what is refused

    with World(1) as world:
        task = world.host("h").start().create_task(life())
        world.run(task.done, limit_ns=SECOND)
        with pytest.raises(Forbidden, match=r"time\.sleep on the simulated host h: .*await asyncio\.sleep"):
            task.result()


def test_everything_is_restored_afterwards_also_after_an_error() -> None:
    before = [getattr(owner, name) for owner, name in REPLACED]
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()

    def fail() -> None:
        with World(1):
            during = [getattr(owner, name) for owner, name in REPLACED]
            assert all(one is not other for one, other in zip(before, during, strict=True))
            assert not gc.isenabled()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [getattr(owner, name) for owner, name in REPLACED] == before
    assert gc.isenabled() == enabled
    assert (gc.get_freeze_count() > 0) == (frozen > 0), "what others have frozen stays so"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
        time.sleep(0)


def test_other_threads_see_the_real_world() -> None:
    begin, found = threading.Event(), []

    def watch() -> None:
        begin.wait(60)
        before = time.monotonic()
        time.sleep(0.001)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
            helper = threading.Thread(target=lambda: found.append(time.time_ns() // SECOND))
            helper.start()
            helper.join()
        found.append(time.monotonic() > before)

    thread = threading.Thread(target=watch)
    thread.start()
    real = time.time_ns() // SECOND
    with World(1) as world:
        begin.set()
        thread.join()
        assert time.monotonic_ns() == world.now_ns
    assert found[1]
    assert 0 <= found[0] - real < 3600


def draws() -> list[Any]:
    """From every source of chance that code may use without a seed of its own."""
    return [
        quic_connection.os.urandom(8),  # aioquic's own name of the module
        os.urandom(8),
        secrets.token_bytes(8),
        uuid.uuid4().hex,
        random.random(),
        float(np.random.rand()),
        float(np.random.default_rng().random()),
        float(torch.rand(1)),
    ]


def test_chance_is_the_seed_s() -> None:
    drawn: dict[int, list[list[Any]]] = {}
    for seed in (1, 2, 1):
        with World(seed) as world:
            drawn.setdefault(seed, []).append(draws() + on_host(world, draws))
    assert drawn[1][0] == drawn[1][1]
    assert all(one != other for one, other in zip(drawn[1][0], drawn[2][0], strict=True))


def test_global_generators_are_put_back_afterwards() -> None:
    def after(inside: Callable[[], None]) -> list[float]:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        inside()
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    def simulate() -> None:
        with World(1):
            draws()

    assert after(simulate) == after(lambda: None)


def test_generators_depend_on_seed_and_label_alone() -> None:
    world = World(7)
    first = world.rng("a").random()
    world.rng("b").random()
    assert world.rng("a").random() == first
    assert World(7).rng("a").random() == first
    assert len({first, world.rng("b").random(), World(8).rng("a").random()}) == 3


def test_worlds_one_after_the_other_and_an_outer_loop_are_not_disturbed() -> None:
    async def main() -> list[int]:
        found = []
        for seed in (1, 2):
            with World(seed) as world:
                world.host("h").start().call_later(5, lambda world=world: found.append(world.elapsed_ns // SECOND))
                world.run(limit_ns=10 * SECOND)
            await asyncio.sleep(0)
        return found

    assert asyncio.run(main()) == [5, 5]
