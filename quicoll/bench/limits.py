"""What this machine's memory and processor allow on one core: beside a figure, how far there is to go."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["measure_limits"]

_BYTES = 32 << 20
_PACKET = 1452
_ROUNDS = 5


def measure_limits() -> dict[str, float]:
    """Return MB/s of one core, the best of a few rounds.

    memory: a copy from one large array to another. add_float32: the sum of two large arrays, in bytes of the result.
    aes: AES-128-GCM over packets of 1452 bytes, from Python, one call for each.
    """
    source, target = np.ones(_BYTES // 4, np.float32), np.empty(_BYTES // 4, np.float32)
    cipher, packet, nonce = AESGCM(os.urandom(16)), os.urandom(_PACKET), bytes(12)
    packets = 4096

    def seal() -> None:
        for _ in range(packets):
            cipher.encrypt(nonce, packet, None)

    return {
        "memory": _best(lambda: np.copyto(target, source), _BYTES),
        "add_float32": _best(lambda: np.add(source, source, out=target), _BYTES),
        "aes": _best(seal, packets * _PACKET),
    }


def _best(work: Callable[[], object], size: int) -> float:
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return round(size / min(seconds) / 1e6, 1)
