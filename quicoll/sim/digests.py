"""What the simulation compares states and results by: BLAKE2b over names, types, shapes and bits.

Nothing of what it checks is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from quicoll.collectives.shards import Leaves

__all__ = ["bits_digest", "state_digest"]

_SIMPLE = (bool, int, float, str, type(None))


def state_digest(state: Any) -> bytes:
    """16 bytes over names, types, shapes and bits, by name."""
    found = blake2b(digest_size=16)
    for name in sorted(state, key=str):
        found.update(bits_digest((name, state[name])))
    return found.digest()


def bits_digest(values: Any) -> bytes:
    """A digest of tensors, however they are packed; of other things by their text."""
    found = blake2b(digest_size=16)
    pending = [values]
    while pending:
        value = pending.pop()
        if type(value) in _SIMPLE:  # most of what there is; the tests below take longer than to hash it
            found.update(repr(value).encode())
        elif type(value) is np.ndarray and value.flags.c_contiguous and value.size and not value.dtype.hasobject:
            found.update(f"{value.dtype.str}{value.shape}".encode())
            found.update(value.reshape(-1).view(np.uint8).data)
        elif isinstance(value, Leaves):
            pending += [value.values, value.shards.total]
        elif isinstance(value, list | tuple):
            pending += [*reversed(value), len(value)]
        elif isinstance(value, Mapping):
            pending += [*(value[key] for key in sorted(value, key=str)), sorted(map(str, value))]
        elif isinstance(value, np.ndarray):
            found.update(f"{value.dtype.str}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        elif hasattr(value, "detach") and hasattr(value, "numpy"):
            import torch

            # A copy: one element is contiguous whatever its stride, and viewed as bytes only where that is 1.
            flat = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
            found.update(f"{value.dtype}{tuple(value.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes())
        else:
            found.update(_plain(value))
    return found.digest()


def _plain(value: Any) -> bytes:
    """What it holds that is no tensor: a buffer its bytes, as its text may show an address alone; else its text."""
    try:
        view = memoryview(value)
    except TypeError:
        return repr(value).encode()
    return f"{view.format}{view.shape}".encode() + view.tobytes()
