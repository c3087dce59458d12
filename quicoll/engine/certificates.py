"""What an operator does with certificates while the job runs: show another one, shut one out. Observers are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.errors import LocalError
from quicoll_transport.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.engine.lanes import Lanes
    from quicoll_transport.endpoint import Endpoint
    from quicoll_transport.security.access import Access, AccessControl
    from quicoll_transport.security.credentials import Credentials

__all__ = ["Certificates", "Certified"]


class Certified:
    """All that shows the rank's certificate, and judges others': its endpoint, and its lanes."""

    def __init__(self, endpoint: Endpoint, lanes: Lanes) -> None:
        self._endpoint = endpoint
        self._lanes = lanes

    def rotate(self, credentials: Credentials) -> None:
        """Show another certificate from now on. Raises ConfigurationError and EndpointClosed; nothing has changed."""
        self._endpoint.rotate(credentials)
        self._lanes.rotate(credentials)

    def deny(self, fingerprint: str) -> None:
        """Shut a certificate out. Raises ConfigurationError."""
        self._endpoint.deny(fingerprint)
        self._lanes.deny(fingerprint)


class Certificates:
    """Of one rank. On the engine's loop."""

    def __init__(self, control: AccessControl, emit: Callable[..., None]) -> None:
        """Change nothing yet.

        Args:
            control: Of the rank's endpoint.
            emit: Called with (kind, **fields) for each event.
        """
        self._control = control
        self._emit = emit

    async def rotate(self, access: Access) -> str:
        """Use what was read from the node's files from now on.

        Args:
            access: What was read.
        Returns:
            The new certificate's fingerprint.
        Raises:
            LocalError: It is another node's or job's, or the engine is closed. Nothing has changed.
        """
        try:
            denied = self._control.renew(access)
        except TransportError as error:
            raise LocalError(str(error)) from error
        fingerprint = access.credentials.fingerprint
        self._emit("certificates_rotated", fingerprint=fingerprint)
        for one in denied:
            self._emit("certificate_denied", fingerprint=one)
        return fingerprint

    async def deny(self, fingerprint: str) -> None:
        """Shut a certificate out: its links end at once.

        Args:
            fingerprint: Of the certificate.
        Raises:
            LocalError: It is no fingerprint.
        """
        try:
            plain = self._control.deny(fingerprint)
        except TransportError as error:
            raise LocalError(str(error)) from error
        self._emit("certificate_denied", fingerprint=plain)
