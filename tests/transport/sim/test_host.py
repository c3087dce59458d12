"""A simulated machine: every state and action of its table, and what a process is when it is paused, slow or gone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import quicoll_transport.sim.host as host_module
from quicoll_transport.errors import AddressError, ConfigurationError
from quicoll_transport.sim import Host, HostState, SimulatedSocket, World

SECOND = 1_000_000_000
ACTIONS = ("start", "pause", "resume", "kill", "power_off", "power_on")
OFF, IDLE, RUNNING, PAUSED = HostState.OFF, HostState.IDLE, HostState.RUNNING, HostState.PAUSED
TABLE = {
    OFF: {"power_on": IDLE},
    IDLE: {"start": RUNNING, "kill": IDLE, "power_off": OFF},
    RUNNING: {"pause": PAUSED, "kill": IDLE, "power_off": OFF},
    PAUSED: {"resume": RUNNING, "kill": IDLE, "power_off": OFF},
}
WAY = {OFF: ["power_off"], IDLE: [], RUNNING: ["start"], PAUSED: ["start", "pause"]}


@pytest.fixture
def world() -> Iterator[World]:
    with World(1) as made:
        yield made


def in_state(world: World, state: HostState) -> Host:
    host = world.host("h")
    for action in WAY[state]:
        getattr(host, action)()
    assert host.state is state
    return host


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("state", list(HostState))
def test_every_pair_of_state_and_action(world: World, state: HostState, action: str) -> None:
    host = in_state(world, state)
    expected = TABLE[state].get(action)
    lives, loop = host.lives, host.loop
    if expected is None:
        with pytest.raises(ConfigurationError, match=f"h is {state.value}: it cannot {action.replace('_', ' ')}"):
            getattr(host, action)()
        assert (host.state, host.lives, host.loop) == (state, lives, loop)
        return
    getattr(host, action)()
    assert host.state is expected
    assert (host.loop is not None) == (expected in (RUNNING, PAUSED))
    assert host.up == (expected is not OFF)
    assert host.lives == lives + (action == "start")
    if loop is not None and action in ("kill", "power_off"):
        assert loop.dead


def test_the_table_of_the_documentation_is_this_one() -> None:
    lines = Path(host_module.__file__).with_name("host.py").read_text().splitlines()  # where it is compiled, too
    head = next(line for line in lines if line.split()[:1] == ["state"])
    assert tuple(head.split()[1:]) == ACTIONS
    for state in HostState:
        row = next(line.split() for line in lines if re.match(rf"\s+{state.name}\s", line))
        assert row[1:] == [TABLE[state][action].name if action in TABLE[state] else "-" for action in ACTIONS]


def test_a_killed_process_runs_not_one_more_line(world: World) -> None:
    host, seen = world.host("h"), []

    async def life() -> None:
        try:
            for n in range(10):
                seen.append(n)
                await asyncio.sleep(1)
        finally:
            seen.append(-1)

    host.start().create_task(life())
    world.run(limit_ns=3 * SECOND + 1)
    assert seen == [0, 1, 2, 3]
    host.kill()
    world.run(limit_ns=10 * SECOND)
    assert seen == [0, 1, 2, 3]
    world.close()
    assert seen == [0, 1, 2, 3, -1], "its remains are closed at the very end"


def test_what_a_dead_process_schedules_never_runs(world: World) -> None:
    host, seen = world.host("h"), []
    loop = host.start()
    loop.call_soon(seen.append, "soon")
    loop.call_later(1, seen.append, "later")
    host.kill()
    loop.call_soon(seen.append, "dead soon")
    loop.call_later(1, seen.append, "dead later")
    world.run(limit_ns=5 * SECOND)
    assert seen == []
    assert loop.is_closed()
    assert loop.timers == []


def test_a_new_process_has_a_loop_and_ports_of_its_own(world: World) -> None:
    host = world.host("h")
    first = host.start()
    old = SimulatedSocket(first, 4433)
    host.kill()
    second = host.start()
    assert (host.lives, first.dead, second.dead) == (2, True, False)
    with pytest.raises(AddressError, match="the process on h is gone"):
        SimulatedSocket(first, 4434)
    with pytest.raises(AddressError, match="is closed"):
        old.start(lambda datagrams: None, lambda address, trouble: None)
    new = SimulatedSocket(second, 4433)
    old.close()
    assert host.sockets == {4433: new}


def test_a_paused_process_finds_its_timers_overdue_in_their_order(world: World) -> None:
    host = world.host("h")
    loop = host.start()
    seen: list[tuple[int, int]] = []
    for second in (3, 1, 2, 8):
        loop.call_later(second, lambda second=second: seen.append((second, world.elapsed_ns // SECOND)))
    host.pause()
    world.run(limit_ns=5 * SECOND)
    assert seen == []
    host.resume()
    world.run(limit_ns=5 * SECOND)
    assert seen == [(1, 5), (2, 5), (3, 5), (8, 8)]


def test_a_process_that_is_killed_while_paused_runs_nothing_of_it(world: World) -> None:
    host, seen = world.host("h"), []
    host.start().call_later(1, seen.append, 1)
    host.pause()
    world.run(limit_ns=2 * SECOND)
    host.kill()
    host.start().call_soon(seen.append, "new")
    world.run(limit_ns=2 * SECOND)
    assert seen == ["new"]


def test_pausing_again_in_the_middle_of_the_backlog_keeps_the_rest(world: World) -> None:
    host = world.host("h")
    loop = host.start()
    seen: list[int] = []

    def note(n: int) -> None:
        seen.append(n)
        if n == 2:
            host.pause()

    for n in range(5):
        loop.call_later(1, note, n)
    host.pause()
    world.run(limit_ns=2 * SECOND)
    host.resume()
    world.run(limit_ns=SECOND)
    assert seen == [0, 1, 2]
    host.resume()
    world.run(limit_ns=SECOND)
    assert seen == [0, 1, 2, 3, 4]


def test_each_callback_of_a_slow_process_takes_time_and_order_stays(world: World) -> None:
    slow, quick = world.host("slow"), world.host("quick")
    slow.slow_ns = 1_000_000
    seen: list[tuple[str, int, int]] = []
    for host in (slow, quick):
        loop = host.start()
        for n in range(3):
            loop.call_soon(lambda host=host, n=n: seen.append((host.name, n, world.elapsed_ns)))
    world.run(limit_ns=SECOND)
    assert [each for each in seen if each[0] == "quick"] == [("quick", n, 0) for n in range(3)]
    assert [each for each in seen if each[0] == "slow"] == [("slow", n, n * 1_000_000) for n in range(3)]


def test_a_process_that_is_slow_no_more_catches_up(world: World) -> None:
    host = world.host("h")
    host.slow_ns = SECOND
    loop = host.start()
    seen: list[tuple[int, int]] = []
    for n in range(10):
        loop.call_soon(lambda n=n: seen.append((n, world.elapsed_ns // SECOND)))
    world.run(limit_ns=3 * SECOND - 1)
    host.slow_ns = 0
    world.run(limit_ns=SECOND)
    assert seen == [(0, 0), (1, 1), (2, 2), *((n, 3) for n in range(3, 10))]


@pytest.mark.parametrize(("ppm", "due"), [(100_000, 10 * SECOND * 10 // 11), (-100_000, 10 * SECOND * 10 // 9)])
def test_a_drifting_host_s_timers_follow_its_clock(world: World, ppm: int, due: int) -> None:
    host = world.host("h")
    seen: list[int] = []
    host.start().call_later(10, lambda: seen.append(world.elapsed_ns))
    host.set_drift(ppm)
    world.run(limit_ns=20 * SECOND)
    assert len(seen) == 1
    assert 0 <= seen[0] - due <= 1


def test_a_leap_makes_what_it_passes_due_at_once(world: World) -> None:
    host, other = world.host("h"), world.host("o")
    seen: list[tuple[str, int]] = []
    for each in (host, other):
        loop = each.start()
        for seconds in (1, 5):
            loop.call_later(seconds, lambda each=each: seen.append((each.name, world.elapsed_ns // SECOND)))
    host.leap(2 * SECOND)
    world.run(limit_ns=10 * SECOND)
    assert seen == [("h", 0), ("o", 1), ("h", 3), ("o", 5)]
    with pytest.raises(ConfigurationError, match="never goes back"):
        host.leap(-1)


def test_no_two_hosts_show_the_same_monotonic_time(world: World) -> None:
    hosts = [world.host(name) for name in "abc"]
    assert len({host.clock.local(world.now_ns) for host in hosts}) == 3
    assert len({host.clock.wall(world.now_ns) for host in hosts}) == 1
