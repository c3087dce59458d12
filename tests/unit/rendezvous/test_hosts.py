"""Whether ranks are on one host, found out at a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from quicoll import Config, LocalError, PeerError
from quicoll.rendezvous.hosts import leave_host, own_host, share_host
from quicoll.rendezvous.stores import DirectoryStore


def test_ranks_of_one_host_find_each_other_there(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, "one")
    for rank in range(3):
        leave_host(store, rank)
    assert share_host(store, 3, 1.0, lambda: False) is True


def test_a_rank_of_another_host_is_told_apart(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, "two")
    leave_host(store, 0)
    store.set("host/1", b"another boot, another network")
    assert share_host(store, 2, 1.0, lambda: False) is False


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, "late")
    leave_host(store, 0)
    with pytest.raises(PeerError, match="rank 1 did not come") as late:
        share_host(store, 3, 0.0, lambda: False)
    assert late.value.rank == 1
    with pytest.raises(LocalError, match="given up"):
        share_host(store, 3, 60.0, lambda: True)


def test_an_address_that_was_named_or_is_enough_is_taken() -> None:
    assert own_host(Config.named(environ={}, listen="10.1.2.3:0"), {}, together=True) == "10.1.2.3"
    assert own_host(Config.named(environ={}), {}, together=True) == "127.0.0.1"
