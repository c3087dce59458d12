"""The manifest: what goes over the network before a state, and what of it is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quicoll.errors import LocalError, PeerError
from quicoll.numerics.buffers import tensor_digest
from quicoll.state import manifest
from quicoll.state.manifest import TensorRecord, decode_manifest, encode_manifest
from quicoll.state.tree import flatten


def test_a_manifest_has_the_tensors_by_path_with_their_digests() -> None:
    held = {"b": {0: np.ones((2, 0), np.uint8)}, "a": torch.tensor(3.0), "c": "text"}
    flat = flatten(held)
    got = decode_manifest(encode_manifest(flat), giver=0, view_id=7)
    assert got.skeleton == flat.skeleton
    assert got.records == (
        TensorRecord("a", "float32", (), "torch", tensor_digest(held["a"])),
        TensorRecord("b.0", "uint8", (2, 0), "numpy", tensor_digest(held["b"][0])),
    )


GOOD = {"path": "a", "dtype": "float32", "shape": [1], "kind": "numpy", "digest": b"x" * 16}


@pytest.mark.parametrize(
    "record",
    [
        GOOD | {"shape": [-1]},
        {key: GOOD[key] for key in GOOD if key != "digest"},
        GOOD | {"more": 1},
        GOOD | {"dtype": "float33"},
        GOOD | {"path": 1},
        GOOD | {"kind": "jax"},
        GOOD | {"digest": b"x"},
    ],
)
def test_a_record_that_is_none_is_refused(record: dict[str, Any]) -> None:
    packed = msgspec.msgpack.encode({"skeleton": b"", "records": [record]})
    with pytest.raises(PeerError, match=r"malformed state manifest.*rank=3, view=7"):
        decode_manifest(packed, giver=3, view_id=7)


def test_text_that_is_not_utf_8_is_malformed() -> None:
    packed = msgspec.msgpack.encode({"skeleton": b"", "records": [GOOD]}).replace(b"\xa1a", b"\xa1\xff")
    with pytest.raises(PeerError, match=r"malformed state manifest.*rank=3, view=7"):
        decode_manifest(packed, giver=3, view_id=7)


@pytest.mark.parametrize(("bound", "said"), [("MAX_NODES", "2 tensors"), ("MAX_SKELETON", "a skeleton of")])
def test_what_a_manifest_names_is_bounded(monkeypatch: pytest.MonkeyPatch, bound: str, said: str) -> None:
    packed = encode_manifest(flatten({"a": np.ones(1), "b": np.ones(1)}))
    monkeypatch.setattr(manifest, bound, 1)
    with pytest.raises(PeerError, match=said):
        decode_manifest(packed, giver=0, view_id=7)


def test_a_manifest_that_is_too_long_is_refused_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_MANIFEST", 50)
    with pytest.raises(LocalError, match="at most 50 are sent"):
        encode_manifest(flatten({"a": np.ones(1)}))
