"""Memory of `quicoll.empty`: whose it is, who may read it, and when the system has it back."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import quicoll
from quicoll.local.arena import Arena, PeerArena, arena_here
from quicoll.local.sealing import unusable
from quicoll.numerics.dtypes import DTYPES

pytestmark = [pytest.mark.loopback, pytest.mark.skipif(bool(unusable()), reason=unusable() or "usable")]

MIB = 1 << 20


def pages(arena: Arena) -> int:
    """Bytes that the system has given it."""
    return os.fstat(arena.descriptor).st_blocks * 512


def here() -> Arena:
    arena = arena_here()
    assert arena is not None
    return arena


def child(script: str) -> str:
    """Run it in a process of its own; return what it says."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), 0, 7, (3, 0), (2, 5, 3), [4, 1]])
def test_a_tensor_or_an_array_of_the_type_and_shape_that_is_asked_for(name: str, shape: Any) -> None:
    sizes = tuple(np.atleast_1d(np.array(shape, int))) if shape != () else ()
    native = getattr(ml_dtypes, name, None) or np.dtype(name)
    for asked in (name, native):
        array = quicoll.empty(shape, asked)
        assert isinstance(array, np.ndarray)
        assert (array.shape, array.dtype) == (sizes, native)
        assert array.flags.c_contiguous
        assert array.flags.writeable
    tensor = quicoll.empty(shape, getattr(torch, name))
    assert isinstance(tensor, torch.Tensor)
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (sizes, getattr(torch, name), True)


@pytest.mark.parametrize(
    ("shape", "dtype", "says"),
    [
        (-1, "float32", "below 0"),
        (3.5, "float32", "no shape"),
        ("ab", "float32", "no shape"),
        ((2, None), "float32", "no shape"),
        (3, None, "is none"),
        (3, object(), "is none"),
        (3, "float31", "not supported"),
        (3, torch.quint8, "not supported"),
        (3, ">f4", "byte order"),
        (1 << 60, "float32", "no memory"),
        ((1 << 40, 1 << 40), "float32", "no memory"),
    ],
)
def test_what_cannot_be_is_refused_and_takes_nothing(shape: Any, dtype: Any, says: str) -> None:
    gc.collect()
    before = pages(here())
    with pytest.raises(quicoll.LocalError, match=says):
        quicoll.empty(shape, dtype)
    assert pages(here()) == before


def test_its_pages_go_back_to_the_system_with_the_last_view_of_it_and_not_before() -> None:
    gc.collect()
    arena, before = here(), pages(here())
    array = quicoll.empty(2 * MIB, "uint8")
    array[:] = 7
    view: Any = array.reshape(2, -1)[1:].view(np.uint64)
    tensor = torch.from_numpy(array)[5:]
    del array
    assert pages(arena) == before + 2 * MIB
    del view
    assert (tensor == 7).all()
    assert pages(arena) == before + 2 * MIB
    del tensor
    gc.collect()
    assert pages(arena) == before


def test_where_memory_is_short_there_is_an_error_and_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    arena = here()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(quicoll.LocalError, match=r"no memory for 4096 elements of float32: .*No space left"):
            quicoll.empty(4096, "float32")
    place = arena.place(quicoll.empty(4096, "float32"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(quicoll.LocalError):
            quicoll.empty(4096, "float32")
    assert arena.place(quicoll.empty(4096, "float32")) == place  # it is not lost to later ones


def test_what_a_collector_drops_while_the_arena_is_at_work_is_free_afterwards() -> None:
    arena = here()
    array: Any = quicoll.empty(MIB, "uint8")
    before = pages(arena)
    arena._lock.acquire()
    del array  # its lease dies where it may not wait
    gc.collect()
    assert pages(arena) == before
    arena._lock.release()
    kept = quicoll.empty(4096, "uint8")
    assert pages(arena) <= before - MIB + 4096
    assert arena.place(kept)


def test_a_place_is_that_of_memory_of_the_arena_alone() -> None:
    arena = here()
    array = quicoll.empty(1000, "float32")
    place = arena.place(array)
    assert place
    assert arena.place(array[10:20]) == place + 40
    assert arena.place(np.empty(1000, np.float32)) == 0
    assert Arena().place(array) == 0


def test_a_peer_reads_what_stands_there_and_can_neither_write_nor_reach_beyond() -> None:
    arena = here()
    array = quicoll.empty(1000, "uint32")
    array[:] = np.arange(1000)
    peer = PeerArena(arena.descriptor)
    found = peer.lent(arena.place(array), array.nbytes)
    assert found is not None
    assert (found.view(np.uint32) == np.arange(1000)).all()
    array[3] = 77
    assert found.view(np.uint32)[3] == 77
    assert not found.flags.writeable
    for place, nbytes in ((0, 4), (arena.size, 2), (arena.size + 1, 1), ((1 << 64) - 2, 4), (1, arena.size + 1)):
        assert peer.lent(place, nbytes) is None
    with pytest.raises(PermissionError):
        mmap.mmap(arena.descriptor, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    for change in (lambda: os.ftruncate(arena.descriptor, 0), lambda: os.write(arena.descriptor, b"x")):
        with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor"):
            change()


def test_memory_that_could_be_cut_short_is_no_arena() -> None:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    with pytest.raises(ValueError, match="not sealed"):
        PeerArena(fd)
    os.close(fd)


def test_a_child_of_a_fork_has_what_was_there_and_writes_to_none_of_its_parents(tmp_path: Path) -> None:
    said = child("""
import os, numpy as np, quicoll
from quicoll.local.arena import PeerArena, arena_here
kept, dropped = quicoll.empty(100_000, "int64"), quicoll.empty(100_000, "int64")
kept[:], dropped[:] = 1, 2
arena, place = arena_here(), arena_here().place(dropped)
peer = PeerArena(arena.descriptor)
pid = os.fork()
if not pid:
    assert (kept == 1).all() and (dropped == 2).all()
    kept[:], dropped[:] = 3, 4
    assert (kept == 3).all()
    del dropped
    other = quicoll.empty(100_000, "int64")
    other[:] = 5
    assert arena_here() is not arena and arena_here().place(other) and not arena_here().place(kept)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert (kept == 1).all() and (dropped == 2).all()
assert (peer.lent(place, dropped.nbytes).view(np.int64) == 2).all()
print("as it was")
""")
    assert said == "as it was\n"


def test_where_addresses_are_limited_it_is_memory_of_another_kind() -> None:
    said = child("""
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
import quicoll
from quicoll.local.arena import arena_here
x = quicoll.empty((3, 4), "float32")
x[:] = 1
print(arena_here(), x.sum())
""")
    assert said == "None 12.0\n"


def test_a_process_without_addresses_for_anothers_tensors_is_told_why() -> None:
    said = child("""
import resource
from quicoll.local.arena import PeerArena, arena_here
arena = arena_here()
resource.setrlimit(resource.RLIMIT_AS, (arena.size, resource.RLIM_INFINITY))
try:
    PeerArena(arena.descriptor)
except OSError as error:
    print(error)
""")
    assert "Cannot allocate memory: " in said
    assert said.endswith(" MiB of addresses for another rank's tensors; is ulimit -v set?\n")
