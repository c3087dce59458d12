"""`quicoll certs`: make a job's authority and its nodes' certificates, and look at them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from cryptography.hazmat.primitives import hashes

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.security.authority import KeyAlgorithm, create_authority, issue, job_of
from quicoll_transport.security.credentials import AUTHORITY_FILE, AUTHORITY_KEY_FILE, node_files, read_certificates
from quicoll_transport.security.verification import identity_of, is_authority

if TYPE_CHECKING:
    from cryptography import x509

__all__ = ["register"]

_certs_app = typer.Typer(help="Make and look at the certificates that let a node in.", no_args_is_help=True)

CertsDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Where the job's certificates are.", show_default=False)
]

MadeJsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object: what it is, and the paths of certificate and key.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.add_typer(_certs_app, name="certs")


@_certs_app.command("init")
def init(
    directory: CertsDirectory,
    job: Annotated[str, typer.Option(help="Name of the job; nodes of other jobs are refused.", show_default=False)],
    algorithm: Annotated[KeyAlgorithm, typer.Option(help="Kind of all keys of this job.")] = "ed25519",
    days: Annotated[int, typer.Option(help="Days for which the authority is valid.")] = 3650,
    as_json: MadeJsonOption = False,
) -> None:
    """Make the authority of a job: ca.pem, which every node needs, and ca.key, which stays here."""
    authority = create_authority(directory, job=job, algorithm=algorithm, days=days)
    if as_json:
        described = _describe(authority.certificate)
        files = {"certificate": str(directory / AUTHORITY_FILE), "key": str(directory / AUTHORITY_KEY_FILE)}
        typer.echo(json.dumps(described | files))
        return
    typer.echo(f"authority of job {job}, valid until {_date(authority.certificate.not_valid_after_utc)}")
    typer.echo(f"  {directory / AUTHORITY_FILE}  give it to every node")
    typer.echo(f"  {directory / AUTHORITY_KEY_FILE}  keep it here: its owner can let any node in")


@_certs_app.command("issue")
def issue_one(
    directory: CertsDirectory,
    role: Annotated[
        Literal["worker", "coordinator", "operator", "reader", "relay"],
        typer.Option(help="Role of the node.", show_default=False),
    ],
    node: Annotated[str, typer.Option(help="Name of the node, unique within its role.", show_default=False)],
    days: Annotated[int, typer.Option(help="Days for which it is valid, at most until the authority ends.")] = 365,
    dns: Annotated[list[str] | None, typer.Option(help="A DNS name to include; may be repeated.")] = None,
    ip: Annotated[list[str] | None, typer.Option(help="An IP address to include; may be repeated.")] = None,
    as_json: MadeJsonOption = False,
) -> None:
    """Make the key and the certificate of one node."""
    credentials = issue(directory, role=role, node=node, days=days, dns=dns or (), ip=ip or ())
    certificate, key = node_files(directory, role=role, node=node)
    if as_json:
        files = {"certificate": str(certificate), "key": str(key)}
        typer.echo(json.dumps(_describe(credentials.certificate) | files))
        return
    typer.echo(f"{credentials.identity.uri}, valid until {_date(credentials.certificate.not_valid_after_utc)}")
    typer.echo(f"  {certificate}")
    typer.echo(f"  {key}  for this node alone, mode 0600")


@_certs_app.command("show")
def show_certificates(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A PEM file with certificates.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON list, one entry for each certificate.")] = False,
) -> None:
    """Print the node, validity and fingerprint of each certificate in a file. Nothing is verified."""
    entries = [_describe(certificate) for certificate in read_certificates(file)]
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
        return
    for entry in entries:
        for name, value in entry.items():
            typer.echo(f"{name:<12} {value}")


def _describe(certificate: x509.Certificate) -> dict[str, str]:
    """Return what is printed of a certificate: only names of our form, so that none can write control codes."""
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    now = datetime.now(UTC)
    return {
        "identity": _authority_of(certificate) if is_authority(certificate) else identity_of(certificate).uri,
        "not before": _date(since),
        "not after": _date(until),
        "state": "expired" if now > until else "not yet valid" if now < since else "valid",
        "sha256": certificate.fingerprint(hashes.SHA256()).hex(),
    }


def _authority_of(certificate: x509.Certificate) -> str:
    try:
        return f"authority of job {job_of(certificate)}"
    except ConfigurationError:
        return "authority, not made by quicoll"


def _date(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")
