"""Somebody who looks at a running job: asks its coordinator how it is, as often as is wanted.

    asking        `Look` is sent to one coordinator after the other, until one that leads answers
    seen          it did: a `Glance` with the status
    not seen      the time is over: a `Glance` that says what each one did instead. The next question begins anew

Nothing that goes wrong on the way is an error but what cannot work at all (certificates, addresses): who looks at a job
in trouble wants to hear what is known, and goes on looking.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from quicoll.errors import LocalError, PeerError
from quicoll.membership.operator_client import open_link
from quicoll.membership.operators import OPERATOR, READER, Look, StandsBy
from quicoll.membership.status import JobStatus
from quicoll_transport.net.addresses import format_address
from quicoll_transport.security.credentials import node_files

if TYPE_CHECKING:
    from types import TracebackType

    from quicoll.membership.operator_client import OperatorLink

__all__ = ["Glance", "JobWatch", "who_looks"]

_PATIENCE_S = 1.5
"""Seconds that one of several coordinators may take, before the next one is asked."""
_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What was seen.

    Attributes:
        job: The job's name, as in the certificate.
        coordinator: Address of the coordinator that answered, or of all that were asked.
        status: What the one that leads says; None where none did.
        trouble: Why there is no status, for people; "" where there is one.
    """

    job: str
    coordinator: str
    status: JobStatus | None = None
    trouble: str = ""


def who_looks(certs: str | Path, named: str | None = None) -> tuple[str, str]:
    """Return the role and the name in the certificate to look with.

    Args:
        certs: Directory of certificates.
        named: "role/name"; None takes reader/reader, or else operator/operator.
    Raises:
        LocalError: There is none, or one of that role cannot look.
    """
    if named is None:
        for role in (READER, OPERATOR):
            if all(path.is_file() for path in node_files(certs, role=role, node=role)):
                return role, role
        make = f"quicoll certs issue {certs} --role {READER} --node {READER}"
        raise LocalError(f"{certs} has no certificate to look with: {make}; or name one by --as")
    role, _, node = named.partition("/")
    if role not in (READER, OPERATOR) or not node:
        raise LocalError(
            f"{named!r} cannot look at a job: that takes the certificate of a {READER} or an {OPERATOR}, "
            f"as {READER}/NAME. A worker's would be taken for a later process of that worker"
        )
    return role, node


@dataclass(slots=True)
class _Answers:
    """What the coordinators have said instead of a status, by address."""

    said: dict[str, str] = field(default_factory=dict)

    def words(self, asked: str, timeout: float) -> str:
        if not self.said:
            return f"the coordinator at {asked} did not answer within {timeout:g} s"
        return "; ".join(f"the coordinator at {where} {what}" for where, what in self.said.items())


class JobWatch:
    """Looks at one job; an asynchronous context manager.

    Args:
        coordinator: Where it listens, "host:port"; of several that take over from each other, with commas between them.
        certs: Directory with the certificate.
        named: As `who_looks` has it.
    """

    def __init__(self, coordinator: str, certs: str | Path, *, named: str | None = None) -> None:
        self._coordinator = coordinator
        self._certs = certs
        self._role, self._node = who_looks(certs, named)
        self._link: OperatorLink | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._link is not None:
            await self._link.aclose()

    async def look(self, timeout: float = 5.0, *, links: bool = False) -> Glance:
        """Ask once, until there is a status or the time is over.

        Args:
            timeout: Seconds.
            links: Whether what members say of their links is wanted, too.
        Raises:
            LocalError: Certificates or addresses cannot work.
        """
        if self._link is None:
            self._link = await open_link(
                self._coordinator, self._certs, role=self._role, node=self._node, timeout=timeout
            )
        link, answers = self._link, _Answers()
        try:
            async with asyncio.timeout(timeout):
                while (status := await self._ask(link, answers, links=links)) is None:
                    pass
        except TimeoutError:
            answers.said.setdefault(format_address(link.address), f"gives no answer: {link.trouble}")
            trouble = answers.words(self._coordinator, timeout)
            return Glance(job=link.job, coordinator=self._coordinator, trouble=trouble)
        return Glance(job=link.job, coordinator=format_address(link.address), status=status)

    async def _ask(self, link: OperatorLink, answers: _Answers, *, links: bool) -> JobStatus | None:
        where = format_address(link.address)
        try:
            async with asyncio.timeout(_PATIENCE_S if link.several else None):
                answer = await link.ask(Look(links=links))
        except TimeoutError:
            answers.said[where] = f"gives no answer: {link.trouble}"
            link.go_on()
            return None
        except PeerError as error:
            answers.said[where] = f"gave an answer that cannot be read: {error}"
            link.go_on()
            await asyncio.sleep(_AGAIN_S)
            return None
        if isinstance(answer, JobStatus):
            return answer
        if isinstance(answer, StandsBy):
            leads = f"{answer.leader} leads" if answer.leader else "it knows of none that leads"
            answers.said[where] = f"stands by: {leads}"
            link.go_on()
            await asyncio.sleep(_AGAIN_S)
        else:
            answers.said[where] = f"gives no answer: {link.trouble}"
        return None
