"""Checkpoints that are either whole or not there."""

from quicoll.checkpoint.store import Checkpoint, digest, latest, load, of_step, save, snapshot

__all__ = ["Checkpoint", "digest", "latest", "load", "of_step", "save", "snapshot"]
