"""Start an engine in a process of its own: what `engine="process"` does in the place of quicoll.engine.start.start."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from typing import TYPE_CHECKING, Final

from quicoll.engine.runtime import ThreadRuntime
from quicoll.engine.start import own_credentials
from quicoll.engine_process.proxy import EngineProxy
from quicoll.engine_process.words import OpenEngine
from quicoll.errors import LocalError
from quicoll.lanes.shown import shown
from quicoll.lanes.side import SideProcess
from quicoll.local.arena import arena_here
from quicoll.local.sealing import unusable
from quicoll.observability.events import Observers
from quicoll.observability.logs import hear
from quicoll.observability.thread_stacks import thread_stacks

if TYPE_CHECKING:
    from quicoll.config import Config
    from quicoll.engine.runtime import Runtime
    from quicoll.observability.events import Observer
    from quicoll_transport.security.credentials import Credentials

__all__ = ["nice_of", "start_beside", "start_process"]

_SHARE: Final = 0.07  # of a processor that others want, where none is named
_START_S: Final = 60.0  # for a process to be there


def nice_of(share: float | str) -> int:
    """Return how far a process has to step back to get a share of a processor that one other wants: Linux gives each
    step of nice 1.25 times less (sched(7)).

    Args:
        share: As the setting `engine_share` has it.
    """
    part = _SHARE if isinstance(share, str) else share
    return 0 if part >= 0.5 else min(19, round(math.log((1 - part) / part, 1.25)))


async def start_process(config: Config, *, observer: Observer | None = None) -> tuple[EngineProxy, Runtime]:
    """Start an engine from its settings, in a process of its own.

    Args:
        config: Settings of the rank.
        observer: Gets every event, on a thread of its own.
    Returns:
        The engine, and the runtime by which it is spoken to.
    Raises:
        LocalError: Settings, certificates or an address cannot work, or there can be no such process here.
    """
    if config.log is not None:
        hear(config.log)
    credentials = own_credentials(config)
    runtime = ThreadRuntime(config.node, share=None, lost_after=config.lost_after)
    try:
        return await start_beside(config, credentials=credentials, runtime=runtime, observer=observer), runtime
    except BaseException:
        await runtime.aclose()
        raise


async def start_beside(
    config: Config, *, credentials: Credentials, runtime: Runtime, observer: Observer | None, incarnation: int = 0
) -> EngineProxy:
    """Start an engine in a process of its own, by a runtime that is there.

    Args:
        config: Settings of the rank.
        credentials: The rank's own.
        runtime: By which it is spoken to.
        observer: Gets every event, on the runtime's loop.
        incarnation: As `quicoll.membership.incarnation.first` gives it; 0 draws one.
    Returns:
        The engine.
    Raises:
        LocalError: As `start_process`.
    """
    refused = unusable()
    arena = None if refused else arena_here()
    if arena is None:
        refused = refused or "the process's addresses are limited (ulimit -v)"
        raise LocalError(f"engine = 'process' (from {config.sources['engine']}): {refused}")
    loop, made = runtime.loop, list[EngineProxy]()

    async def make() -> EngineProxy:
        observers = Observers(config.node, lambda: round(loop.time() * 1e9), observer)
        proxy = EngineProxy(config, loop=loop, arena=arena, observers=observers, stacks=thread_stacks)
        try:
            process = SideProcess(
                "quicoll.engine_process.process",
                (os.dup(arena.own_descriptor),),
                name="quicoll-engine",
                loop=loop,
                on_message=proxy.hear,
                on_end=proxy.process_ended,
            )
        except OSError as error:
            raise LocalError(f"the engine's process cannot be started: {error}") from error
        proxy.use(process)
        made.append(proxy)
        proxy.endpoint.credentials = credentials
        settings = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
        # Of the program alone: what shares the host's memory, who hears the log, and where the engine is.
        settings |= {"engine": "thread", "local": False, "log": None}
        proxy.tell(
            OpenEngine(
                parent=os.getpid(),
                settings=json.dumps(settings).encode(),
                shown=shown(credentials),
                incarnation=incarnation,
                nice=nice_of(config.engine_share),
                log_level=logging.getLogger("quicoll").getEffectiveLevel(),
            )
        )
        await proxy.opening(_START_S)
        return proxy

    async def unmake() -> None:
        for proxy in made:  # its maker was cancelled, and it is there all the same
            await proxy.aclose("not joined")

    try:
        return await runtime.call(make())
    except BaseException:
        await runtime.call(unmake())
        raise
