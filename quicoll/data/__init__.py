"""Data that is read exactly once: which samples a step uses, and how far the job has come, as part of its state."""

from __future__ import annotations

from quicoll.data.feed import Feed
from quicoll.data.portions import Portion, Position
from quicoll.data.sampler import Sampler

__all__ = ["Feed", "Portion", "Position", "Sampler"]
