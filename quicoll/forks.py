"""Which process this is, without a question to the system.

The child of a fork has its parent's objects, and none of its threads: what is called of an engine there has to be
refused. Each call looks, and `os.getpid` is a system call, after which the processor has to learn its way anew: two of
them made a small call a microsecond or two longer. The number changes in a fork alone, of which Python tells.
"""

from __future__ import annotations

import os

__all__ = ["pid"]

pid = os.getpid()
"""Of this process. Read it as an attribute of this module, which is where it changes."""


def _in_child() -> None:
    global pid
    pid = os.getpid()


os.register_at_fork(after_in_child=_in_child)
