"""See the package."""

from __future__ import annotations

__all__ = ["FlightRecorderHook"]


class FlightRecorderHook: ...
