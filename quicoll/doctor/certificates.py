"""A rank's files: certificates, keys, the deny list.

The checks of `Credentials` are the ones that count. Where they fail, this module says which file it is and what to do
about it; and it says what will fail soon.
"""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from quicoll.doctor.finding import CheckResult, fine, note, wrong
from quicoll_transport.errors import TransportError
from quicoll_transport.security.access import read_deny_list
from quicoll_transport.security.credentials import AUTHORITY_FILE, AUTHORITY_KEY_FILE, Credentials, node_files
from quicoll_transport.security.identity import WORKER

if TYPE_CHECKING:
    from cryptography import x509

    from quicoll.config import Config

__all__ = ["certificates", "expiry"]

SOON = timedelta(days=14)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def certificates(config: Config, now: datetime | None = None) -> tuple[list[CheckResult], Credentials | None]:
    """Look at what the settings name.

    Args:
        config: Of the rank.
        now: The date, aware; None for the system's clock.
    Returns:
        What was found, and the credentials where they can be used.
    """
    now = datetime.now(UTC) if now is None else now
    directory = Path(config.certs)
    if not directory.is_dir() and config.sources["certs"] == config.sources["coordinator"] == "default":
        says = f"There is no directory of certificates at {directory}: `quicoll run`, torchrun and Slurm need none."
        return [note("certificates", says, _make(directory, config, "For several machines otherwise"))], None
    if not directory.is_dir():
        advice = _make(directory, config, "Set certs (QUICOLL_CERTS), or make them")
        return [wrong("certificates", f"There is no directory of certificates at {directory}.", advice)], None
    findings = _permissions(directory, config.node)
    missing = [path for path in _files(directory, config.node) if not path.exists()]
    if missing:
        advice = (
            f"Where ca.key is: quicoll certs issue {directory} --role worker --node {config.node}; copy both files."
        )
        says = f"There is no {missing[0]}, which is a file of the node {config.node!r} (from {config.sources['node']})."
        return [*findings, wrong("certificates", says, advice)], None
    try:
        found = Credentials.from_directory(directory, role=WORKER, node=config.node, now=now)
    except TransportError as error:
        return [*findings, wrong("certificates", f"{error}.", _advice(str(error), directory, config))], None
    if found.identity.job != config.job:
        says = f"The certificate is for the job {found.identity.job!r}, and the rank is for {config.job!r} "
        says += f"(from {config.sources['job']})."
        advice = f"Set job={found.identity.job} (QUICOLL_JOB), or take the certificates of the other job."
        return [*findings, wrong("certificates", says, advice)], found
    findings += expiry(f"The certificate of {found.identity.node}", found.certificate, now)
    for authority in found.trust:
        findings += expiry("The authority's certificate", authority, now)
    if config.deny is not None:
        try:
            read_deny_list(config.deny)
        except TransportError as error:
            findings.append(
                wrong("certificates", f"{error}.", "Correct the deny list; no rank starts with one like it.")
            )
    if all(finding.state == "fine" for finding in findings):
        end = found.certificate.not_valid_after_utc
        says = f"{found.identity.uri}, signed by an authority that is here, valid until {end:%Y-%m-%d}."
        findings.append(fine("certificates", says))
    return findings, found


def expiry(name: str, certificate: x509.Certificate, now: datetime) -> list[CheckResult]:
    """Say so where a certificate ends soon.

    Args:
        name: Whose it is, for the sentence.
        certificate: The certificate.
        now: The date, aware.
    """
    left = certificate.not_valid_after_utc - now
    whole = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    if left > SOON or left > whole / 2:  # one that was made for a short time is no news
        return []
    says = f"{name} ends on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; after that no new connection is made."
    return [note("certificates", says, "Issue a new one; a running rank takes it by job.rotate_certificates().")]


def _files(directory: Path, node: str) -> tuple[Path, ...]:
    return (directory / AUTHORITY_FILE, *node_files(directory, role=WORKER, node=node))


def _permissions(directory: Path, node: str) -> list[CheckResult]:
    findings: list[CheckResult] = []
    for path in (directory, *_files(directory, node)):
        try:
            mode = os.stat(path).st_mode
        except OSError:
            continue  # said elsewhere
        if mode & _OTHERS_WRITE and not (path == directory and mode & stat.S_ISVTX):
            says = f"Others may write to {path} (mode {stat.S_IMODE(mode):04o}), and so say whom this rank trusts."
            findings.append(wrong("certificates", says, f"chmod go-w {path}"))
    if (directory / AUTHORITY_KEY_FILE).exists():
        says = f"{directory / AUTHORITY_KEY_FILE} is here; whoever reads it can let any node into the job."
        findings.append(
            note("certificates", says, "Keep it on one machine that runs no rank, and remove it elsewhere.")
        )
    return findings


def _make(directory: Path, config: Config, where: str) -> str:
    return f"{where}: quicoll certs init {directory} --job {config.job}"


def _advice(reason: str, directory: Path, config: Config) -> str:
    anew = f"quicoll certs issue {directory} --role worker --node {config.node}"
    if "chmod" in reason:
        return "chmod 600 the file; issue another key if somebody may have read it."
    if "expired" in reason:
        return f"Issue a new one: move the old files away, then {anew}"
    if "not valid before" in reason:
        return "Set this host's clock: chronyc makestep, or timedatectl set-ntp true."
    return f"Copy the three files of this node from where ca.key is anew, or issue others: {anew}"
