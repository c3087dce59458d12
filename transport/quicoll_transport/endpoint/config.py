"""Settings of an endpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.link.core import LinkConfig
from quicoll_transport.link.detector import DetectorConfig
from quicoll_transport.quic import SessionConfig
from quicoll_transport.security.limits import GuardConfig, PaceConfig

__all__ = ["EndpointConfig"]

_LEAST = {
    "lost_after_ns": 1,
    "connect_ns": 1,
    "handshake_ns": 1,
    "credit_bytes": 0,
    "max_resends": 0,
    "max_handshakes": 1,
    "max_links": 1,
    "qlog_files": 1,
}


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """Settings of an endpoint. Times are nanoseconds.

    Args:
        lost_after_ns: Silence after which a peer is lost, exactly. None: it follows the measured round trips, between
            one second and ten (see link.detector).
        connect_ns: How long a link may take to come up.
        handshake_ns: How long one attempt to connect may take.
        credit_bytes: What is held for messages whose buffers are not posted yet, for each link.
        max_resends: Checksum failures of one message before both sides raise MessageCorrupted.
        max_handshakes: Unauthenticated connections that strangers may keep open here at once; each takes up to 100 KiB.
        guard: How often strangers may try; see security.limits.
        pace: How fast a peer may make us work; likewise.
        max_links: Peers; worst-case memory is max_links * credit_bytes.
        retry: Whether a source has to show its address before anything of it is kept, but for those of loopback, where
            nobody outside this host can be.
        session: Settings of QUIC.
        qlog_directory: Where each connection leaves a qlog trace when it ends; None: no traces. quic.qlog has the cost.
        qlog_files: How many traces stay.
    Raises:
        ConfigurationError: A value is out of range.
    """

    lost_after_ns: int | None = None
    connect_ns: int = 10_000_000_000
    handshake_ns: int = 3_000_000_000
    credit_bytes: int = 32 << 20
    max_resends: int = 3
    max_handshakes: int = 512
    guard: GuardConfig = field(default_factory=GuardConfig)
    pace: PaceConfig = field(default_factory=PaceConfig)
    max_links: int = 4096
    retry: bool = True
    session: SessionConfig = field(default_factory=SessionConfig)
    qlog_directory: str | os.PathLike[str] | None = None
    qlog_files: int = 64

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(
                    f"{name} must be {f'at least {least}' if least != 1 else 'positive'}, is {value}"
                )

    def link(self) -> LinkConfig:
        return LinkConfig(
            detector=DetectorConfig.from_lost_after(self.lost_after_ns),
            connect_ns=self.connect_ns,
            credit_bytes=self.credit_bytes,
            max_resends=self.max_resends,
        )
