"""How `quicoll status` and `quicoll top` look at a job, and what becomes of log lines meanwhile."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from quicoll.membership.status_client import JobWatch

if TYPE_CHECKING:
    from quicoll.cli.membership_options import FoundJob

__all__ = ["watch_job"]


def watch_job(found: FoundJob, named: str | None) -> JobWatch:
    """Return what looks at a job, with log lines gone unless somebody has asked for them.

    Each attempt to connect that fails is a warning in some log, aioquic's too, and Python prints warnings that nobody
    handles; here the reason is in what is shown, and lines between would spoil it.

    Args:
        found: How the job is reached.
        named: The certificate, as `who_looks` has it.
    Raises:
        LocalError: There is no such certificate.
    """
    for name in ("quic", "quicoll"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    return JobWatch(found.coordinator, found.certs, named=named)
