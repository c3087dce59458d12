"""The runs of `quicoll run` that are at work on this host: each says in its temporary directory how it is reached.

`run.json` is in a directory of mode 0700 that its user alone can read (`quicoll.rendezvous.scratch`), and goes with it.
So whoever finds it may use the certificates that it names as well.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from quicoll.errors import LocalError
from quicoll.rendezvous.scratch import living

__all__ = ["RunningJob", "announce", "find_run"]

_FILE = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A run at work.

    Attributes:
        pid: Of the process of `quicoll run`.
        job: The job's name.
        coordinator: Where its coordinator listens, "host:port".
        certs: Directory with its certificates.
        script: What its workers run, for people.
        started: When, in seconds since 1970, for people.
    """

    pid: int
    job: str
    coordinator: str
    certs: Path
    script: str = ""
    started: float = 0.0

    def __str__(self) -> str:
        at = f", since {datetime.fromtimestamp(self.started).astimezone():%H:%M:%S}" if self.started else ""
        return f"--run {self.pid} (job {self.job}{f', {self.script}' if self.script else ''}{at})"


def announce(directory: Path, run: RunningJob) -> None:
    """Write how a run is reached, whole or not at all.

    Args:
        directory: Its temporary directory.
        run: How.
    """
    unfinished = directory / f"{_FILE}.new"
    unfinished.write_text(json.dumps({**asdict(run), "certs": str(run.certs)}))
    unfinished.rename(directory / _FILE)


def find_run(which: str | None = None, *, base: Path | None = None) -> RunningJob:
    """Return the one run of this user that is at work here.

    Args:
        which: The number of its process, or the name of its job, where there may be several.
        base: Where temporary directories are; None takes the system's place.
    Raises:
        LocalError: There is none, or there are several.
    """
    found = [run for path in living(base or Path(tempfile.gettempdir())) if (run := _read(path / _FILE)) is not None]
    if which is not None:
        found = [run for run in found if which in (str(run.pid), run.job)]
    if not found:
        meant = "of this user" if which is None else f"with the process or the job {which!r}"
        raise LocalError(f"no `quicoll run` {meant} is at work here; name the job by --coordinator and --certs")
    if len(found) > 1:
        runs = ", ".join(str(run) for run in sorted(found, key=lambda run: (run.started, run.pid)))
        raise LocalError(f"several runs are at work here; name one: {runs}")
    return found[0]


def _read(path: Path) -> RunningJob | None:
    try:
        if path.stat().st_uid != os.geteuid():
            return None
        said = json.loads(path.read_text())
        return RunningJob(**{**said, "certs": Path(said["certs"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it has not come so far, or has just ended
