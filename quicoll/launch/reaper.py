"""Ends process groups when the process that started them is gone, however it went.

Run as a program by `quicoll.launch.supervisor.Supervisor`, with a pipe from it as standard input. Lines "+PGID" and
"-PGID" keep a list of process groups; at the end of the file, which the kernel brings about even when the supervisor
was killed by SIGKILL, the groups still on the list get SIGKILL. PR_SET_PDEATHSIG would be shorter, but has to be set
between fork and exec, where a process with threads may deadlock, and it follows the parent's thread and not the parent;
and a thread in the child that watches a pipe would need the cooperation of every script.

It has a session of its own, so a Ctrl-C in the terminal does not take it away first. Imports nothing of quicoll, so
that it starts in milliseconds (`python -I -S`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable

__all__ = ["watch"]


def watch(lines: Iterable[str]) -> list[int]:
    """Read lines until they end; return the process groups that were added and not taken away, in order of adding.

    Args:
        lines: "+PGID" or "-PGID" each; others are skipped.
    """
    groups: dict[int, None] = {}
    for line in lines:
        sign, number = line[:1], line[1:].strip()
        if not number.isdecimal() or int(number) <= 1:
            continue  # 0 would be our own group, 1 is init's: a broken line must never reach those
        if sign == "+":
            groups[int(number)] = None
        elif sign == "-":
            groups.pop(int(number), None)
    return list(groups)


if __name__ == "__main__":
    for ours in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ours, signal.SIG_IGN)
    for group in watch(sys.stdin):
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
