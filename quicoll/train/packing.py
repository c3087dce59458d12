"""A task's state as a checkpoint file has it: tensors by path, and the rest in the metadata.

A mapping of names to tensors is written as it is. Where a state is nested, or holds values that are no tensors, its
skeleton (quicoll.state.tree) is in the metadata under SKELETON, in base64, with the tensors' names in its order.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll import checkpoint
from quicoll.errors import CheckpointError, LocalError
from quicoll.state.tree import flatten, rebuild

if TYPE_CHECKING:
    from quicoll.checkpoint.parts import Array
    from quicoll.checkpoint.store import Checkpoint

__all__ = ["SKELETON", "Packed", "packed_names", "packed_state", "unpacked_state"]

SKELETON = "state.skeleton"
_NAMES = "state.names"


@dataclass(frozen=True, slots=True)
class Packed:
    """A state for a checkpoint. tensors: by name. metadata: empty where the tensors are all there is."""

    tensors: Mapping[str, Array]
    metadata: Mapping[str, str]

    @property
    def digest(self) -> str:
        """Of all of it: `quicoll.checkpoint.digest` of the tensors, with the skeleton as one where there is one."""
        skeleton = self.metadata.get(SKELETON)
        if skeleton is None:
            return checkpoint.digest(self.tensors)
        return checkpoint.digest({**self.tensors, SKELETON: np.frombuffer(skeleton.encode(), np.uint8)})


def packed_state(state: Mapping[Any, Any]) -> Packed:
    """Take a state apart for a checkpoint.

    Raises:
        LocalError: It is no state.
    """
    flat = flatten(state)
    plain = len(flat.tensors) == len(state) == len(flat.lines) - 1  # one line is the mapping's
    if plain and all(type(key) is str for key in state):
        return Packed({str(key): state[key] for key in state}, {})
    names = [part.path for part in flat.tensors]
    if len(set(names)) < len(names):  # "a.b" beside "b" in "a"
        names = [f"{part.path}#{number}" for number, part in enumerate(flat.tensors)]
    tensors = {name: part.value for name, part in zip(names, flat.tensors, strict=True)}
    return Packed(tensors, {SKELETON: base64.b64encode(flat.skeleton).decode(), _NAMES: json.dumps(names)})


def packed_names(metadata: Mapping[str, str]) -> list[str] | None:
    """Return the names of the tensors that a state consists of; None: all that there are.

    Raises:
        CheckpointError: The metadata is none that `packed_state` has made.
    """
    if SKELETON not in metadata:
        return None
    try:
        return [str(name) for name in json.loads(metadata[_NAMES])]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint holds no state of a task: {error}") from error


def unpacked_state(found: Checkpoint) -> dict[Any, Any]:
    """Put the state of a checkpoint together.

    Raises:
        CheckpointError: It holds no state that `packed_state` has made.
    """
    if SKELETON not in found.metadata:
        return dict(found.tensors)
    try:
        tensors = [found.tensors[name] for name in packed_names(found.metadata) or ()]
        return rebuild(base64.b64decode(found.metadata[SKELETON], validate=True), tensors)
    except (LocalError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint holds no state of a task: {error}", path=str(found.path)) from error
