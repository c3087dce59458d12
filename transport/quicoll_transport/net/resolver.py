"""Names of hosts, looked up without being bound to the system's resolver.

`getaddrinfo` cannot be interrupted: while no name server answers, it keeps its thread for tens of seconds. A thread of
an executor would be waited for by asyncio.run and at the interpreter's end, and a few of them would take all of the
executor's places from the program. So a question has a daemon thread of its own, that nobody waits for longer than they
want to.

One question (host, port, family) is asked once at a time: who asks the same again joins the wait, so a link that dials
on while no name server answers holds one thread, not one more for each round.

`MOST` questions are under way at a time, as members may name hosts of their choice as their addresses. One more is
refused at once, and asked again when its link is dialled anew.

Failure cases: the answer comes when nobody waits any more, or when the loop is closed: it is dropped. No thread can be
started: that is the answer. What was asked is not remembered once it is answered; caching is the system's business.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future

from quicoll_transport.errors import AddressError
from quicoll_transport.net.addresses import Address, canonical

__all__ = ["MOST", "Resolver", "resolve_all", "scope_of"]

MOST = 64

_Question = tuple[str, int, int]


class Resolver:
    """The system's resolver. Every answer is of canonical addresses, in the resolver's order, or an AddressError."""

    def __init__(self) -> None:
        self._under_way: dict[_Question, Future[list[Address]]] = {}

    async def resolve(self, host: str, port: int, *, family: int = socket.AF_UNSPEC) -> list[Address]:
        """Return the addresses of `host`; cancel it to wait no longer."""
        return await asyncio.wrap_future(self._ask((host, port, family)))

    def resolve_blocking(
        self, host: str, port: int, *, timeout: float, family: int = socket.AF_UNSPEC
    ) -> list[Address]:
        """Do the same where there is no loop; AddressError also when there is no answer within `timeout` seconds."""
        try:
            return self._ask((host, port, family)).result(timeout)
        except TimeoutError:
            raise AddressError(_late(host, timeout)) from None

    def _ask(self, question: _Question) -> Future[list[Address]]:
        answer = self._under_way.get(question)
        if answer is None and len(self._under_way) >= MOST:
            answer = Future()
            answer.set_exception(AddressError(f"cannot resolve {question[0]!r}: {MOST} look-ups are under way already"))
        elif answer is None:
            answer = self._under_way[question] = Future()
            answer.set_running_or_notify_cancel()  # so that one who waits no longer cannot cancel it for the others
            answer.add_done_callback(lambda _: self._under_way.pop(question))
            thread = threading.Thread(
                target=_look_up, args=(answer, *question), name=f"look-up of {question[0]}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the host has no thread left
                answer.set_exception(AddressError(f"cannot resolve {question[0]!r}: {error}"))
        return answer


def _look_up(answer: Future[list[Address]], host: str, port: int, family: int) -> None:
    try:
        found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_DGRAM)
        answer.set_result([canonical(address, scope_of) for _, _, _, _, address in found])
    except (OSError, UnicodeError, OverflowError) as error:
        answer.set_exception(AddressError(f"cannot resolve {host!r}: {error}"))
    except BaseException as error:  # also what has no business here: whoever waits would wait for nothing
        answer.set_exception(error)


def _late(host: object, timeout: float) -> str:
    return f"no answer to the look-up of {host!r} within {timeout:g} s"


def scope_of(zone: str) -> int:
    """Return the number of a zone, "eth0" or "2". Raises ValueError where there is no such interface."""
    try:
        return socket.if_nametoindex(zone)
    except OSError:
        return int(zone)


async def resolve_all(
    addresses: Sequence[Address], resolve: Callable[[str, int], Awaitable[list[Address]]], *, timeout: float
) -> tuple[list[Address], list[str]]:
    """Return all of these in canonical form, names looked up together, and why others are missing; both in order.

    timeout: seconds for all.
    """
    tasks = [asyncio.ensure_future(resolve(str(a[0]), int(a[1]))) for a in addresses]
    try:
        await asyncio.wait(tasks, timeout=timeout)
        found: list[Address] = []
        failed: list[str] = []
        for task, address in zip(tasks, addresses, strict=True):
            if not task.done():
                failed.append(_late(address[0], timeout))
            elif (error := task.exception()) is not None:
                failed.append(str(error))
            else:
                found.extend(task.result())
        return found, failed
    finally:
        for task in tasks:
            task.cancel()
