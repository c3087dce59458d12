"""A node's files: what a deny list may hold, and what becomes of an endpoint when its files are exchanged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.security.access import Access, AccessControl, read_deny_list
from quicoll_transport.security.authority import create_authority, issue
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.policy import Policy

ONE, TWO, THREE = ("1" * 64, "2" * 64, "3" * 64)


class FakeEndpoint:
    """Does with a policy what an endpoint does, and keeps what it was asked for."""

    def __init__(self, policy: Policy, *, refuses: bool = False) -> None:
        self.policy = policy
        self.refuses = refuses
        self.rotated: list[Credentials] = []
        self.denied: list[str] = []

    def rotate(self, credentials: Credentials) -> None:
        if self.refuses:
            raise ConfigurationError("the new certificate is for somebody else")
        self.rotated.append(credentials)

    def deny(self, fingerprint: str) -> None:
        self.denied.append(self.policy.deny(fingerprint))


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    directory = tmp_path_factory.mktemp("certs")
    create_authority(directory, job="alpha")
    issue(directory, role="worker", node="a")
    return Credentials.from_directory(directory, role="worker", node="a")


def test_a_deny_list_has_one_fingerprint_a_line_comments_and_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "deny"
    colons = ":".join("AB" for _ in range(32))
    file.write_text(f"# stolen in May\n\n{ONE}\n  {colons}  # worker-3\r\n{ONE}\n")
    assert read_deny_list(file) == (ONE, "ab" * 32)
    file.write_text("")
    assert read_deny_list(file) == ()


@pytest.mark.parametrize("line", ["worker-3", "1" * 63, f"{ONE} {TWO}", "\u0661" * 64])
def test_a_line_that_is_no_fingerprint_is_named_with_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "deny"
    file.write_text(f"# comment\n{line}\n")
    with pytest.raises(ConfigurationError, match=r"deny, line 2: a fingerprint is SHA-256"):
        read_deny_list(file)


def test_a_deny_list_that_cannot_be_read_is_an_error_and_no_empty_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gone: cannot be read: No such file"):
        read_deny_list(tmp_path / "gone")
    with pytest.raises(ConfigurationError, match=r"cannot be read: Is a directory"):
        read_deny_list(tmp_path)
    os.mkfifo(tmp_path / "fifo")  # read without a writer it would be empty
    with pytest.raises(ConfigurationError, match=r"fifo: is not a regular file"):
        read_deny_list(tmp_path / "fifo")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 5 << 20)
    with pytest.raises(ConfigurationError, match=r"large: is larger than .* so it is no deny list"):
        read_deny_list(tmp_path / "large")


def test_files_that_cannot_be_used_are_refused_as_a_whole(tmp_path: Path) -> None:
    create_authority(tmp_path, job="alpha")
    issue(tmp_path, role="worker", node="a")
    (tmp_path / "deny").write_text("nonsense")
    with pytest.raises(ConfigurationError, match="deny, line 1"):
        Access.read(tmp_path, role="worker", node="a", deny=tmp_path / "deny")
    with pytest.raises(ConfigurationError, match=r"worker-b\.pem"):
        Access.read(tmp_path, role="worker", node="b")


def test_what_is_new_on_the_list_is_denied_and_what_is_gone_from_it_is_forgiven(credentials: Credentials) -> None:
    policy = Policy(denied=(ONE,))
    endpoint = FakeEndpoint(policy)
    control = AccessControl(endpoint, policy, listed=(ONE,))
    assert control.renew(Access(credentials, (ONE, TWO))) == (TWO,)
    assert endpoint.denied == [TWO]  # a second denial would search all links for nothing
    assert control.renew(Access(credentials, (TWO,))) == ()
    assert policy.denied == (TWO,)
    assert endpoint.rotated == [credentials, credentials]


def test_what_was_denied_by_a_call_stays_denied_whatever_the_list_says(credentials: Credentials) -> None:
    policy = Policy()
    control = AccessControl(FakeEndpoint(policy), policy)
    assert control.deny(THREE.upper()) == THREE
    assert control.renew(Access(credentials, (THREE, ONE))) == (ONE,)
    assert control.renew(Access(credentials, ())) == ()
    assert policy.denied == (THREE,)
    with pytest.raises(ConfigurationError, match="a fingerprint is"):
        control.deny("worker-3")


def test_another_identity_changes_nothing_not_even_the_list(credentials: Credentials) -> None:
    policy = Policy(denied=(ONE,))
    endpoint = FakeEndpoint(policy, refuses=True)
    control = AccessControl(endpoint, policy, listed=(ONE,))
    with pytest.raises(ConfigurationError, match="somebody else"):
        control.renew(Access(credentials, (TWO,)))
    assert policy.denied == (ONE,)
    endpoint.refuses = False
    assert control.renew(Access(credentials, (TWO,))) == (TWO,)
    assert policy.denied == (TWO,)
