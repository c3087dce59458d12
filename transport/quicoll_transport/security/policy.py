"""Which peers with a certificate of ours may have a link here: roles, nodes, denied certificates.

A certificate says who a peer is; a policy says whether that one may come in. Roles and nodes are fixed when the policy
is made, because they are what the job is. Denied fingerprints change at run time, because a key is stolen at run time:
a denied certificate stays denied whatever it names, while the same node may come back with another one.

`Policy` is callable and so is an endpoint's `authorize`. The endpoint asks it for the fingerprint as well; use
`Endpoint.deny`, which also ends the links that live, rather than `Policy.deny`, which only keeps new ones out.
Only exact matches count; there are no patterns, and an empty collection lets nobody in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from quicoll_transport.errors import ConfigurationError

__all__ = ["Named", "Policy", "parse_fingerprint"]

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class Named(Protocol):
    """The part of an Identity that a policy looks at."""

    @property
    def role(self) -> str: ...
    @property
    def node(self) -> str: ...


def parse_fingerprint(text: str) -> str:
    """Return a SHA-256 fingerprint in plain form. Colons and upper case, as OpenSSL writes it, are accepted.

    Raises ConfigurationError for anything else: a typing error must not leave a stolen key at work.
    """
    plain = text.replace(":", "").strip().lower()
    if _FINGERPRINT.fullmatch(plain) is None:
        raise ConfigurationError(f"a fingerprint is SHA-256 in 64 hexadecimal digits, not {text!r:.100}")
    return plain


class Policy:
    """Decides which identities and certificates may have a link here. Call it with an identity for the answer.

    Args:
        roles: Roles that may; None for any.
        nodes: Nodes that may; None for any.
        denied: Fingerprints of certificates that may not.
    Raises:
        ConfigurationError: An argument is one string, or a fingerprint is none.
    """

    def __init__(
        self, *, roles: Iterable[str] | None = None, nodes: Iterable[str] | None = None, denied: Iterable[str] = ()
    ) -> None:
        for name, value in (("roles", roles), ("nodes", nodes), ("denied", denied)):
            if isinstance(value, str):  # "ab" would mean the nodes a and b
                raise ConfigurationError(f"{name} is a collection of names, not the one string {value!r:.100}")
        self._roles = None if roles is None else frozenset(roles)
        self._nodes = None if nodes is None else frozenset(nodes)
        self._denied = {parse_fingerprint(one): None for one in denied}

    def __call__(self, peer: Named) -> str | None:
        """Return why this identity may not have a link; None if it may."""
        if self._roles is not None and peer.role not in self._roles:
            return f"role {peer.role!r} may not come in here"
        if self._nodes is not None and peer.node not in self._nodes:
            return f"node {peer.node!r} may not come in here"
        return None

    @property
    def denied(self) -> tuple[str, ...]:
        """The denied fingerprints, in the order in which they were denied."""
        return tuple(self._denied)

    def deny(self, fingerprint: str) -> str:
        """Deny a certificate from now on.

        Args:
            fingerprint: SHA-256 of the certificate, in any form that `parse_fingerprint` takes.
        Returns:
            The fingerprint in plain form.
        Raises:
            ConfigurationError: It is no fingerprint.
        """
        plain = parse_fingerprint(fingerprint)
        self._denied[plain] = None
        return plain

    def forgive(self, fingerprint: str) -> None:
        """Allow a certificate again; one that was not denied is fine. Raises ConfigurationError for no fingerprint."""
        self._denied.pop(parse_fingerprint(fingerprint), None)

    def judge_certificate(self, fingerprint: str) -> str | None:
        """Return why a certificate may not be used; None if it may. fingerprint: in plain form."""
        return f"the certificate sha256={fingerprint[:16]}... is denied" if fingerprint in self._denied else None
