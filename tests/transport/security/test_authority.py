"""What the authority makes, on disk and in memory: right certificates, and keys that nobody else can read."""

from __future__ import annotations

import errno
import ipaddress
import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from quicoll_transport.errors import AuthenticationError, ConfigurationError
from quicoll_transport.security.authority import Authority, create_authority, ephemeral, issue, job_of
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity
from quicoll_transport.security.verification import verify_peer

NOW = datetime(2026, 6, 1, 12, 0, 0, tzinfo=UTC)
KEYS: dict[str, type] = {"ed25519": ed25519.Ed25519PrivateKey, "p256": ec.EllipticCurvePrivateKey}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def extension(certificate: x509.Certificate, kind: Any) -> Any:
    return certificate.extensions.get_extension_for_class(kind)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    create_authority(tmp_path / "certs", job="j", now=NOW)
    return tmp_path / "certs"


class TestCreateAuthority:
    @pytest.mark.parametrize("algorithm", ["ed25519", "p256"])
    def test_makes_a_certificate_and_its_key(self, tmp_path: Path, algorithm: Any) -> None:
        made = create_authority(tmp_path, job="j", algorithm=algorithm, now=NOW)
        found = Authority.load(tmp_path)
        assert found.certificate == made.certificate
        assert isinstance(found.private_key, KEYS[algorithm])
        assert found.job == job_of(made.certificate) == "j"

    def test_it_may_sign_nodes_and_nothing_below_them(self, directory: Path) -> None:
        certificate = Authority.load(directory).certificate
        constraints, usage = extension(certificate, x509.BasicConstraints), extension(certificate, x509.KeyUsage)
        assert constraints.critical
        assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
        assert usage.critical
        assert usage.value.key_cert_sign
        assert not usage.value.digital_signature

    def test_it_is_valid_from_a_little_before_now(self, directory: Path) -> None:
        certificate = Authority.load(directory).certificate
        assert certificate.not_valid_before_utc == NOW - timedelta(minutes=5)
        assert certificate.not_valid_after_utc == NOW + timedelta(days=3650)

    def test_the_directory_and_the_key_are_the_owners_alone_whatever_the_umask(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            create_authority(tmp_path / "a" / "certs", job="j", now=NOW)
            issue(tmp_path / "a" / "certs", role=WORKER, node="n", now=NOW)
        finally:
            os.umask(before)
        made = tmp_path / "a" / "certs"
        assert mode(made) == 0o700
        assert {path.name: mode(path) for path in made.iterdir()} == {
            "ca.pem": 0o644,
            "ca.key": 0o600,
            "worker-n.pem": 0o644,
            "worker-n.key": 0o600,
        }

    def test_a_key_is_never_open_to_others_not_even_while_it_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every file that is ever made is looked at as it is opened, before a byte is in it."""
        seen: list[tuple[str, int, int]] = []
        real = os.open

        def spy(path: Any, flags: int, *args: Any, **more: Any) -> int:
            descriptor = real(path, flags, *args, **more)
            if flags & os.O_CREAT:
                status = os.fstat(descriptor)
                seen.append((Path(path).name, stat.S_IMODE(status.st_mode), flags & os.O_EXCL))
            return descriptor

        monkeypatch.setattr(os, "open", spy)
        create_authority(tmp_path, job="j", now=NOW)
        keys = [entry for entry in seen if entry[0].startswith(".ca.key.")]
        assert len(seen) == 2
        assert len(keys) == 1
        assert keys[0][1:] == (0o600, os.O_EXCL)

    def test_an_authority_is_not_replaced(self, directory: Path) -> None:
        before = {path: path.read_bytes() for path in directory.iterdir()}
        with pytest.raises(ConfigurationError, match=r"ca\.key: is there already"):
            create_authority(directory, job="other")
        assert {path: path.read_bytes() for path in directory.iterdir()} == before

    @pytest.mark.parametrize("name", ["ca.key", "ca.pem"])
    def test_a_dangling_link_is_not_followed(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigurationError, match="is there already"):
            create_authority(tmp_path, job="j")
        assert not (tmp_path / "elsewhere").exists()

    @pytest.mark.parametrize("job", ["", "a b", "..", "x" * 65])
    def test_a_job_without_a_proper_name_gets_nothing(self, tmp_path: Path, job: str) -> None:
        with pytest.raises(ConfigurationError, match=r"^job must be"):
            create_authority(tmp_path / "certs", job=job)
        assert not (tmp_path / "certs").exists()

    @pytest.mark.parametrize("days", [0, -1, 36501])
    def test_days_are_bounded(self, tmp_path: Path, days: int) -> None:
        with pytest.raises(ConfigurationError, match="days must be 1 to 36500"):
            create_authority(tmp_path, job="j", days=days)

    def test_unknown_algorithm(self, tmp_path: Path) -> None:
        wrong: Any = "rsa"
        with pytest.raises(ConfigurationError, match="one of ed25519, p256, is 'rsa'"):
            create_authority(tmp_path, job="j", algorithm=wrong)

    def test_now_must_be_aware(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="aware"):
            create_authority(tmp_path, job="j", now=NOW.replace(tzinfo=None))

    def test_a_directory_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(ConfigurationError, match=r"file/certs: cannot be made: (Not a directory|File exists)"):
            create_authority(tmp_path / "file" / "certs", job="j")


class TestIssue:
    @pytest.mark.parametrize("algorithm", ["ed25519", "p256"])
    def test_the_node_gets_in_with_it(self, tmp_path: Path, algorithm: Any) -> None:
        authority = create_authority(tmp_path, job="j", algorithm=algorithm, now=NOW)
        made = issue(tmp_path, role=COORDINATOR, node="c", now=NOW)
        assert made.identity == Identity("j", COORDINATOR, "c")
        assert isinstance(made.private_key, KEYS[algorithm])
        found = verify_peer(made.certificate, made.chain, trust=[authority.certificate], job="j", now=NOW)
        assert found == made.identity

    def test_what_it_returns_is_what_lies_in_the_files(self, directory: Path) -> None:
        made = issue(directory, role=WORKER, node="n", now=NOW)
        loaded = Credentials.from_directory(directory, role=WORKER, node="n", now=NOW)
        assert loaded.fingerprint == made.fingerprint
        assert load_pem_private_key((directory / "worker-n.key").read_bytes(), None).public_key() == (
            made.certificate.public_key()
        )

    def test_what_the_certificate_says(self, directory: Path) -> None:
        certificate = issue(
            directory, role=WORKER, node="n", dns=["n.example"], ip=["192.0.2.7", "2001:db8::7"], now=NOW
        ).certificate
        names = extension(certificate, x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://quicoll/j/worker/n"]
        assert names.get_values_for_type(x509.DNSName) == ["n.example"]
        assert names.get_values_for_type(x509.IPAddress) == [
            ipaddress.ip_address("192.0.2.7"),
            ipaddress.ip_address("2001:db8::7"),
        ]
        assert list(extension(certificate, x509.ExtendedKeyUsage).value) == [
            ExtendedKeyUsageOID.CLIENT_AUTH,
            ExtendedKeyUsageOID.SERVER_AUTH,
        ]
        assert extension(certificate, x509.KeyUsage).value.digital_signature
        assert not extension(certificate, x509.KeyUsage).value.key_cert_sign
        assert extension(certificate, x509.BasicConstraints).value.ca is False
        assert certificate.not_valid_before_utc == NOW - timedelta(minutes=5)
        assert certificate.not_valid_after_utc == NOW + timedelta(days=365)

    def test_serial_numbers_differ(self, directory: Path) -> None:
        made = [issue(directory, role=WORKER, node=f"n{index}", now=NOW) for index in range(8)]
        assert len({entry.certificate.serial_number for entry in made}) == 8

    def test_a_node_called_like_its_job_gets_in(self, tmp_path: Path) -> None:
        """With equal subject and issuer OpenSSL would look for a signature of the node by itself."""
        create_authority(tmp_path, job="same", now=NOW)
        assert issue(tmp_path, role=WORKER, node="same", now=NOW).identity.node == "same"

    def test_a_key_is_not_replaced(self, directory: Path) -> None:
        issue(directory, role=WORKER, node="n", now=NOW)
        before = {path: path.read_bytes() for path in directory.iterdir()}
        with pytest.raises(ConfigurationError, match=r"worker-n\.key: is there already"):
            issue(directory, role=WORKER, node="n", now=NOW)
        assert {path: path.read_bytes() for path in directory.iterdir()} == before

    def test_a_lone_certificate_is_not_replaced_and_no_key_is_left_beside_it(self, directory: Path) -> None:
        (directory / "worker-n.pem").write_bytes(b"old")
        with pytest.raises(ConfigurationError, match=r"worker-n\.pem: is there already"):
            issue(directory, role=WORKER, node="n", now=NOW)
        assert (directory / "worker-n.pem").read_bytes() == b"old"
        assert not (directory / "worker-n.key").exists()

    def test_a_full_disk_leaves_nothing_behind(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Key written, certificate not: neither stays, nor does any draft of them."""
        before = sorted(path.name for path in directory.iterdir())
        real = os.fsync
        calls: list[int] = []

        def full(descriptor: int) -> None:
            calls.append(descriptor)
            if len(calls) == 3:  # 1 the key, 2 its directory, 3 the certificate
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ConfigurationError, match=r"worker-n\.pem: cannot be written: No space left"):
            issue(directory, role=WORKER, node="n", now=NOW)
        assert sorted(path.name for path in directory.iterdir()) == before

    def test_somebody_who_was_faster_keeps_the_key(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another process makes the file between our look and our write: link(2) refuses, where rename(2) would win."""
        real = os.link

        def late(source: Any, target: Any) -> None:
            Path(target).write_bytes(b"theirs")
            real(source, target)

        monkeypatch.setattr(os, "link", late)
        with pytest.raises(ConfigurationError, match=r"worker-n\.key: cannot be written: File exists"):
            issue(directory, role=WORKER, node="n", now=NOW)
        assert (directory / "worker-n.key").read_bytes() == b"theirs"

    def test_it_ends_with_its_authority(self, tmp_path: Path) -> None:
        create_authority(tmp_path, job="j", days=10, now=NOW)
        made = issue(tmp_path, role=WORKER, node="n", days=365, now=NOW)
        assert made.certificate.not_valid_after_utc == NOW + timedelta(days=10)

    def test_an_expired_authority_signs_nothing(self, tmp_path: Path) -> None:
        create_authority(tmp_path, job="j", days=10, now=NOW)
        with pytest.raises(ConfigurationError, match="authority of job 'j' expired at 2026-06-11 12:00:00Z"):
            issue(tmp_path, role=WORKER, node="n", now=NOW + timedelta(days=10))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.key", "ca.pem"]

    def test_the_key_says_which_authority_signs_while_one_replaces_the_other(self, tmp_path: Path) -> None:
        create_authority(tmp_path / "old", job="j", now=NOW)
        new = create_authority(tmp_path / "new", job="j", now=NOW)
        (tmp_path / "new" / "ca.pem").write_bytes(
            (tmp_path / "old" / "ca.pem").read_bytes() + (tmp_path / "new" / "ca.pem").read_bytes()
        )
        made = issue(tmp_path / "new", role=WORKER, node="n", now=NOW)
        assert len(made.trust) == 2
        assert verify_peer(made.certificate, trust=[new.certificate], job="j", now=NOW) == made.identity

    def test_no_authority_here(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"ca\.key: cannot be read: No such file"):
            issue(tmp_path, role=WORKER, node="n")

    def test_certificate_of_another_key(self, tmp_path: Path, directory: Path) -> None:
        create_authority(tmp_path / "other", job="j", now=NOW)
        (directory / "ca.pem").write_bytes((tmp_path / "other" / "ca.pem").read_bytes())
        with pytest.raises(ConfigurationError, match=r"ca\.pem: holds no certificate of the key in ca\.key"):
            issue(directory, role=WORKER, node="n", now=NOW)

    def test_an_authority_that_was_not_made_here_has_no_job(self, directory: Path) -> None:
        node = issue(directory, role=WORKER, node="n", now=NOW)
        assert isinstance(node.private_key, ed25519.Ed25519PrivateKey)
        with pytest.raises(ConfigurationError, match="not an authority of quicoll"):
            Authority(node.certificate, node.private_key).sign(role=WORKER, node="m", now=NOW)

    @pytest.mark.parametrize(("role", "node"), [("", "n"), ("worker", ""), ("worker", "../n"), ("wor ker", "n")])
    def test_a_node_without_a_proper_name_gets_nothing(self, directory: Path, role: str, node: str) -> None:
        with pytest.raises(ConfigurationError, match=r"^(role|node) must be"):
            issue(directory, role=role, node=node)
        assert sorted(path.name for path in directory.iterdir()) == ["ca.key", "ca.pem"]

    @pytest.mark.parametrize("names", [{"ip": ["192.0.2.300"]}, {"ip": [""]}, {"dns": ["b\u00fccher.example"]}])
    def test_names_that_are_none(self, directory: Path, names: Any) -> None:
        with pytest.raises(ConfigurationError, match="not a DNS name or an IP address"):
            issue(directory, role=WORKER, node="n", now=NOW, **names)


class TestEphemeral:
    def test_gives_every_node_credentials_that_the_others_take(self) -> None:
        made = ephemeral("j", [(COORDINATOR, "c"), (WORKER, "b"), (WORKER, "a")], now=NOW)
        assert [str(identity) for identity in made] == ["coordinator/c", "worker/b", "worker/a"]
        for identity, credentials in made.items():
            assert credentials.identity == identity
            for other in made.values():
                assert verify_peer(credentials.certificate, trust=other.trust, job="j", now=NOW) == identity

    def test_writes_no_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

        def refuse(*_: Any, **__: Any) -> int:
            raise AssertionError("a file was opened")

        monkeypatch.setattr(os, "open", refuse)
        monkeypatch.setattr("builtins.open", refuse)
        ephemeral("j", [(WORKER, "a")])
        assert list(tmp_path.iterdir()) == []

    def test_two_calls_do_not_trust_each_other(self) -> None:
        [one], [other] = (list(ephemeral("j", [(WORKER, "a")], now=NOW).values()) for _ in range(2))
        with pytest.raises(AuthenticationError, match="was not signed by an authority that we trust"):
            verify_peer(one.certificate, trust=other.trust, job="j", now=NOW)

    def test_a_node_named_twice_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="worker/a is named twice"):
            ephemeral("j", [(WORKER, "a"), (WORKER, "a")])

    def test_repr_of_an_authority_shows_no_key(self) -> None:
        authority = Authority.create(job="j", now=NOW)
        assert repr(authority) == "<Authority CN=j,O=quicoll>"
