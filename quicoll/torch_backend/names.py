"""What the backend is called."""

from __future__ import annotations

__all__ = ["BACKEND"]

BACKEND = "quicoll"
