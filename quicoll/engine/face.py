"""What a rank's program asks of its engine, wherever that runs: beside it in a thread (engine.py), or in a process of
its own (quicoll.engine_process).

Everything is asked on the loop of the runtime that comes with it, but for what says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from quicoll.config import Config
    from quicoll.engine.answers import Cancellable
    from quicoll.engine.block_lessons import BlockTraffic
    from quicoll.engine.calls import Call
    from quicoll.engine.decisions import Decision
    from quicoll.engine.in_flight import Ended
    from quicoll.engine.lessons import LessonTraffic
    from quicoll.engine.messenger import Messenger
    from quicoll.engine.neighbourhood import Neighbourhood
    from quicoll.errors import QuicollError
    from quicoll.membership.member.actions import Dismissal, FreeToLeave, JobOver
    from quicoll.membership.view import View
    from quicoll.numerics.dtypes import Array
    from quicoll.observability.flight_signals import FlightFace
    from quicoll.observability.stragglers import Straggler
    from quicoll_transport.events import LinkSnapshot
    from quicoll_transport.security.access import Access
    from quicoll_transport.security.credentials import Credentials

__all__ = ["CertificatesFace", "EmittingFace", "EndpointFace", "EngineFace", "StragglersFace", "VotingFace"]


class EngineFace(Protocol):
    """As `quicoll.engine.engine.Engine` has each of these."""

    lessons: LessonTraffic
    block_lessons: BlockTraffic

    @property
    def config(self) -> Config: ...
    @property
    def observers(self) -> EmittingFace: ...
    @property
    def endpoint(self) -> EndpointFace: ...
    @property
    def voting(self) -> VotingFace: ...
    @property
    def certificates(self) -> CertificatesFace: ...
    @property
    def stragglers(self) -> StragglersFace: ...
    @property
    def view_at_work(self) -> int:
        """From any thread."""
        ...

    @property
    def result_memory(self) -> Callable[[int], Array] | None:
        """What gives memory for results of which the engine is to write some, as `Recycler` takes it; None: any is
        fine."""
        ...

    async def wait_view(
        self, timeout: float | None, *, joining: bool = False, after: int = 0
    ) -> View | JobOver | Dismissal | FreeToLeave: ...
    async def what_is_missing(self) -> str: ...
    def collective(
        self,
        view_id: int,
        call: Call,
        ended: Ended,
        *,
        group: int,
        timeout: float,
        step: int | None,
        number: int | None = None,
    ) -> Cancellable | None: ...
    def near(self, view_id: int) -> Neighbourhood | None:
        """From any thread."""
        ...

    def next_call(
        self, view_id: int, groups: Mapping[int, int], timeout: float, step: int | None, ended: Ended
    ) -> Cancellable | None: ...
    def divide(self, view_id: int) -> None: ...
    async def give_up(self, view_id: int, reason: str) -> None: ...
    async def break_view(self, view_id: int, error: QuicollError) -> None: ...
    async def ask_to_leave(self) -> bool: ...
    async def step_out(self, view_id: int) -> None: ...
    def step_in(self) -> None: ...
    def owns_state(self) -> None: ...
    async def parted(self) -> None: ...
    def state_received(self, rank: int, step: int, index: int, confirmed_by: tuple[str, ...]) -> None: ...
    def state_torn(self, step: int, cause: str) -> None: ...
    def worker_links(self) -> Mapping[str, Messenger]: ...
    async def links(self) -> tuple[LinkSnapshot, ...]: ...
    async def aclose(self, reason: str, *, patience: float = 0.0, finished: int | None = None) -> None: ...


class VotingFace(Protocol):
    """As `quicoll.engine.voting.Voting` has each of these."""

    def begin(self, view_id: int, number: int) -> None: ...
    def vote(
        self,
        view_id: int,
        digest: bytes,
        groups: tuple[tuple[int, bytes], ...],
        ended: Callable[[Decision | None, BaseException | None], None],
        *,
        timeout: float,
        unfinished: tuple[str, ...],
    ) -> Cancellable | None: ...
    def decision(
        self,
        view_id: int,
        index: int,
        ended: Callable[[Decision | None, BaseException | None], None],
        *,
        timeout: float,
    ) -> Cancellable | None: ...
    async def unanswered(self, view_id: int, reason: str) -> tuple[int, int] | None: ...


class EmittingFace(Protocol):
    """As `quicoll.observability.events.Observers` has each of these."""

    @property
    def flight(self) -> FlightFace | None: ...
    def emit(self, kind: str, **fields: object) -> None: ...


class EndpointFace(Protocol):
    """Of the rank's endpoint, as `quicoll_transport.endpoint.Endpoint` has each of these."""

    @property
    def credentials(self) -> Credentials: ...
    @property
    def wall_clock(self) -> Callable[[], datetime]: ...
    def gather(self) -> None: ...
    def send_gathered(self) -> None: ...


class CertificatesFace(Protocol):
    """As `quicoll.engine.certificates.Certificates` has each of these."""

    async def rotate(self, access: Access) -> str: ...
    async def deny(self, fingerprint: str) -> None: ...


class StragglersFace(Protocol):
    """table: as `quicoll.observability.stragglers.Stragglers` has it; any thread may read it."""

    @property
    def table(self) -> tuple[Straggler, ...]: ...
