"""A certificate for a node that keeps its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from quicoll.errors import LocalError
from quicoll.rendezvous.applicant import Applicant, certificate_pem, certify_node
from quicoll_transport.security.authority import Authority
from quicoll_transport.security.credentials import Credentials


def test_what_it_writes_is_this_nodes_and_the_key_was_never_away(tmp_path: Path) -> None:
    authority, applicant = Authority.create(job="train"), Applicant(job="train", node="worker-1")
    assert "PRIVATE" not in applicant.public_key
    signed = certify_node(authority, public_key=applicant.public_key, node="worker-1")
    applicant.accept(tmp_path, authority=certificate_pem(authority.certificate), certificate=signed)
    found = Credentials.from_directory(tmp_path, role="worker", node="worker-1")
    assert str(found.identity) == "worker/worker-1"
    assert (tmp_path / "worker-worker-1.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("job", "node", "match"),
    [
        ("other", "worker-1", "of the job 'other', and this is 'worker-1' of 'train'"),
        ("train", "worker-2", "is for worker 'worker-2'"),
    ],
)
def test_the_certificate_of_another_job_or_node_is_refused(job: str, node: str, match: str, tmp_path: Path) -> None:
    authority, applicant = Authority.create(job=job), Applicant(job="train", node="worker-1")
    signed = certify_node(authority, public_key=applicant.public_key, node=node)
    with pytest.raises(LocalError, match=match):
        applicant.accept(tmp_path, authority=certificate_pem(authority.certificate), certificate=signed)
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    authority, applicant = Authority.create(job="train"), Applicant(job="train", node="worker-1")
    pem = certificate_pem(authority.certificate)
    of_another = certify_node(authority, public_key=Applicant(job="train", node="worker-1").public_key, node="worker-1")
    signed = certify_node(Authority.create(job="train"), public_key=applicant.public_key, node="worker-1")
    for certificate in (of_another, signed, "no certificate"):
        with pytest.raises(LocalError, match="the certificate cannot be used"):
            applicant.accept(tmp_path, authority=pem, certificate=certificate)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("key", "node"), [("no key", "worker-1"), (None, "a/b")])
def test_what_cannot_be_signed_says_for_whom(key: str | None, node: str) -> None:
    public_key = key or Applicant(job="train", node="worker-1").public_key
    with pytest.raises(LocalError, match=f"what '{node}' asks for cannot be signed"):
        certify_node(Authority.create(job="train"), public_key=public_key, node=node)
