"""The coordinator of a launch that has no other: a process of its own, started by rank 0, `python -m` this module.

It gets what it needs in one line of JSON on standard input, keys among it, so nothing of that is on a command line; it
answers with one line, its address. Then it listens to nobody but its members, and to the end of standard input.

    serving --input ends, SIGTERM or SIGINT--> waiting for its members to go --no links for a while--> ended

So it outlives rank 0 while others still need decisions, as at the end of a job, and no launcher finds it left behind. A
launcher that signals all processes of a group does not take the coordinator from ranks that end in order.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quicoll.errors import QuicollError
from quicoll.membership.serving import serve
from quicoll.observability.events import JsonLines
from quicoll.rendezvous.applicant import write_credentials
from quicoll.rendezvous.scratch import scratch_directory
from quicoll_transport.errors import TransportError
from quicoll_transport.security.identity import COORDINATOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.membership.service import CoordinatorService
    from quicoll.observability.events import Event

__all__ = ["main"]

_POLL_S = 0.1
_LINGER_S = 3.0
"""Without links, after the end of rank 0: as long as a rank may take to dial again."""
_SIGNALLED_S = 30.0
"""At most, after a signal: what launchers give a group until they kill it."""


def main() -> int:
    """Serve one job. Returns the exit status: 0, or 2 for an error, which is one line on stderr."""
    try:
        order: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
        with scratch_directory() as directory:
            write_credentials(
                directory, role=COORDINATOR, node=COORDINATOR, authority=order["authority"],
                certificate=order["certificate"], key=order["key"],
            )  # fmt: skip
            asyncio.run(_serve(order, directory))
    except (QuicollError, TransportError, OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"quicoll: the coordinator that rank 0 has started: {' '.join(str(error).split())}\n")
        return 2
    return 0


async def _serve(order: dict[str, Any], directory: Path) -> None:
    loop = asyncio.get_running_loop()
    writer = JsonLines(Path(order["events"]) / f"{COORDINATOR}.jsonl") if order["events"] else None
    services: list[CoordinatorService] = []
    done: list[bool] = []

    def observe(event: Event) -> None:
        if writer is not None:
            writer(event)
        if event.kind == "listening":
            sys.stdout.write(f"{event.fields['address']}\n")
            sys.stdout.flush()
        if event.kind == "job_done":
            done.append(True)

    over = asyncio.Event()
    signalled = asyncio.Event()

    def end() -> None:
        signalled.set()
        over.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    transport, _ = await loop.connect_read_pipe(lambda: _Until(over.set), sys.stdin)
    optional = {name: order[name] for name in ("seed", "lost_after") if order[name] is not None}
    serving = asyncio.create_task(
        serve(
            listen=order["listen"],
            job=order["job"],
            certs=directory,
            journal=directory / "journal.sqlite",
            fsync=False,  # nobody reads it after this process
            world_size=order["world_size"],
            observer=observe,
            ready=services.append,
            **optional,
        )
    )
    watching = asyncio.create_task(_watch(services, over, signalled, done))
    try:
        await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (serving, watching):
            task.cancel()
        ended = await asyncio.gather(serving, return_exceptions=True)
        transport.close()
        if writer is not None:
            writer.close()
    if isinstance(ended[0], Exception):
        raise ended[0]


async def _watch(
    services: list[CoordinatorService], over: asyncio.Event, signalled: asyncio.Event, done: list[bool]
) -> None:
    """Return when nobody needs the coordinator any more."""
    await over.wait()
    loop = asyncio.get_running_loop()
    quiet_since: float | None = None
    asked: float | None = None
    while True:
        now = loop.time()
        if signalled.is_set():
            asked = now if asked is None else asked
            if now - asked >= _SIGNALLED_S:
                return
        if any(service.endpoint.links for service in services):
            quiet_since = None
        else:
            quiet_since = now if quiet_since is None else quiet_since
            if done or signalled.is_set() or now - quiet_since >= _LINGER_S:
                return
        await asyncio.sleep(_POLL_S)


class _Until(asyncio.Protocol):
    """Calls once when the other end of a pipe is closed; what is written there is not read."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def connection_lost(self, exc: Exception | None) -> None:
        self._call()


if __name__ == "__main__":
    sys.exit(main())
