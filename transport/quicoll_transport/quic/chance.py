"""Random bytes for what is ours on a connection: ids, stateless reset tokens and keys, path challenges.

Not compiled: `seeded.py` puts another source in the place of `os`.
"""

from __future__ import annotations

import os

__all__ = ["random_bytes"]


def random_bytes(size: int) -> bytes:
    """Return so many bytes that nobody can foresee."""
    return os.urandom(size)
