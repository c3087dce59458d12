"""Deterministic collectives and atomic training steps over QUIC, for networks that fail."""
