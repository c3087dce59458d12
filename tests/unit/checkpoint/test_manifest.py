"""Manifests: what is read is what was written, or an error; none describes what its files cannot hold."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from quicoll.checkpoint.catalogue import data_name
from quicoll.checkpoint.manifest import (
    FORMAT,
    VERSION,
    CheckpointManifest,
    FileRecord,
    PieceRecord,
    SavedTensor,
    decoded,
    digest_of,
    encoded,
)
from quicoll.errors import CheckpointError, LocalError

FILE = FileRecord(name=data_name(5, 0, "ab"), rank=0, node="a", nbytes=24, begin=8, digest="h")
TENSOR = SavedTensor(name="w", dtype="F32", shape=(2, 2))
PIECE = PieceRecord(tensor=0, file=0, offset=(0, 0), shape=(2, 2), at=8, nbytes=16, digest="d")
GOOD = CheckpointManifest(FORMAT, VERSION, 5, 3, 1, {"a": "é"}, (TENSOR,), (FILE,), (PIECE,))


def changed(record: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(record, **fields)


def test_a_manifest_comes_back_as_it_was() -> None:
    assert decoded(encoded(GOOD)) == GOOD
    assert encoded(decoded(encoded(GOOD))) == encoded(GOOD)
    assert GOOD.find("w") == 0
    with pytest.raises(LocalError, match="no tensor 'w' of the node 'a'"):
        GOOD.find("w", "a")


def test_a_change_of_any_byte_is_found() -> None:
    data = encoded(GOOD)
    for place in range(len(data)):
        for damaged in (data[:place], data[:place] + b" " + data[place:], data[:place] + b"7" + data[place + 1 :]):
            if damaged != data:
                with pytest.raises(CheckpointError):
                    decoded(damaged)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"version": VERSION + 1}, f"version {VERSION + 1}"),
        ({"format": "other"}, "other"),
        ({"step": -1}, "step"),
        ({"tensors": (TENSOR, TENSOR)}, "two tensors"),
        ({"tensors": (changed(TENSOR, dtype="F31"),)}, "F31"),
        ({"tensors": (changed(TENSOR, shape=(1 << 63, 0)),)}, "shape"),
        ({"tensors": (changed(TENSOR, shape=(2, 3)),)}, "nobody has written"),
        ({"pieces": ()}, "nobody has written"),
        ({"files": (changed(FILE, name="../../etc/passwd"),)}, "no data file"),
        ({"files": (changed(FILE, name=data_name(6, 0, "ab")),)}, "no data file"),
        ({"files": (changed(FILE, nbytes=20),)}, "overlap or go beyond"),
        ({"files": (changed(FILE, begin=0),)}, "no header"),
        ({"pieces": (changed(PIECE, at=0),)}, "overlap or go beyond"),
        ({"pieces": (PIECE, changed(PIECE, at=16))}, "overlap or go beyond"),
        ({"pieces": (changed(PIECE, file=1),)}, "in no file"),
        ({"pieces": (changed(PIECE, tensor=-1),)}, "no tensor"),
        ({"pieces": (changed(PIECE, nbytes=12),)}, "12 bytes, not 16"),
        ({"pieces": (changed(PIECE, offset=(1, 0)),)}, "goes beyond it"),
        ({"pieces": (changed(PIECE, offset=(0,)),)}, "dimensions"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused_though_its_seal_is_right(
    wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        decoded(encoded(changed(GOOD, **wrong)))


def test_what_is_in_another_version_is_refused_by_its_number_however_it_is_sealed() -> None:
    content = encoded(changed(GOOD, version=1)).split(b'"content":')[1][:-2]
    seal = hashlib.blake2b(content, digest_size=32).hexdigest()  # as version 1 was sealed
    with pytest.raises(CheckpointError, match=rf"in version 1 of the format, .* reads version {VERSION} alone: load"):
        decoded(b'{"seal":"%s",\n"content":%s}\n' % (seal.encode(), content))
    later = b'{"format":"quicoll.checkpoint","version":7,"leaves":[]}'
    with pytest.raises(CheckpointError, match="version 7"):
        decoded(b'{"seal":"none","content":%s}' % later)


def test_a_field_that_is_not_known_is_refused() -> None:
    content = encoded(GOOD).split(b'"content":')[1][:-2]
    more = content[:-1] + b',"zeal":1}'
    with pytest.raises(CheckpointError):
        decoded(b'{"seal":"%s",\n"content":%s}\n' % (digest_of(more).encode(), more))
