"""The names of a checkpoint's files: which checkpoints there are, and which files are no longer needed.

    step-00000120.manifest.json                   the manifest: the checkpoint of step 120 is complete
    step-00000120.r0002.1f3a9c7e.safetensors      what rank 2 wrote. The digits are chance: no file is written twice
    .step-00000120....tmp                         being written, or left by a writer that was killed; or a piece that
                                                  came from another node's disk, by its digest

All files are in one directory, or have one prefix. A checkpoint is complete if, and only if, its manifest is there:
data without one is under way, or was given up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DATA", "TEMPORARY", "Doomed", "aside_name", "complete", "data_name", "manifest_name", "no_longer_needed"]

_MANIFEST = re.compile(r"step-(\d{8,19})\.manifest\.json")
DATA = re.compile(r"step-(\d{8,19})\.r\d{4,9}\.[0-9a-f]{1,32}\.safetensors")
TEMPORARY = re.compile(r"\.step-.*\.tmp")


@dataclass(frozen=True, slots=True)
class Doomed:
    """What is to be removed: manifests first, and durably, so that no checkpoint is complete that lacks data."""

    manifests: tuple[str, ...]
    data: tuple[str, ...]


def manifest_name(step: int) -> str:
    """Return the name of a step's manifest."""
    return f"step-{step:08d}.manifest.json"


def data_name(step: int, rank: int, token: str) -> str:
    """Return the name of a rank's file. token: hexadecimal digits that no other file has."""
    return f"step-{step:08d}.r{rank:04d}.{token}.safetensors"


def aside_name(step: int, digest: str) -> str:
    """Return the name of a file with one piece in it, while a checkpoint is restored. digest: of the piece."""
    return f".step-{step:08d}.{digest}.tmp"


def complete(names: Sequence[str]) -> list[int]:
    """Return the steps whose checkpoints are complete, oldest first."""
    found = map(_MANIFEST.fullmatch, names)
    return sorted(step for match in found if match for step in [int(match[1])] if manifest_name(step) == match[0])


def no_longer_needed(names: Sequence[str], *, step: int, keep: int, files: Sequence[str]) -> Doomed:
    """Return what may go when the checkpoint of a step is complete.

    Of the checkpoints up to and including this one the newest `keep` stay. Newer ones are left alone: they are damaged
    and were skipped, or will be written again, or are being written.

    Args:
        names: All there are.
        step: Its checkpoint is complete; it is never doomed.
        keep: 1 or more.
        files: The data files of this step.
    """
    old = [each for each in complete(names) if each <= step]
    kept = dict.fromkeys([*old[-max(keep, 1) :], step])
    manifests = tuple(manifest_name(each) for each in old if each not in kept)
    data = []
    for name in sorted(names):
        match = DATA.fullmatch(name)
        if match is None or int(match[1]) > step:
            continue
        if int(match[1]) not in kept or (int(match[1]) == step and name not in files):
            data.append(name)
    return Doomed(manifests, tuple(data))
