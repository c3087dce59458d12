"""Processes of a program's own beside it (lanes, engines): which there are."""

from __future__ import annotations

import os
from pathlib import Path


def started_by(process: int, module: str) -> list[int]:
    """Return the numbers of the living processes that `process` has started and that run `module`, ascending."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                command = (path / "cmdline").read_bytes()
                status = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if module.encode() in command.split(b"\0") and status[0] != "Z" and int(status[1]) == process:
                found.append(int(path.name))
    return sorted(found)


def engines(process: int | None = None) -> list[int]:
    """Return the numbers of a program's engines. process: None: of this one."""
    return started_by(os.getpid() if process is None else process, "quicoll.engine_process.process")
