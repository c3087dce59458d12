"""See the package."""

from __future__ import annotations


class _BackendWrapper: ...
