"""Identities, the credentials of this node, and every reason for which a peer is refused (DESIGN promise 4)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, HandshakeCompleted
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quicoll_transport.errors import AuthenticationError, ConfigurationError
from quicoll_transport.security import verification
from quicoll_transport.security.authority import Authority, ephemeral
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.identity import COORDINATOR, WORKER, Identity
from quicoll_transport.security.verification import MAX_CHAIN, identity_of, verify_peer

NOW = datetime(2026, 6, 1, 12, 0, 0, tzinfo=UTC)
DAY = timedelta(days=1)


@dataclass(kw_only=True)
class Forge:
    """Any certificate at all, right ones and wrong ones: the library itself makes only right ones."""

    name: str = "forged"
    key: Any = field(default_factory=ed25519.Ed25519PrivateKey.generate)
    since: datetime = NOW - DAY
    until: datetime = NOW + DAY
    ca: bool | None = False
    path_length: int | None = None
    uris: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    purposes: list[x509.ObjectIdentifier] = field(default_factory=list)
    digital_signature: bool | None = None
    issuer: Forge | None = None
    made: x509.Certificate | None = None

    @property
    def subject(self) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])

    @property
    def certificate(self) -> x509.Certificate:
        if self.made is None:
            self.made = self._make()
        return self.made

    def _make(self) -> x509.Certificate:
        signer = self.issuer or self
        builder = (
            x509.CertificateBuilder()
            .subject_name(self.subject)
            .issuer_name(signer.subject)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.since)
            .not_valid_after(self.until)
        )
        if self.ca is not None:
            builder = builder.add_extension(x509.BasicConstraints(self.ca, self.path_length), critical=True)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in self.uris]
        names += [x509.DNSName(name) for name in self.dns]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        if self.purposes:
            builder = builder.add_extension(x509.ExtendedKeyUsage(self.purposes), critical=False)
        if self.digital_signature is not None:
            usage = dict.fromkeys(
                (
                    "content_commitment",
                    "key_encipherment",
                    "data_encipherment",
                    "crl_sign",
                    "encipher_only",
                    "decipher_only",
                ),
                False,
            )
            builder = builder.add_extension(
                x509.KeyUsage(
                    digital_signature=self.digital_signature,
                    key_agreement=not self.digital_signature,
                    key_cert_sign=False,
                    **usage,
                ),
                critical=True,
            )
        return builder.sign(signer.key, None if isinstance(signer.key, ed25519.Ed25519PrivateKey) else hashes.SHA256())


@pytest.fixture(scope="module")
def root() -> Forge:
    return Forge(name="root", ca=True)


def node(issuer: Forge, **changes: Any) -> Forge:
    """A certificate that passes, but for `changes`."""
    given: dict[str, Any] = {"name": "n", "uris": ("spiffe://quicoll/j/worker/n",), "issuer": issuer}
    return Forge(**(given | changes))


def refusal(peer: Forge | None, *, root: Forge, chain: tuple[Forge, ...] = (), now: datetime = NOW) -> str:
    with pytest.raises(AuthenticationError) as caught:
        verify_peer(
            None if peer is None else peer.certificate,
            [entry.certificate for entry in chain],
            trust=[root.certificate],
            job="j",
            now=now,
        )
    assert not caught.value.usable
    return caught.value.reason


class TestIdentity:
    def test_uri_and_parse_are_inverse(self) -> None:
        identity = Identity("llm-7.B_x", WORKER, "eu-west.0")
        assert identity.uri == "spiffe://quicoll/llm-7.B_x/worker/eu-west.0"
        assert Identity.parse(identity.uri) == identity
        assert str(identity) == "worker/eu-west.0"

    def test_orders_by_job_role_node(self) -> None:
        ordered = [Identity("a", COORDINATOR, "z"), Identity("a", WORKER, "a"), Identity("b", COORDINATOR, "a")]
        assert sorted([ordered[2], ordered[1], ordered[0]]) == ordered

    @pytest.mark.parametrize("name", ["", "a b", "a/b", "a\n", "\u00e4", "x" * 65, ".", "..", "a:b", "%41"])
    @pytest.mark.parametrize("place", ["job", "role", "node"])
    def test_a_name_of_other_characters_is_refused(self, place: str, name: str) -> None:
        names = {"job": "j", "role": "r", "node": "n"} | {place: name}
        with pytest.raises(ConfigurationError, match=f"^{place} must be 1 to 64"):
            Identity(**names)

    def test_the_longest_name_is_taken(self) -> None:
        assert Identity.parse(Identity("x" * 64, "y" * 64, "z" * 64).uri).node == "z" * 64

    @pytest.mark.parametrize(
        "uri",
        [
            "",
            "spiffe://quicoll/j/worker",
            "spiffe://quicoll/j/worker/n/",
            "spiffe://quicoll/j/worker/n/m",
            "spiffe://quicoll/j//n",
            "spiffe://other/j/worker/n",
            "SPIFFE://quicoll/j/worker/n",
            "https://quicoll/j/worker/n",
            "spiffe://quicoll:1/j/worker/n",
            "spiffe://quicoll/j/worker/n?x",
            " spiffe://quicoll/j/worker/n",
        ],
    )
    def test_parse_takes_nothing_but_the_exact_form(self, uri: str) -> None:
        with pytest.raises(ConfigurationError):
            Identity.parse(uri)


class TestVerifyPeer:
    def test_a_node_of_the_job_gets_in(self, root: Forge) -> None:
        peer = node(root, purposes=[ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        assert verify_peer(peer.certificate, trust=[root.certificate], job="j", now=NOW) == Identity("j", WORKER, "n")

    def test_other_names_beside_the_uri_do_not_matter(self, root: Forge) -> None:
        peer = node(root, dns=("n.example",), digital_signature=True)
        assert verify_peer(peer.certificate, trust=[root.certificate], job="j", now=NOW).node == "n"

    def test_any_extended_key_usage_covers_both_purposes(self, root: Forge) -> None:
        peer = node(root, purposes=[ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE])
        assert verify_peer(peer.certificate, trust=[root.certificate], job="j", now=NOW).node == "n"

    def test_a_p256_node_under_a_p256_authority_gets_in(self) -> None:
        authority = Forge(name="root", ca=True, key=ec.generate_private_key(ec.SECP256R1()))
        peer = node(authority, key=ec.generate_private_key(ec.SECP256R1()))
        assert verify_peer(peer.certificate, trust=[authority.certificate], job="j", now=NOW).node == "n"

    def test_an_intermediate_authority_carries_the_chain(self, root: Forge) -> None:
        between = Forge(name="between", ca=True, issuer=root)
        peer = node(between)
        found = verify_peer(
            peer.certificate, [between.certificate], trust=[root.certificate], job="j", now=NOW.astimezone()
        )
        assert found.node == "n"

    def test_old_and_new_authority_of_one_name_are_trusted_while_one_replaces_the_other(self) -> None:
        old, new = Authority.create(job="j", now=NOW), Authority.create(job="j", now=NOW)
        trust = [old.certificate, new.certificate]
        for authority in (old, new):
            certificate, _ = authority.sign(role=WORKER, node="n", now=NOW)
            assert verify_peer(certificate, trust=trust, job="j", now=NOW).node == "n"

    def test_no_certificate(self, root: Forge) -> None:
        assert refusal(None, root=root) == "the peer sent no certificate"

    def test_foreign_authority(self, root: Forge) -> None:
        foreign = Forge(name="foreign", ca=True)
        reason = refusal(node(foreign), root=root, chain=(foreign,))
        assert "was not signed by an authority that we trust" in reason

    def test_foreign_authority_of_the_same_name(self, root: Forge) -> None:
        impostor = Forge(name="root", ca=True)
        assert "chain of certificates is broken" in refusal(node(impostor), root=root)

    def test_self_signed(self, root: Forge) -> None:
        alone = Forge(name="n", uris=("spiffe://quicoll/j/worker/n",))
        assert "was not signed by an authority that we trust" in refusal(alone, root=root)

    def test_the_text_of_a_stranger_is_not_repeated(self, root: Forge) -> None:
        foreign = Forge(name="PLEASE-LOG-ME", ca=True)
        peer = node(foreign, name="PLEASE-LOG-ME", uris=("spiffe://quicoll/PLEASE-LOG-ME/worker/n",))
        assert "PLEASE-LOG-ME" not in refusal(peer, root=root, chain=(foreign,))

    def test_missing_intermediate(self, root: Forge) -> None:
        between = Forge(name="between", ca=True, issuer=root)
        assert "was not signed by an authority that we trust" in refusal(node(between), root=root)

    def test_a_node_cannot_sign_another_node(self, root: Forge) -> None:
        insider = node(root)
        reason = refusal(node(insider, name="m", uris=("spiffe://quicoll/j/worker/m",)), root=root, chain=(insider,))
        assert reason.startswith("the chain of certificates is broken at depth 1")

    def test_path_length_is_kept(self) -> None:
        short = Forge(name="root", ca=True, path_length=0)
        between = Forge(name="between", ca=True, issuer=short)
        assert "broken" in refusal(node(between), root=short, chain=(between,))

    def test_expired(self, root: Forge) -> None:
        peer = node(root, until=NOW - timedelta(hours=1))
        assert (
            refusal(peer, root=root) == "the certificate expired at 2026-06-01 11:00:00Z, now is 2026-06-01 12:00:00Z"
        )

    def test_not_yet_valid(self, root: Forge) -> None:
        peer = node(root, since=NOW + timedelta(hours=1))
        assert refusal(peer, root=root).startswith("the certificate is not valid before 2026-06-01 13:00:00Z")

    def test_an_expired_authority_is_named_as_such(self, root: Forge) -> None:
        peer = node(root, until=NOW + 9 * DAY)
        assert refusal(peer, root=root, now=NOW + 2 * DAY).startswith(
            "the certificate 1 above the peer's own expired at"
        )

    def test_now_decides_not_the_machine(self, root: Forge) -> None:
        """The same bytes are refused, taken and refused as `now` moves, in whatever zone it is given."""
        peer = node(root, since=NOW, until=NOW + timedelta(hours=2))
        zone = datetime.now().astimezone().tzinfo
        assert "not valid before" in refusal(peer, root=root, now=(NOW - timedelta(hours=1)).astimezone(zone))
        noon = (NOW + timedelta(hours=1)).astimezone(zone)
        assert verify_peer(peer.certificate, trust=[root.certificate], job="j", now=noon).node == "n"
        assert "expired" in refusal(peer, root=root, now=(NOW + timedelta(hours=3)).astimezone(zone))

    def test_who_was_accepted_is_asked_no_signature_again_but_each_time_for_date_trust_and_job(
        self, root: Forge, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checked: list[x509.Certificate] = []
        real = verification._verify_chain

        def counted(certificate: x509.Certificate, *more: Any, **settings: Any) -> None:
            checked.append(certificate)
            real(certificate, *more, **settings)

        monkeypatch.setattr(verification, "_verify_chain", counted)
        peer = node(root, since=NOW, until=NOW + timedelta(hours=2))
        for _ in range(3):
            assert verify_peer(peer.certificate, trust=[root.certificate], job="j", now=NOW).node == "n"
        assert len(checked) == 1
        assert "expired" in refusal(peer, root=root, now=NOW + timedelta(hours=2, seconds=1))
        assert "not valid before" in refusal(peer, root=root, now=NOW - timedelta(seconds=1))
        last = NOW + timedelta(hours=2) - timedelta(microseconds=1)
        assert verify_peer(peer.certificate, trust=[root.certificate], job="j", now=last).node == "n"
        assert len(checked) == 3
        with pytest.raises(AuthenticationError, match="is for job 'j', not 'k'"):
            verify_peer(peer.certificate, trust=[root.certificate], job="k", now=NOW)
        other = Forge(name="another root", ca=True)
        assert "not signed by an authority that we trust" in refusal(peer, root=other)
        assert "not signed by an authority that we trust" in refusal(peer, root=other), "a refusal is not remembered"
        assert len(checked) == 5
        for _ in range(2):  # what else it sends is not remembered
            verify_peer(peer.certificate, [other.certificate], trust=[root.certificate], job="j", now=NOW)
        assert len(checked) == 7

    def test_the_oldest_of_those_that_were_accepted_are_forgotten(
        self, root: Forge, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(verification, "_MOST_ACCEPTED", 2)
        monkeypatch.setattr(verification, "_accepted", {})
        made = [node(root) for _ in range(4)]
        for peer in made:
            verify_peer(peer.certificate, trust=[root.certificate], job="j", now=NOW)
        assert [certificate for certificate, _ in verification._accepted] == [peer.certificate for peer in made[2:]]

    def test_no_name_at_all(self, root: Forge) -> None:
        assert refusal(node(root, uris=()), root=root).endswith("it names 0")

    def test_a_dns_name_is_no_identity(self, root: Forge) -> None:
        assert refusal(node(root, uris=(), dns=("worker",)), root=root).endswith("it names 0")

    def test_several_uris(self, root: Forge) -> None:
        """X.509-SVID section 2: more than one URI must be refused, else each side may look at another."""
        uris = ("spiffe://quicoll/j/worker/n", "spiffe://quicoll/j/coordinator/c")
        assert refusal(node(root, uris=uris), root=root).endswith("it names 2")

    @pytest.mark.parametrize(
        "uri", ["https://example.org/n", "spiffe://quicoll/j/worker", "spiffe://quicoll/j/worker/.."]
    )
    def test_malformed_uri(self, root: Forge, uri: str) -> None:
        assert "URI is malformed" in refusal(node(root, uris=(uri,)), root=root)

    def test_another_job(self, root: Forge) -> None:
        peer = node(root, uris=("spiffe://quicoll/other/worker/n",))
        with pytest.raises(AuthenticationError, match=r"is for job 'other', not 'j'") as caught:
            verify_peer(peer.certificate, trust=[root.certificate], job="j", now=NOW)
        assert caught.value.peer == "n"

    def test_an_authority_is_no_node(self, root: Forge) -> None:
        assert "is an authority's" in refusal(node(root, ca=True), root=root)

    def test_the_trusted_authority_itself_is_no_node(self) -> None:
        alone = Forge(name="root", ca=True, uris=("spiffe://quicoll/j/worker/n",))
        assert "is an authority's" in refusal(alone, root=alone)

    @pytest.mark.parametrize(
        "key",
        [
            rsa.generate_private_key(public_exponent=65537, key_size=2048),
            ec.generate_private_key(ec.SECP384R1()),
        ],
        ids=["rsa", "p384"],
    )
    def test_other_kinds_of_key(self, root: Forge, key: Any) -> None:
        assert refusal(node(root, key=key), root=root) == "the certificate's key must be Ed25519 or P-256"

    @pytest.mark.parametrize(
        ("purpose", "missing"),
        [(ExtendedKeyUsageOID.SERVER_AUTH, "clientAuth"), (ExtendedKeyUsageOID.CLIENT_AUTH, "serverAuth")],
    )
    def test_a_node_both_dials_and_listens(self, root: Forge, purpose: x509.ObjectIdentifier, missing: str) -> None:
        assert refusal(node(root, purposes=[purpose]), root=root).endswith(f"lacks {missing}")

    def test_a_key_that_may_not_sign(self, root: Forge) -> None:
        assert "allows no signature" in refusal(node(root, digital_signature=False), root=root)

    def test_a_longer_chain_is_refused_before_it_is_looked_at(self, root: Forge) -> None:
        chain = [root]
        for depth in range(MAX_CHAIN - 1):
            chain.append(Forge(name=f"between {depth}", ca=True, issuer=chain[-1]))
        between = tuple(chain[1:])
        peer = node(between[-1])
        sent = [entry.certificate for entry in between]
        assert verify_peer(peer.certificate, sent, trust=[root.certificate], job="j", now=NOW).node == "n"
        assert "5 certificates, at most 4" in refusal(peer, root=root, chain=(*between, root))

    def test_unreadable_extensions(self, root: Forge) -> None:
        """A subject alternative name that claims more bytes than it has: signed by us, and still no crash."""
        signed = node(root)
        builder = (
            x509.CertificateBuilder()
            .subject_name(signed.subject)
            .issuer_name(root.subject)
            .public_key(signed.key.public_key())
            .serial_number(1)
            .not_valid_before(signed.since)
            .not_valid_after(signed.until)
            .add_extension(
                x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, bytes.fromhex("307f8601")), critical=False
            )
        )
        signed.made = builder.sign(root.key, None)
        assert "certificate" in refusal(signed, root=root)
        with pytest.raises(AuthenticationError, match="extensions cannot be read"):
            identity_of(signed.certificate)

    @pytest.mark.parametrize("ca", [False, None])
    def test_trust_must_be_authorities(self, root: Forge, ca: bool | None) -> None:
        plain = Forge(name="plain", ca=ca)
        with pytest.raises(ConfigurationError, match="basicConstraints CA"):
            verify_peer(node(plain).certificate, trust=[root.certificate, plain.certificate], job="j", now=NOW)

    def test_trust_must_not_be_empty(self, root: Forge) -> None:
        """An empty store must never mean the system's own authorities."""
        with pytest.raises(ConfigurationError, match="one or more"):
            verify_peer(node(root).certificate, trust=[], job="j", now=NOW)

    def test_now_must_be_aware(self, root: Forge) -> None:
        with pytest.raises(ConfigurationError, match="aware"):
            verify_peer(node(root).certificate, trust=[root.certificate], job="j", now=NOW.replace(tzinfo=None))

    def test_identity_of_says_what_is_claimed_without_verifying(self, root: Forge) -> None:
        alone = Forge(name="n", uris=("spiffe://quicoll/j/worker/n",), until=NOW - timedelta(hours=1))
        assert identity_of(alone.certificate) == Identity("j", WORKER, "n")


@dataclass(kw_only=True)
class Files:
    """A node's three files, right at first; a test spoils one of them."""

    directory: Path
    root: Forge
    own: Forge

    def __post_init__(self) -> None:
        self.authority.write_bytes(pem(self.root))
        self.certificate.write_bytes(pem(self.own))
        self.write_key(self.own.key)

    @property
    def authority(self) -> Path:
        return self.directory / "ca.pem"

    @property
    def certificate(self) -> Path:
        return self.directory / "worker-n.pem"

    @property
    def key(self) -> Path:
        return self.directory / "worker-n.key"

    def write_key(self, key: Any, *, mode: int = 0o600, passphrase: bytes = b"") -> None:
        encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
        self.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
        self.key.chmod(mode)

    def load(self, *, now: datetime = NOW) -> Credentials:
        return Credentials.load(certificate=self.certificate, key=self.key, authority=self.authority, now=now)

    def refusal(self, at: Path, *, now: datetime = NOW) -> str:
        """What `load` raises; it must name the file `at` first."""
        with pytest.raises(ConfigurationError) as caught:
            self.load(now=now)
        text = str(caught.value)
        assert text.startswith(f"{at}: ")
        assert "PRIVATE" not in text
        return text.removeprefix(f"{at}: ")


def pem(*entries: Forge) -> bytes:
    return b"".join(entry.certificate.public_bytes(Encoding.PEM) for entry in entries)


@pytest.fixture
def files(tmp_path: Path, root: Forge) -> Files:
    return Files(directory=tmp_path, root=root, own=node(root))


class TestLoad:
    def test_files_of_a_node(self, files: Files) -> None:
        loaded = files.load()
        assert loaded.identity == Identity("j", WORKER, "n")
        assert loaded.certificate == files.own.certificate
        assert loaded.chain == ()
        assert loaded.trust == (files.root.certificate,)
        assert loaded.authority_pem == pem(files.root)
        assert loaded.fingerprint == files.own.certificate.fingerprint(hashes.SHA256()).hex()

    def test_intermediates_follow_the_certificate(self, files: Files, root: Forge) -> None:
        between = Forge(name="between", ca=True, issuer=root)
        own = node(between, key=files.own.key)
        files.certificate.write_bytes(pem(own, between))
        assert files.load().chain == (between.certificate,)

    def test_several_authorities(self, files: Files) -> None:
        other = Forge(name="other", ca=True)
        files.authority.write_bytes(pem(other, files.root))
        assert files.load().trust == (other.certificate, files.root.certificate)

    def test_a_key_given_by_a_symbolic_link_is_judged_by_its_target(self, files: Files) -> None:
        """Secrets that an orchestrator mounts are links."""
        target = files.directory / "mounted"
        files.key.rename(target)
        files.key.symlink_to(target)
        assert files.load().identity.node == "n"
        target.chmod(0o640)
        assert "mode 0640" in files.refusal(files.key)

    @pytest.mark.parametrize("which", ["certificate", "key", "authority"])
    def test_missing_file(self, files: Files, which: str) -> None:
        path = getattr(files, which)
        path.unlink()
        assert files.refusal(path) == "cannot be read: No such file or directory"

    @pytest.mark.parametrize("which", ["certificate", "key", "authority"])
    def test_a_directory_in_place_of_a_file(self, files: Files, which: str) -> None:
        path = getattr(files, which)
        path.unlink()
        path.mkdir(mode=0o700)
        assert files.refusal(path) == "cannot be read: Is a directory"

    def test_a_fifo_in_place_of_a_key_does_not_hang(self, files: Files) -> None:
        files.key.unlink()
        os.mkfifo(files.key, 0o600)
        assert files.refusal(files.key) == "is not a regular file"

    def test_a_file_far_too_large(self, files: Files) -> None:
        with files.certificate.open("wb") as file:
            file.truncate(1 << 30)
        assert "is larger than 1048576 bytes" in files.refusal(files.certificate)

    @pytest.mark.parametrize("which", ["certificate", "authority"])
    @pytest.mark.parametrize(
        "data", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
    )
    def test_wrong_certificate_pem(self, files: Files, which: str, data: bytes) -> None:
        path = getattr(files, which)
        path.write_bytes(data)
        assert files.refusal(path) == "holds no readable PEM certificate"

    @pytest.mark.parametrize("data", [b"", b"-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"])
    def test_wrong_key_pem(self, files: Files, data: bytes) -> None:
        files.key.write_bytes(data)
        assert files.refusal(files.key) == "holds no readable PEM private key"

    def test_encrypted_key(self, files: Files) -> None:
        files.write_key(files.own.key, passphrase=b"x")
        assert files.refusal(files.key).startswith("is encrypted")

    def test_key_of_another_kind(self, files: Files) -> None:
        files.write_key(ec.generate_private_key(ec.SECP384R1()))
        assert files.refusal(files.key) == "the key must be Ed25519 or P-256"

    def test_key_of_another_certificate(self, files: Files) -> None:
        files.write_key(ed25519.Ed25519PrivateKey.generate())
        assert files.refusal(files.key) == f"is not the key of {files.certificate}"

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o666])
    def test_key_that_others_may_use(self, files: Files, mode: int) -> None:
        files.key.chmod(mode)
        assert f"others than its owner may use this key (mode {mode:04o})" in files.refusal(files.key)

    def test_a_key_that_its_owner_may_only_read_is_taken(self, files: Files) -> None:
        files.key.chmod(0o400)
        assert files.load().identity.node == "n"

    @pytest.mark.parametrize("uris", [(), ("spiffe://quicoll/j/worker/n", "spiffe://quicoll/j/worker/m")])
    def test_own_certificate_without_one_identity(self, files: Files, root: Forge, uris: tuple[str, ...]) -> None:
        files.certificate.write_bytes(pem(node(root, uris=uris, key=files.own.key)))
        assert f"must name exactly one URI (spiffe://quicoll/...), it names {len(uris)}" in files.refusal(
            files.certificate
        )

    def test_own_certificate_of_another_authority(self, files: Files) -> None:
        files.authority.write_bytes(pem(Forge(name="other", ca=True)))
        assert "was not signed by an authority that we trust" in files.refusal(files.certificate)

    def test_own_certificate_expired(self, files: Files) -> None:
        text = files.refusal(files.certificate, now=NOW + timedelta(hours=25))
        assert text.startswith("every peer would refuse this certificate:")
        assert "expired at 2026-06-02 12:00:00Z" in text

    def test_own_certificate_not_yet_valid(self, files: Files) -> None:
        text = files.refusal(files.certificate, now=NOW - timedelta(hours=25))
        assert "is not valid before 2026-05-31 12:00:00Z" in text

    def test_authority_that_is_none(self, files: Files) -> None:
        files.authority.write_bytes(pem(files.own))
        assert files.refusal(files.authority) == "holds a certificate that is no CA"

    def test_from_directory_finds_the_files_by_role_and_node(self, files: Files) -> None:
        loaded = Credentials.from_directory(files.directory, role=WORKER, node="n", now=NOW)
        assert loaded.identity == Identity("j", WORKER, "n")

    def test_from_directory_refuses_another_nodes_certificate(self, files: Files) -> None:
        files.certificate.rename(files.directory / "worker-m.pem")
        files.key.rename(files.directory / "worker-m.key")
        with pytest.raises(ConfigurationError, match=r"is the certificate of worker/n, not of worker/m"):
            Credentials.from_directory(files.directory, role=WORKER, node="m", now=NOW)

    def test_from_directory_does_not_leave_the_directory(self, files: Files) -> None:
        with pytest.raises(ConfigurationError, match=r"^node must be"):
            Credentials.from_directory(files.directory / "below", role=WORKER, node="/../../worker-n", now=NOW)


class TestCredentials:
    def test_no_repr_or_text_shows_the_key(self, files: Files) -> None:
        credentials = files.load()
        secret = files.own.key.private_bytes_raw().hex()
        for text in (repr(credentials), str(credentials), f"{credentials}"):
            assert text.startswith("<Credentials spiffe://quicoll/j/worker/n valid until 2026-06-02")
            assert secret not in text
            assert "key" not in text.lower()

    def test_from_parts_refuses_a_foreign_key(self, root: Forge) -> None:
        with pytest.raises(ConfigurationError, match="does not belong"):
            Credentials.from_parts(
                node(root).certificate,
                private_key=ed25519.Ed25519PrivateKey.generate(),
                trust=[root.certificate],
                now=NOW,
            )


def handshake(client: Credentials, server: Credentials) -> tuple[list[object], list[object]]:
    """Both ends' events of a QUIC handshake in memory, until neither has anything to say."""

    def configuration(credentials: Credentials, *, is_client: bool) -> QuicConfiguration:
        made = QuicConfiguration(is_client=is_client, alpn_protocols=["test"])
        made.certificate = credentials.certificate
        made.certificate_chain = list(credentials.chain)
        made.private_key = credentials.private_key
        made.cadata = credentials.authority_pem
        return made

    dialling = QuicConnection(configuration=configuration(client, is_client=True))
    listening = QuicConnection(
        configuration=configuration(server, is_client=False),
        original_destination_connection_id=dialling.original_destination_connection_id,
    )
    now = 0.0
    near, far = ("192.0.2.1", 4433), ("192.0.2.2", 4433)  # RFC 5737: addresses for documentation
    dialling.connect(far, now=now)
    for _ in range(8):
        moved = False
        for source, sink, address in ((dialling, listening, near), (listening, dialling, far)):
            for data, _ in source.datagrams_to_send(now=now):
                sink.receive_datagram(data, address, now=now)
                moved = True
        now += 0.001
        if not moved:
            break
    for connection in (dialling, listening):  # an end that has closed says so once its draining period is over
        deadline = connection.get_timer()
        if deadline is not None:
            connection.handle_timer(now=deadline)

    def drain(connection: QuicConnection) -> list[object]:
        return list(iter(connection.next_event, None))

    return drain(dialling), drain(listening)


class TestAioquicTakesThem:
    """aioquic verifies a server by `cadata` alone when no server name is set: our names are URIs, not hosts."""

    @pytest.mark.parametrize("algorithm", ["ed25519", "p256"])
    def test_handshake(self, algorithm: Any) -> None:
        worker, coordinator = ephemeral("j", [(WORKER, "n"), (COORDINATOR, "c")], algorithm=algorithm).values()
        for client, server in ((worker, coordinator), (coordinator, worker)):
            dialled, listened = handshake(client, server)
            assert any(isinstance(event, HandshakeCompleted) for event in dialled)
            assert any(isinstance(event, HandshakeCompleted) for event in listened)

    def test_a_server_of_another_authority_is_refused(self) -> None:
        [worker] = ephemeral("j", [(WORKER, "n")]).values()
        [stranger] = ephemeral("j", [(COORDINATOR, "c")]).values()
        dialled, _ = handshake(worker, stranger)
        assert not any(isinstance(event, HandshakeCompleted) for event in dialled)
        # 0x100 + the TLS alert bad_certificate, 42 (RFC 9001 section 4.8).
        assert [event.error_code for event in dialled if isinstance(event, ConnectionTerminated)] == [0x100 + 42]
