"""Identities of nodes: one URI, `spiffe://quicoll/<job>/<role>/<node>`, in the form of an X.509-SVID.

SPIFFE, "X.509-SVID" sections 2 and 4. `quicoll_transport.security.verification` proves that a peer has the one that it
claims.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from quicoll_transport.errors import ConfigurationError

__all__ = ["COORDINATOR", "WORKER", "Identity"]

COORDINATOR = "coordinator"
WORKER = "worker"

PREFIX = "spiffe://quicoll/"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """A node of a job. Ordered by (job, role, node).

    Each name has 1 to 64 of A-Z a-z 0-9 . _ - and is neither "." nor ".." (SPIFFE-ID section 2.2).

    Attributes:
        job: The job; nodes of different jobs never meet.
        role: Such as "worker" or "coordinator".
        node: Unique in the job for its role.
    Raises:
        ConfigurationError: One of the names is none.
    """

    job: str
    role: str
    node: str

    def __post_init__(self) -> None:
        for name in ("job", "role", "node"):
            value = getattr(self, name)
            if not isinstance(value, str) or _NAME.fullmatch(value) is None or value in (".", ".."):
                raise ConfigurationError(f"{name} must be 1 to 64 of A-Z a-z 0-9 . _ - (not . or ..), is {value!r:.80}")

    @property
    def uri(self) -> str:
        """The certificate's URI, `spiffe://quicoll/<job>/<role>/<node>`."""
        return f"{PREFIX}{self.job}/{self.role}/{self.node}"

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Return the identity named by `uri`. Raises ConfigurationError unless `uri` is exactly what `.uri` gives."""
        parts = uri.removeprefix(PREFIX).split("/")
        if not uri.startswith(PREFIX) or len(parts) != 3:
            raise ConfigurationError(f"not of the form {PREFIX}<job>/<role>/<node>: {uri!r:.280}")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.role}/{self.node}"
