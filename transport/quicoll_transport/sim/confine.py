"""Keep the real world out of a simulated one: randomness, clocks, sockets, threads, sleep.

While a world is open, in its thread:

    the keys and ids of TLS and QUIC                from the world's seed
    os.urandom, and with it uuid4, secrets and numpy's default_rng()   likewise
    the global generators of random, numpy and torch    seeded, and put back afterwards
    time.time, monotonic, perf_counter and their _ns   the clocks of the host whose code runs, or the world's
    time.sleep, threading.Thread.start, socket.socket  raise Forbidden

Other threads (a test runner's watchdog) see the real functions. A name that was imported before (`from time import
sleep`) is out of reach, and so is `random.Random()` without a seed, which asks the kernel in C; asyncio itself, aioquic
and all of quicoll go through the modules.

Garbage is collected at fixed points of the run instead of whenever memory was taken often enough, because what a
collection finalises would otherwise run at another moment in another process. What was there before a world is not
looked at meanwhile; whoever runs many may see to that for all of them (`gc.freeze`), and then collects between them.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from quicoll_transport.sim.errors import Forbidden

if TYPE_CHECKING:
    from quicoll_transport.sim.timeline import Timeline

__all__ = ["WALL_EPOCH_NS", "confined"]

WALL_EPOCH_NS = 1_767_225_600_000_000_000  # 2026-01-01T00:00:00Z, the wall clock at the beginning of every world


@contextmanager
def confined(timeline: Timeline) -> Iterator[None]:
    """Replace everything in the table above while the context is open."""
    with ExitStack() as stack:
        stack.enter_context(_seeded(timeline))
        stack.enter_context(_replaced(timeline))
        stack.enter_context(_collected())
        yield


@contextmanager
def _seeded(timeline: Timeline) -> Iterator[None]:
    from quicoll_transport.quic import entropy

    rng = timeline.rng("entropy")
    kept = random.getstate()
    random.seed(f"{timeline.seed}/random")
    numpy: Any = sys.modules.get("numpy")
    numpy_kept = numpy.random.get_state() if numpy is not None else None
    if numpy is not None:
        numpy.random.seed(timeline.rng("numpy").getrandbits(32))
    torch: Any = sys.modules.get("torch")
    torch_kept = torch.get_rng_state() if torch is not None else None
    if torch is not None:
        torch.manual_seed(timeline.rng("torch").getrandbits(63))
    try:
        with entropy(rng.randbytes):
            yield
    finally:
        random.setstate(kept)
        if numpy is not None:
            numpy.random.set_state(numpy_kept)
        if torch is not None:
            torch.set_rng_state(torch_kept)


def _monotonic_ns(timeline: Timeline) -> int:
    loop = timeline.current
    return timeline.now_ns if loop is None else loop.host.clock.local(timeline.now_ns)


def _wall_ns(timeline: Timeline) -> int:
    loop = timeline.current
    return WALL_EPOCH_NS + timeline.elapsed_ns if loop is None else loop.host.clock.wall(timeline.now_ns)


@contextmanager
def _replaced(timeline: Timeline) -> Iterator[None]:
    thread = threading.get_ident()
    urandom = timeline.rng("urandom").randbytes

    def here(mine: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        def either(*args: Any, **settings: Any) -> Any:
            return (mine if threading.get_ident() == thread else real)(*args, **settings)

        return either

    def refuse(what: str, instead: str) -> Callable[..., Any]:
        def forbidden(*args: Any, **settings: Any) -> Any:
            if timeline.current is None:
                raise Forbidden(f"{what} inside a simulation: {instead}")
            raise Forbidden(f"{what} on the simulated host {timeline.current.host.name}: {instead}")

        return forbidden

    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (os, "urandom", urandom),
        (random, "_urandom", urandom),  # of SystemRandom, and so of secrets and of numpy's default_rng()
        (time, "time", lambda: _wall_ns(timeline) / 1e9),
        (time, "time_ns", lambda: _wall_ns(timeline)),
        (time, "monotonic", lambda: _monotonic_ns(timeline) / 1e9),
        (time, "monotonic_ns", lambda: _monotonic_ns(timeline)),
        (time, "perf_counter", lambda: _monotonic_ns(timeline) / 1e9),
        (time, "perf_counter_ns", lambda: _monotonic_ns(timeline)),
        (time, "sleep", refuse("time.sleep", "it would stop the clock of all hosts; await asyncio.sleep")),
        (
            threading.Thread,
            "start",
            refuse("a thread was started", "there is one thread; asyncio.to_thread works, and runs the function alone"),
        ),
        (socket.socket, "__init__", refuse("a real socket was made", "use the simulated network")),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for (owner, name, mine), (_, _, real) in zip(replacements, kept, strict=True):
            setattr(owner, name, here(mine, real))
        yield
    finally:
        for owner, name, real in kept:
            setattr(owner, name, real)


@contextmanager
def _collected() -> Iterator[None]:
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    if not was_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
