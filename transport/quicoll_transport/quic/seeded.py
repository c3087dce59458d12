"""Every source of chance and of wall-clock time below the links, from a function: so that a simulation repeats itself.

For simulations and fuzzing only: who knows the seed has every key. While `entropy` is active, the names in SOURCES
stand for objects that ask the given function; afterwards for what they were. They are names of this whole process, so
at most one is active at a time and no endpoint that serves anybody may run beside it.

What is drawn, and from where:

    os.urandom             connection ids, stateless reset tokens, TLS randoms, path challenges, the bits of a Retry
                           that mean nothing, nonces of tokens (aioquic); the connection id of a Retry (gate);
                           connection ids, path challenges, keys of reset tokens (session, gate)
    AESGCM.generate_key    the key of address validation tokens
    x25519, x448, ec       key shares: one for a ClientHello, one for a ServerHello, whose group is the client's choice
    ec.ECDSA               its nonce is OpenSSL's and DER gives it 70 to 72 bytes; here it is that of RFC 6979, which is
                           deterministic. Ed25519 is by itself (RFC 8032), and `authority` issues no other kinds
    utcnow, crypto, time   dates of certificates, which aioquic and OpenSSL each compare with a clock of their own, and
                           the times in qlog traces

Not drawn here: what `authority` makes (its own `entropy` argument), the incarnation of an endpoint and its clock (its
own arguments), and Python's hashing of text, on which nothing in this package depends. A qlog file's name holds the
process id.

A name that aioquic no longer has, or a source of chance that it has gained, is a ConfigurationError as soon as
`entropy` is entered, not a run that differs in some byte.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from types import ModuleType, SimpleNamespace
from typing import Any

from aioquic import tls
from aioquic.quic import connection, logger, packet, retry
from cryptography.hazmat.primitives.asymmetric import ec, x448, x25519
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from OpenSSL import crypto

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.quic import chance
from quicoll_transport.quic.selfcheck import check_foundation
from quicoll_transport.security.authority import Entropy, derive_key

__all__ = ["SOURCES", "entropy"]

SOURCES: tuple[tuple[ModuleType, str, object], ...] = (
    (connection, "os", os),
    (packet, "os", os),
    (retry, "os", os),
    (tls, "os", os),
    (chance, "os", os),
    (retry, "AESGCM", AESGCM),
    (tls, "x25519", x25519),
    (tls, "x448", x448),
    (tls, "ec", ec),
    (tls, "utcnow", tls.utcnow),
    (tls, "crypto", crypto),
    (logger, "time", time),
)
"""(module, name in it, what it has to be) of all that `entropy` replaces."""

_HARMLESS = (
    (logger, "os", os),  # paths of files
    (packet, "AESGCM", AESGCM),  # with a key and a nonce of the RFC (the tag of a Retry)
)
_CHANCE = (os, random, secrets, time, uuid, os.urandom, time.time, time.monotonic, AESGCM, x25519, x448, ec, crypto)

_active = False


class _Instead:
    """A module of which some names mean something else."""

    def __init__(self, module: ModuleType, **names: object) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _TokenCipher:
    """AESGCM whose keys are drawn."""

    def __init__(self, draw: Entropy) -> None:
        self._draw = draw

    def __call__(self, key: bytes) -> AESGCM:
        return AESGCM(key)

    def generate_key(self, bit_length: int) -> bytes:
        return self._draw(bit_length // 8)


@contextmanager
def entropy(draw: Entropy, *, wall_clock: Callable[[], datetime] | None = None) -> Iterator[None]:
    """Let `draw(n)`, which gives n bytes, be the only source of chance of sessions and gates, until the block ends.

    wall_clock: the date for certificates and traces, aware; None: the system's. An endpoint takes its own as an
    argument too. Raises ConfigurationError: another one is active, or aioquic is not built as expected.
    """
    global _active
    if _active:
        raise ConfigurationError("entropy is one for the whole process, and another one is active")
    check_foundation()  # it draws too, once per process: before the first draw that counts
    examine()
    instead = _replacements(draw, wall_clock)
    _active = True
    try:
        for (module, name, _), other in zip(SOURCES, instead, strict=True):
            setattr(module, name, other)
        yield
    finally:
        for module, name, usual in SOURCES:
            setattr(module, name, usual)
        _active = False


def examine() -> None:
    """Raise ConfigurationError unless aioquic takes chance and time from where SOURCES says, and from nowhere else."""
    for module, name, usual in SOURCES:
        if getattr(module, name, None) is not usual:
            raise ConfigurationError(f"aioquic is not built as expected: {module.__name__}.{name} is something else")
    known = {(module.__name__, name) for module, name, _ in (*SOURCES, *_HARMLESS)}
    for module in list(sys.modules.values()):
        where = getattr(module, "__name__", "")
        if where == "aioquic.tls" or where.startswith("aioquic.quic."):
            for name, value in vars(module).items():
                if any(value is source for source in _CHANCE) and (where, name) not in known:
                    raise ConfigurationError(f"aioquic has a source of chance that is not known: {where}.{name}")


def _replacements(draw: Entropy, wall_clock: Callable[[], datetime] | None) -> list[object]:
    """Return what stands for each of SOURCES, in their order."""
    randomness = _Instead(os, urandom=draw)
    curves = {"x25519": _Instead(x25519, X25519PrivateKey=_Exchange(x25519.X25519PrivateKey, 32, draw))}
    curves["x448"] = _Instead(x448, X448PrivateKey=_Exchange(x448.X448PrivateKey, 56, draw))
    curves["ec"] = _Instead(
        ec,
        generate_private_key=lambda curve: derive_key(curve, draw),
        ECDSA=lambda algorithm: ec.ECDSA(algorithm, deterministic_signing=True),
    )
    clocks: list[object] = [tls.utcnow, crypto, time]
    if wall_clock is not None:
        now = wall_clock

        def store() -> crypto.X509Store:
            made = crypto.X509Store()
            made.set_time(now())
            return made

        clocks = [now, _Instead(crypto, X509Store=store), SimpleNamespace(time=lambda: now().timestamp())]
    return [randomness] * 5 + [_TokenCipher(draw), curves["x25519"], curves["x448"], curves["ec"], *clocks]


class _Exchange:
    """A class of private keys that are drawn."""

    def __init__(self, kind: Any, size: int, draw: Entropy) -> None:
        self.from_private_bytes = kind.from_private_bytes
        self._size = size
        self._draw = draw

    def generate(self) -> Any:
        return self.from_private_bytes(self._draw(self._size))
