"""What a program's engine has beside itself (votes, events, certificates), where it is in another process."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from quicoll.engine_process.words import AwaitDecision, CastVote, decision_of
from quicoll.lanes.shown import shown

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from quicoll.engine.answers import Cancellable
    from quicoll.engine.decisions import Decision
    from quicoll.engine_process.words import ProgramWord
    from quicoll.observability.stragglers import Straggler
    from quicoll_transport.security.access import Access
    from quicoll_transport.security.credentials import Credentials

__all__ = [
    "ProxyCertificates",
    "ProxyEndpoint",
    "ProxyFlight",
    "ProxyObservers",
    "ProxyStragglers",
    "ProxyVoting",
    "Telling",
]


class Telling(Protocol):
    """As `quicoll.engine_process.proxy.EngineProxy` has each of these."""

    def soon(self, work: Callable[[], None]) -> None: ...
    def tell_about(self, what: str, *arguments: object) -> None: ...
    async def ask(self, what: str, *arguments: object) -> Any: ...
    def wait(
        self,
        word: Callable[..., ProgramWord],
        kind: str,
        ended: Callable[[Any, BaseException | None], None],
        made: Callable[[Any], Any] = ...,
    ) -> Cancellable | None: ...


class ProxyObservers:
    """Where the program's own events go: to the engine, whose observers get them, and from there to the program's.

    flight: the engine's recorder, where it has one.
    """

    def __init__(self, proxy: Telling) -> None:
        """Of a proxy."""
        self._proxy = proxy
        self.flight: ProxyFlight | None = None

    def emit(self, kind: str, **fields: object) -> None:
        """As `Observers.emit`."""
        self._proxy.tell_about("emit", kind, json.dumps(fields, default=str).encode())


class ProxyFlight:
    """The engine's flight recorder. Every method may be called from any thread, and in a signal handler."""

    def __init__(self, proxy: Telling, node: str) -> None:
        """Of a proxy, for this rank."""
        self._proxy = proxy
        self.node = node

    def left(self, reason: str) -> None:
        """As `FlightRecorder.left`."""
        self._proxy.soon(partial(self._proxy.tell_about, "flight_left", reason))

    def asked(self, why: str) -> None:
        """As `FlightRecorder.asked`; the file is written at once."""
        self._proxy.soon(partial(self._proxy.tell_about, "flight_asked", why))

    def stack(self, node: str, text: str) -> None:
        """As `FlightRecorder.stack`."""
        self._proxy.soon(partial(self._proxy.tell_about, "flight_stack", node, text))

    def flush(self) -> None:
        """Nothing: what was asked for is written at once, and by a process that outlives this one."""


class ProxyEndpoint:
    """What of an endpoint a program asks for. wall_clock: date and time, aware."""

    def __init__(self, wall_clock: Callable[[], datetime]) -> None:
        """Begin without credentials."""
        self.wall_clock = wall_clock
        self._credentials: Credentials | None = None

    @property
    def credentials(self) -> Credentials:
        """The rank's own, as they are in force."""
        if self._credentials is None:
            raise AssertionError("an engine without credentials")
        return self._credentials

    @credentials.setter
    def credentials(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def gather(self) -> None:
        """Nothing: words go one by one."""

    def send_gathered(self) -> None:
        """Nothing."""


class ProxyStragglers:
    """table: as `Stragglers` has it."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self.table: tuple[Straggler, ...] = ()


class ProxyCertificates:
    """As `quicoll.engine.certificates.Certificates`."""

    def __init__(self, proxy: Telling, endpoint: ProxyEndpoint) -> None:
        """Of a proxy, whose endpoint has the rank's credentials."""
        self._proxy = proxy
        self._endpoint = endpoint

    async def rotate(self, access: Access) -> str:
        """As `Certificates.rotate`.

        Args:
            access: What the rank's files say.
        Raises:
            LocalError: As `Certificates.rotate`.
        """
        fingerprint: str = await self._proxy.ask("rotate", shown(access.credentials), access.denied)
        self._endpoint.credentials = access.credentials
        return fingerprint

    async def deny(self, fingerprint: str) -> None:
        """As `Certificates.deny`."""
        await self._proxy.ask("deny", fingerprint)


class ProxyVoting:
    """As `quicoll.engine.voting.Voting`."""

    def __init__(self, proxy: Telling) -> None:
        """Of a proxy."""
        self._proxy = proxy

    def begin(self, view_id: int, number: int) -> None:
        """As `Voting.begin`."""
        self._proxy.tell_about("begin_step", view_id, number)

    def vote(
        self,
        view_id: int,
        digest: bytes,
        groups: tuple[tuple[int, bytes], ...],
        ended: Callable[[Decision | None, BaseException | None], None],
        *,
        timeout: float,
        unfinished: tuple[str, ...],
    ) -> Cancellable | None:
        """As `Voting.vote`."""
        word = partial(CastVote, view=view_id, digest=digest, groups=groups, timeout=timeout, unfinished=unfinished)
        return self._proxy.wait(word, "decision", ended, decision_of)

    def decision(
        self,
        view_id: int,
        index: int,
        ended: Callable[[Decision | None, BaseException | None], None],
        *,
        timeout: float,
    ) -> Cancellable | None:
        """As `Voting.decision`."""
        word = partial(AwaitDecision, view=view_id, index=index, timeout=timeout)
        return self._proxy.wait(word, "decision", ended, decision_of)

    async def unanswered(self, view_id: int, reason: str) -> tuple[int, int] | None:
        """As `Voting.unanswered`."""
        cast: tuple[int, int] | None = await self._proxy.ask("unanswered", view_id, reason)
        return cast
