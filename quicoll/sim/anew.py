"""What a person does where a job has stopped by Diverged: all ranks begin anew, and from one checkpoint.

A rank that is handed a state by the only one that holds it has to believe it (quicoll.state.synchronisation). Where
that was forged, both of them go on, commit steps together, by votes that agree on results alone, and save what they
hold. When all have started anew, two checkpoints of one step differ, and no third rank has it: the ranks stop by
Diverged, and would do so for ever, since each process begins with its own disk. No digest tells which of the two is
right, and in truth none is: the results of these steps came from both states. The error says what is to be done, and
it takes a person.

    two ranks or more that the error names have different       the checkpoints of that step are taken away, but for
    checkpoints of its step, and no more than half agree         those like the first rank's: the others are handed
                                                                 what they lack
    anything else: what differs is in memory, or one that        nothing: processes that start anew are to come to an
    is not whole, or most have the same                          end of it by themselves
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quicoll import checkpoint
from quicoll.checkpoint.catalogue import manifest_name
from quicoll.errors import CheckpointError
from quicoll.sim.digests import state_digest

if TYPE_CHECKING:
    from quicoll.errors import Diverged
    from quicoll.sim.disk.filesystem import FileSystem

__all__ = ["leave_one"]


def leave_one(error: Diverged, disks: Mapping[str, FileSystem]) -> str:
    """Leave one of the checkpoints in which ranks differ, as the module's head says.

    Args:
        error: By which they have stopped.
        disks: Of all nodes, by name.
    Returns:
        The first node whose checkpoint was left; "" where nothing was to be done.
    """
    name = manifest_name(error.step or 0)
    sides: dict[bytes, list[str]] = {}
    manifests: dict[str, list[str]] = {}
    for node in error.nodes:
        found = [path for path in disks[node].files() if posixpath.basename(path) == name] if node in disks else []
        digests = [digest for path in found if (digest := _digest(disks[node], path))]
        if digests:
            sides.setdefault(digests[0], []).append(node)
            manifests[node] = found
    most = max(map(len, sides.values()), default=0)
    if len(sides) < 2 or 2 * most > len(manifests):
        return ""
    kept, *others = sides.values()
    for node in (node for side in others for node in side):
        for path in manifests[node]:
            disks[node].erase(path)
    return kept[0]


def _digest(disk: FileSystem, manifest: str) -> bytes:
    """Of what a checkpoint holds; b"" where it is not whole."""
    try:
        return state_digest(checkpoint.load(manifest, disk=disk.copy()).tensors)
    except CheckpointError:
        return b""
