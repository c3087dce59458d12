"""What the transport's tests share: credentials, made once; making keys and signing takes longer than most tests."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from endpoint_world import World
from quicoll_fuzz.virtual import today

from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity

NODES = [(COORDINATOR, "c"), (WORKER, "a"), (WORKER, "b"), (WORKER, "d")]

CredentialsOf = Callable[..., Credentials]


def finder(**options: Any) -> CredentialsOf:
    made: dict[tuple[str, int], dict[Identity, Credentials]] = {}

    def find(node: str, *, job: str = "j", authority: int = 0) -> Credentials:
        if (job, authority) not in made:
            made[job, authority] = ephemeral(job, NODES, **options)
        role = COORDINATOR if node == "c" else WORKER
        return made[job, authority][Identity(job, role, node)]

    return find


@pytest.fixture(scope="session")
def credentials_of() -> CredentialsOf:
    """credentials_of(node, job="j", authority=0): a node's credentials; another number is another authority."""
    return finder()


@pytest.fixture(scope="session")
def virtual_credentials_of() -> CredentialsOf:
    """The same for virtual worlds: of their date, and from a seed."""
    return finder(now=today(), entropy=random.Random("credentials").randbytes)


@pytest.fixture
async def world(credentials_of: CredentialsOf) -> AsyncIterator[World]:
    """Endpoints on real sockets; some modules have a world of their own kind."""
    made = World(credentials_of)
    yield made
    for opened in made.endpoints:
        await opened.aclose(timeout=0.0)
