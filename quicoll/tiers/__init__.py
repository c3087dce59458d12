"""Tiers of a model: which are active and where they are, agreed by all ranks; pieces of state that the ranks share."""

from __future__ import annotations

from quicoll.tiers.shared import Consistency, SharedState
from quicoll.tiers.tier_set import TierSet
from quicoll.tiers.tiers import Tiers

__all__ = ["Consistency", "SharedState", "TierSet", "Tiers"]
