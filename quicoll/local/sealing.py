"""What memory that ranks share needs of the system: whether it is to be had, and seals (memory.py, arena.py)."""

from __future__ import annotations

import os
import platform
import sys

__all__ = ["ADD_SEALS", "FUTURE_WRITE", "GET_SEALS", "OF_ONE_SIZE", "unusable"]

# Of Linux's <fcntl.h>, which other systems' `fcntl` does not name, and no `fcntl` the last (Linux 5.1).
ADD_SEALS, GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW, FUTURE_WRITE = 1, 2, 4, 16
OF_ONE_SIZE = _SEAL | _SHRINK | _GROW


def unusable() -> str:
    """Return why ranks of this host cannot share memory; "" where they can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return f"{sys.platform} has no sealed memory without a name"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the order in which {platform.machine()} makes stores visible is not that of x86-64"
    return ""
