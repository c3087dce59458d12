"""What the transport's tests share: credentials, made once; making keys and signing takes longer than most tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quicoll_transport.authority import ephemeral
from quicoll_transport.identity import COORDINATOR, WORKER, Credentials, Identity

NODES = [(COORDINATOR, "c"), (WORKER, "a"), (WORKER, "b"), (WORKER, "d")]

CredentialsOf = Callable[..., Credentials]


@pytest.fixture(scope="session")
def credentials_of() -> CredentialsOf:
    """credentials_of(node, job="j", authority=0): a node's credentials; another number is another authority."""
    made: dict[tuple[str, int], dict[Identity, Credentials]] = {}

    def find(node: str, *, job: str = "j", authority: int = 0) -> Credentials:
        if (job, authority) not in made:
            made[job, authority] = ephemeral(job, NODES)
        role = COORDINATOR if node == "c" else WORKER
        return made[job, authority][Identity(job, role, node)]

    return find
