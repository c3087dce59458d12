"""Chance from a seed: the same bytes again in another process, and no source of it that is not known."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from aioquic import tls
from aioquic.quic import connection as aioquic_connection
from aioquic.quic import packet, recovery, retry
from depth import some

import quicoll_transport
from quicoll_transport.carrier import Authenticated
from quicoll_transport.errors import ConfigurationError
from quicoll_transport.quic import (
    Gate,
    Session,
    SessionConfig,
    entropy,
    handshake_in_memory,
    seeded,
)
from quicoll_transport.security.authority import ephemeral
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.identity import WORKER, Identity

START = 10**18
NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
CredentialsOf = Callable[..., Credentials]


# -- the sources of chance ---------------------------------------------------------------------------------------------


def test_the_names_that_are_replaced_are_there_and_there_are_no_others() -> None:
    seeded.examine()


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, name, _ in seeded.SOURCES])
def test_a_name_that_is_something_else_is_refused(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, object())
    with pytest.raises(ConfigurationError, match=f"{module.__name__}.{name} is something else"):
        seeded.examine()


@pytest.mark.parametrize("module", [aioquic_connection, recovery, packet, tls, retry])
@pytest.mark.parametrize("source", [random, os.urandom])
def test_a_source_that_is_not_known_is_refused(module: Any, source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "greasy", source, raising=False)
    with pytest.raises(ConfigurationError, match=rf"{module.__name__}\.greasy"), entropy(random.Random(1).randbytes):
        raise AssertionError("entered")


def test_everything_is_as_it_was_when_the_block_has_ended() -> None:
    dates: list[datetime] = []

    def breaks() -> None:
        with entropy(random.Random(1).randbytes, wall_clock=lambda: NOW):
            dates.append(tls.utcnow())
            raise IndexError

    with pytest.raises(IndexError):
        breaks()
    assert dates == [NOW]
    seeded.examine()
    with entropy(random.Random(1).randbytes):
        pass


def test_one_at_a_time() -> None:
    with entropy(random.Random(1).randbytes):
        with pytest.raises(ConfigurationError, match="another one is active"), entropy(random.Random(2).randbytes):
            raise AssertionError("entered")
        assert aioquic_connection.os.urandom(4) == random.Random(1).randbytes(4), "the first goes on"
    seeded.examine()


def test_certificates_are_judged_by_the_given_date() -> None:
    long_ago = datetime(2001, 1, 1, tzinfo=UTC)
    made = ephemeral("j", [(WORKER, "a"), (WORKER, "b")], now=long_ago)
    shown = {node: made[Identity("j", WORKER, node)] for node in "ab"}
    for late, authenticated in ((timedelta(hours=1), True), (timedelta(days=2), False)):
        with entropy(random.Random(1).randbytes, wall_clock=lambda late=late: long_ago + late):
            config, address = SessionConfig(), ("192.0.2.1", 2)
            client = Session.client(credentials=shown["a"], config=config, address=address, now_ns=START)
            _, events, _ = handshake_in_memory(client, Gate(credentials=shown["b"], config=config), now_ns=START)
        assert any(isinstance(event, Authenticated) for event in events) is authenticated


@pytest.mark.parametrize("algorithm", ["ed25519", "p256"])
def test_credentials_repeat_themselves(algorithm: Any) -> None:
    def make(seed: int) -> list[tuple[bytes, int]]:
        made = ephemeral(
            "j", [(WORKER, "a"), (WORKER, "b")], algorithm=algorithm, now=NOW, entropy=random.Random(seed).randbytes
        )
        return [(one.authority_pem + one.fingerprint.encode(), one.certificate.serial_number) for one in made.values()]

    assert make(1) == make(1)
    first, second = make(1), make(2)
    assert not set(first) & set(second)


# -- the whole ---------------------------------------------------------------------------------------------------------


@cache
def transcript(hash_seed: str, *arguments: str) -> str:
    roots = [Path(__file__).parents[2] / "helpers", Path(quicoll_transport.__file__).parent.parent]
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(map(str, roots))}
    command = [sys.executable, "-W", "error", "-m", "quicoll_fuzz.transcript", *arguments]
    return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", some(["p256", "ed25519"], 2))
def test_two_processes_send_the_same_bytes_at_the_same_times(algorithm: str) -> None:
    """Several channels both ways, with losses; the digest is of all datagrams, handshakes included.

    Simulated clusters, whose certificates are of the other kind, are compared in tests/sim/test_same_seed.py.
    """
    arguments = ("--seed", "7", "--algorithm", algorithm)
    first = transcript("1", *arguments)
    assert first == transcript("2", *arguments)
    assert int(first.split()[1]) > 500, "a transcript of nothing would be equal too"


@pytest.mark.slow
def test_another_seed_sends_other_bytes() -> None:
    first, second = (transcript("1", "--seed", seed, "--algorithm", "p256") for seed in ("7", "8"))
    assert first.split()[0] != second.split()[0]
