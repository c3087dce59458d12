"""Checkpoints of whole jobs on simulated machines, life after life: what was told to be complete is found again."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoint_lives import Forgotten, Lives, Plan

import quicoll.checkpoint.agreement
import quicoll.checkpoint.datafile
import quicoll.checkpoint.digesting
import quicoll.checkpoint.store
import quicoll.train.checkpointer
from quicoll.checkpoint.datafile import PieceReader, write_share
from quicoll.checkpoint.lending import CopyMemory, Loan
from quicoll.checkpoint.manifest import encoded_share
from quicoll.checkpoint.parts import bytes_of
from quicoll.checkpoint.storage import DiskStorage
from quicoll.sim.disk.filesystem import FileSystem
from quicoll.train import Checkpointer

if TYPE_CHECKING:
    from quicoll.sim import Simulation
    from quicoll.sim.disk.files import File

pytestmark = pytest.mark.slow

LAST_FAULT_S = 1.7
SEEDS = int(os.environ.get("QUICOLL_TEST_CHECKPOINT_SEEDS", "4"))


def faults(rng: random.Random, ranks: int, shared: bool) -> Callable[[Simulation], object]:
    """Up to two ranks fail in a life, at any time, each in a way of its own."""

    def script(sim: Simulation) -> None:
        for _ in range(rng.randrange(3) if ranks > 2 else rng.randrange(2)):
            at, rank = 0.3 + (LAST_FAULT_S - 0.3) * rng.random(), rng.randrange(ranks)
            match rng.randrange(2 if shared else 4):
                case 0:
                    sim.at(at).crash(rank)
                case 1:
                    sim.at(at).crash(rank, power=True)
                case 2:
                    sim.at(at).disk(rank, "power")
                case 3:
                    sim.at(at).disk(rank, "kill")

    return script


@pytest.mark.parametrize("seed", range(SEEDS))
def test_after_any_crash_the_next_life_finds_what_was_told_to_be_complete(seed: int) -> None:
    rng = random.Random(f"lives/{seed}")
    shared = seed % 3 == 2
    slow = rng.choice((0.0, 0.05, 0.2))
    lives = Lives(seed, shared=shared, copies=1 if shared else 1 + seed % 2, slow=slow, slow_restore=False)
    for _ in range(3):
        ranks = rng.randrange(2, 5)
        script = faults(rng, ranks, shared)
        lives.live(Plan(ranks, script, crash=rng.random() < 0.8, until=LAST_FAULT_S))
    assert lives.found[0] == 0
    assert lives.told > 0


# ---------------------------------------------------------------------------------------------------------------------
# Ways to break it. Each scenario passes without its mutant


def power_fails() -> Lives:
    """A disk for each rank, and one for all; nothing happens but that the power goes at the end of a life."""
    for shared in (False, True):
        lives = Lives(3, shared=shared)
        for ranks in (2, 1):
            lives.live(Plan(ranks))
    return lives


def all_are_killed_in_their_first_checkpoints() -> Lives:
    """On one disk for all, at one moment after the other."""
    lives = Lives(4, shared=True)
    for life in range(5):
        at = 0.7 + 0.1 * life
        lives.live(Plan(3, lambda sim, at=at: sim.at(at).crash(0).crash(1).crash(2)))
    return lives


def bits_rot() -> Lives:
    lives = Lives(5, shared=True)
    for rotten in (False, True, False):
        lives.live(Plan(2, rotten=rotten))
    return lives


def all_are_killed_while_they_save() -> Lives:
    """At one moment after the other, on slow disks."""
    lives = Lives(7, shared=True, slow=0.25)
    lives.live(Plan(2))
    for at in (1.6, 1.8, 2.2):
        lives.live(Plan(2, lambda sim, at=at: sim.at(at).crash(0).crash(1)))
    return lives


def a_disk_is_lost() -> Lives:
    lives = Lives(6, copies=2)
    for ranks in (3, 2):
        lives.live(Plan(ranks, lost=1))
    lives.live(Plan(4))
    return lives


def files_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """What a manifest names is not durable when it is written."""
    honest = FileSystem.sync

    def lazy(self: FileSystem, file: File) -> None:
        if not bytes(file.content).startswith(b'{"seal"'):
            return
        honest(self, file)

    patch.setattr(FileSystem, "sync", lazy)


def manifests_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    honest = DiskStorage.write

    def lazy(self: DiskStorage, name: str, chunks: Any) -> None:
        with patch.context() as inside:
            if name.endswith(".json"):
                inside.setattr(FileSystem, "sync", lambda self, file: None)
            honest(self, name, chunks)

    patch.setattr(DiskStorage, "write", lazy)


def names_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FileSystem, "sync_names", lambda self, folder: None)


def the_manifest_does_not_wait_for_the_files(patch: pytest.MonkeyPatch) -> None:
    """A rank tells that its file is durable before it writes it, and says nothing where that fails."""

    async def eager(
        self: Checkpointer, view: int, step: int, rank: int, parts: Any, pieces: Any, metadata: Any, loans: Any
    ) -> None:
        names: list[tuple[str, list[Any]]] = []

        class Later:
            def __init__(self, storage: Any) -> None:
                self.token, self.path = storage.token, storage.path

            def write(self, name: str, chunks: Any) -> None:
                names.append((name, list(chunks)))

        share = write_share(
            Later(self._storage), step=step, rank=rank, node=self._job.node, parts=parts, pieces=pieces,
            metadata=metadata,
        )  # fmt: skip
        self._agreement.written(view, step, encoded_share(share))
        await asyncio.sleep(0.35 if rank else 0.0)  # who seals is the first to be done
        for name, chunks in names:
            await self._in_thread(self._storage.write, name, chunks)

    patch.setattr(Checkpointer, "_write", eager)
    patch.setattr(quicoll.checkpoint.store, "check_files", lambda *args, **options: None)


def digests_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    class Equal(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

    honest = PieceReader.regions

    def trusting(self: PieceReader, wanted: Any) -> Any:
        with patch.context() as inside:
            inside.setattr(quicoll.checkpoint.datafile, "digest_of", lambda data: Equal())
            inside.setattr(quicoll.checkpoint.digesting, "digest_of", lambda data: Equal())
            return honest(self, wanted)

    patch.setattr(PieceReader, "regions", trusting)


def room_is_made_before_the_new_one_is_complete(patch: pytest.MonkeyPatch) -> None:
    """Old checkpoints go when a rank has written its file, and not when the new one is complete."""
    honest = quicoll.train.checkpointer.write_share

    def tidy(storage: Any, **what: Any) -> Any:
        share = honest(storage, **what)
        storage.remove([name for name in storage.names() if f"{what['step']:08d}" not in name])
        return share

    patch.setattr(quicoll.train.checkpointer, "write_share", tidy)


def complete_is_told_when_the_first_has_sealed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quicoll.checkpoint.agreement, "all", any, raising=False)


def copies_are_not_written(patch: pytest.MonkeyPatch) -> None:
    async def none(pieces: Any, **what: Any) -> tuple[list[Any], list[Any], Loan]:
        return [], [], CopyMemory().lend([])

    patch.setattr(quicoll.train.checkpointer, "copies_of_others", none)


def the_state_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    """What is written is the tensors' own memory, which the next commit changes."""

    def alias(storage: Any, *, pieces: Any, **what: Any) -> Any:
        live = [(part, region, bytes_of(part, region)) for part, region, _ in pieces]
        return write_share(storage, pieces=live, **what)

    patch.setattr(quicoll.train.checkpointer, "write_share", alias)


def memory_is_lent_again_while_it_is_lent(patch: pytest.MonkeyPatch) -> None:
    """All copies of a rank, its own and those that others give it, are in one place."""
    places: dict[int, Any] = {}

    def lend(self: CopyMemory, sizes: Any) -> Loan:
        job = id(asyncio.get_running_loop())
        whole = places.setdefault(job, np.empty(1 << 20, np.uint8))
        return Loan(self, whole, sizes)

    patch.setattr(CopyMemory, "lend", lend)


def the_oldest_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quicoll.train.checkpointer, "sorted", lambda keys, reverse=False: sorted(keys), raising=False)


MUTANTS = (
    (files_are_not_synced, power_fails),
    (manifests_are_not_synced, power_fails),
    (names_are_not_synced, power_fails),
    (the_manifest_does_not_wait_for_the_files, all_are_killed_in_their_first_checkpoints),
    (digests_are_not_compared, bits_rot),
    (room_is_made_before_the_new_one_is_complete, all_are_killed_while_they_save),
    (complete_is_told_when_the_first_has_sealed, all_are_killed_while_they_save),
    (copies_are_not_written, a_disk_is_lost),
    (the_state_is_not_copied, all_are_killed_while_they_save),
    (memory_is_lent_again_while_it_is_lent, a_disk_is_lost),
    (the_oldest_is_taken, power_fails),
)


FOUND = r"told to be complete|that all ranks can read|is not the state after|send changed its input"


@pytest.mark.parametrize(("change", "scenario"), MUTANTS, ids=lambda value: value.__name__)
def test_a_mutant_is_found(
    change: Callable[[pytest.MonkeyPatch], None], scenario: Callable[[], Lives], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    with pytest.raises(Forgotten, match=FOUND):
        scenario()


@pytest.mark.parametrize("scenario", [*{scenario: None for _, scenario in MUTANTS}], ids=lambda value: value.__name__)
def test_its_scenario_passes_without_it(scenario: Callable[[], Lives]) -> None:
    lives = scenario()
    assert sorted(lives.found) == lives.found or lives.spoilt
    assert lives.found[-1] > 0
