"""How a rank comes into a job, and that it leaves it.

One way in, `_enter`, and one out, `Job.aclose`. `join` has a block between them, `connect` whatever its caller has: the
cells of a notebook, the set-up and the end of a server. What was begun for a rank outside of its engine (signal
handlers, the meeting with the other ranks) is held by its job and ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Unpack

from quicoll.config import Config, JoinSettings
from quicoll.engine.start import start
from quicoll.engine_process.starting import start_process
from quicoll.errors import LocalError, QuicollError, Terminated
from quicoll.job import Job
from quicoll.joining.unclosed import Unclosed
from quicoll.observability.flight_signals import sigusr1_records
from quicoll.rendezvous.meeting import meet_ranks, meets
from quicoll.step.protocol import at_work
from quicoll.stop import StopRequest, sigterm_asks, sigterm_tells

if TYPE_CHECKING:
    from quicoll.engine.face import EngineFace
    from quicoll.engine.runtime import Runtime
    from quicoll.observability.events import Observer
    from quicoll.observability.flight_signals import FlightFace
    from quicoll.rendezvous.meeting import Meeting

__all__ = ["attended", "connect", "join"]

log = logging.getLogger("quicoll")

_TELL_AFTER_S = 5.0
_TELL_EVERY_S = 300.0
_PATIENCE_S = 1.0  # for the others, of a rank that leaves by an error
_unclosed = Unclosed()


@asynccontextmanager
async def join(*, observer: Observer | None = None, **settings: Unpack[JoinSettings]) -> AsyncIterator[Job]:
    """Join a job as one rank: `async with quicoll.join(coordinator=..., node=..., ...) as job`.

    The context begins when the first view with this rank is at work. Leaving it leaves the job.

    Args:
        observer: Called with every `quicoll.Event` of this rank, on the engine's thread.
        **settings: See `quicoll.Config`. Where one is missing or None, its value comes from QUICOLL_*, then from what
            a launcher says (torchrun, srun, mpirun, Kubernetes), then from the default. Under torchrun, and with
            `rendezvous`, neither `coordinator` nor `certs` is needed: rank 0 starts a coordinator for this launch.
    Yields:
        The job.
    Raises:
        LocalError: A setting, a certificate or an address cannot work. Nothing was sent.
        PeerError: The coordinator cannot be reached or refuses this rank, or the view is not complete within
            join_timeout.
        JobDone: The other ranks have ended the job; there is nothing left to do.
        Terminated: SIGTERM came before the first view, with `handle_sigterm`.
    """
    async with attended(await _enter(observer, settings)) as job:
        yield job


async def connect(*, observer: Observer | None = None, **settings: Unpack[JoinSettings]) -> Job:
    """Join a job as one rank without a block: `job = await quicoll.connect(...)`, and at the end `await job.aclose()`.

    For notebooks, whose cells have no block in common, and for programs that begin and end in different functions.
    Elsewhere `join` is safer: it leaves the job however its block ends, and says by which error.

    A job that is not left when the process ends is left then, unfinished and with a warning in the log. The same node
    of the same job connects again, as in a cell that is run twice: what it had before is left first, with a warning.

    Args:
        observer: As `join`.
        **settings: As `join`.
    Returns:
        The job, once the first view with this rank is at work.
    Raises:
        LocalError: As `join`.
        PeerError: As `join`.
        JobDone: As `join`.
        Terminated: As `join`.
    """
    return await _enter(observer, settings, _unclosed)


async def _enter(observer: Observer | None, settings: JoinSettings, unclosed: Unclosed | None = None) -> Job:
    """Come in. unclosed: holds the job until it is left."""
    stop = StopRequest()
    held = AsyncExitStack()
    try:
        try:
            config, meeting = await _settle(settings, held)
            if config.handle_sigterm:
                held.enter_context(sigterm_asks(stop, insist=True))
            if unclosed is not None:
                await unclosed.replace((config.job, config.node))
            begin = start_process if config.engine == "process" else start
            engine, runtime = await begin(config, observer=observer)
        except LocalError as error:
            # It says what is wrong and what to do; how that was found out is of no interest to who reads the traceback.
            raise error.with_traceback(None) from None
        try:
            with stop.interrupting(), _telling(engine, runtime, engine.config):
                view = at_work(await runtime.call(engine.wait_view(config.join_timeout, joining=True)))
        except BaseException:
            await _shut(engine, runtime)
            raise
        if meeting is not None:
            meeting.close()
        if (flight := engine.observers.flight) is not None and config.flight_dir is not None:
            held.enter_context(sigterm_tells(partial(_tell_of_sigterm, flight)))
            held.enter_context(sigusr1_records(flight))
    except BaseException:
        await held.aclose()
        raise
    job = Job(engine.config, engine, runtime, view, stop, held)
    if unclosed is not None:
        held.callback(unclosed.hold((config.job, config.node), job))
    return job


async def _settle(settings: JoinSettings, stack: AsyncExitStack) -> tuple[Config, Meeting | None]:
    """Find the settings; where they name no coordinator and ranks can meet, it and certificates come from there."""
    named = Config.named(**settings)
    if not meets(named, os.environ):
        return await Config.resolve_in_loop(**settings), None
    meeting = await stack.enter_async_context(meet_ranks(named, os.environ))
    return meeting.sourced(await Config.resolve_in_loop(**meeting.settings(settings))), meeting


@asynccontextmanager
async def attended(job: Job) -> AsyncIterator[Job]:
    """Leave the job at the block's end, however it ends. A step that was left to be decided is decided first."""
    try:
        yield job
        await job.aclose()
    except BaseException as error:
        reason = "terminated" if isinstance(error, Terminated) else type(error).__name__
        if (flight := job.internals.engine.observers.flight) is not None and isinstance(error, QuicollError):
            flight.left(f"{reason}: {error}")  # of other errors the text is the program's, which may be secret
        patience = min(job.config.timeout, _PATIENCE_S)
        await job.aclose(reason, patience=patience, finished=False)
        raise


@contextmanager
def _telling(engine: EngineFace, runtime: Runtime, config: Config) -> Iterator[None]:
    """Say what is waited for, in the log, while this rank joins: soon, and then ever more rarely.

    Who has started the ranks by hand may have forgotten one, or have named a wrong port, and would hear of it only when
    `join_timeout` is over.
    """

    async def tell() -> None:
        wait = _TELL_AFTER_S
        while True:
            await asyncio.sleep(wait)
            wait = min(2 * wait, _TELL_EVERY_S)
            try:
                missing = await runtime.call(engine.what_is_missing())
            except QuicollError:
                return  # who waits for the view is told
            if missing:
                log.warning("%s: waits: %s (join_timeout %g s)", config.node, missing, config.join_timeout)

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()


def _tell_of_sigterm(flight: FlightFace) -> None:
    flight.asked("SIGTERM has come")
    flight.flush()


async def _shut(engine: EngineFace, runtime: Runtime) -> None:
    try:
        await runtime.call(engine.aclose("not joined"))
    finally:
        await runtime.aclose()
