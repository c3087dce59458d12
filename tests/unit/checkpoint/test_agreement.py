"""The agreement on a checkpoint: the ranks of a view are in one stage, and a manifest is of durable files."""

from __future__ import annotations

import random

import pytest

from quicoll.checkpoint.agreement import (
    Agreement,
    CheckpointOutcome,
    CheckpointReport,
    CheckpointStage,
    decoded_report,
    encoded_report,
)
from quicoll.checkpoint.catalogue import data_name
from quicoll.checkpoint.manifest import FileRecord, PieceRecord, RankShare, SavedTensor, encoded_share, metadata_digest
from quicoll.errors import CheckpointError

NODES = ("a", "b", "c")


def share(rank: int, step: int, world: int = 3) -> bytes:
    """A tensor of `world` bytes, of which each rank writes one."""
    tensor = SavedTensor(name="w", dtype="U8", shape=(world,))
    file = FileRecord(name=data_name(step, rank, "aa"), rank=rank, node=NODES[rank], nbytes=9, begin=8, digest="d")
    piece = PieceRecord(tensor=0, file=0, offset=(rank,), shape=(1,), at=8, nbytes=1, digest="p")
    return encoded_share(RankShare(rank, NODES[rank], metadata_digest({}), (tensor,), (file,), (piece,)))


class Ranks:
    """The agreements of three ranks, and a step's exchange between them."""

    def __init__(self, *newest: int, every: int = 10) -> None:
        self.each = [Agreement(every=every, newest=one) for one in newest or (0, 0, 0)]
        self.view = 0
        self.enter()

    def enter(self) -> None:
        self.view += 1
        for one in self.each:
            one.enter(self.view)

    def exchange(self, *, committed: bool = True) -> CheckpointOutcome | None:
        """What a step's body and end do; the outcome, the same on all."""
        assert len({one.has_news for one in self.each}) == 1
        if not self.each[0].has_news:
            return None
        told = [decoded_report(encoded_report(one.report())) for one in self.each]
        found = [one.conclude(told, NODES) for one in self.each]
        assert found.count(found[0]) == len(found)
        if committed:
            for one, outcome in zip(self.each, found, strict=True):
                one.follow(outcome)
        return found[0]

    def due(self, step: int, *, last: bool = False) -> bool:
        answers = [one.due(step, last=last) for one in self.each]
        assert len({*answers}) == 1
        return answers[0]

    def begin(self, step: int) -> None:
        for one in self.each:
            one.begin(step, {})

    def write(self, step: int, *ranks: int) -> None:
        for rank in ranks or (0, 1, 2):
            self.each[rank].written(self.view, step, share(rank, step))

    def seal(self, step: int) -> None:
        for one in self.each:
            one.sealed(self.view, step)

    @property
    def stage(self) -> CheckpointStage:
        assert len({one.stage for one in self.each}) == 1
        return self.each[0].stage


def test_a_checkpoint_is_complete_when_all_files_are_told_and_the_manifest_is_there() -> None:
    ranks = Ranks()
    assert ranks.exchange() == CheckpointOutcome(-1, CheckpointStage.IDLE)
    assert [step for step in range(25) if ranks.due(step)] == list(range(10, 25))
    ranks.begin(10)
    ranks.write(10, 0, 2)
    assert ranks.exchange() == CheckpointOutcome(10, CheckpointStage.WRITING)
    ranks.write(10, 1)
    agreed = ranks.exchange()
    assert agreed is not None
    assert agreed.manifest is not None
    assert (ranks.stage, agreed.complete, agreed.manifest.step, agreed.manifest.world_size) == (
        CheckpointStage.SEALING,
        False,
        10,
        3,
    )
    assert [file.node for file in agreed.manifest.files] == ["a", "b", "c"]
    assert ranks.exchange() is not None  # not sealed yet
    assert not ranks.due(20)
    ranks.seal(10)
    done = ranks.exchange()
    assert done is not None
    assert (done.complete, done.manifest, ranks.stage) == (True, agreed.manifest, CheckpointStage.IDLE)
    assert [one.newest for one in ranks.each] == [10, 10, 10]
    assert ranks.exchange() is None
    assert (ranks.due(19), ranks.due(20)) == (False, True)


def test_nothing_is_concluded_by_a_step_that_was_not_committed() -> None:
    ranks = Ranks()
    ranks.exchange()
    ranks.begin(10)
    ranks.write(10)
    found = ranks.exchange(committed=False)
    assert found is not None
    assert found.manifest is not None
    assert ranks.stage is CheckpointStage.WRITING


def test_a_new_view_gives_up_what_is_under_way_and_begins_at_once() -> None:
    ranks = Ranks()
    ranks.exchange()
    ranks.begin(10)
    old = ranks.view
    ranks.write(10)
    ranks.exchange()
    ranks.enter()
    assert (ranks.stage, ranks.due(12)) == (CheckpointStage.IDLE, False)  # first all tell what is newest
    ranks.exchange()
    assert ranks.due(12)
    ranks.begin(12)
    ranks.each[0].written(old, 12, share(0, 12))  # of a file of the view before
    ranks.each[0].failed(ranks.view, 10, "late")
    assert ranks.exchange() == CheckpointOutcome(12, CheckpointStage.WRITING)


def test_what_is_begun_in_the_body_of_a_views_first_step_is_not_given_up_by_the_commit_of_that_step() -> None:
    """In the order of a step: the exchange, the beginning, the commit that the exchange's outcome waits for."""
    ranks = Ranks()
    ranks.exchange()
    ranks.enter()
    outcome = ranks.exchange(committed=False)
    assert outcome is not None
    assert ranks.due(12)
    ranks.begin(12)
    for one in ranks.each:
        one.follow(outcome)
    assert (ranks.stage, [one.step for one in ranks.each]) == (CheckpointStage.WRITING, [12, 12, 12])


def test_a_rank_that_knows_of_an_older_checkpoint_learns_of_the_newest() -> None:
    ranks = Ranks(10, 30, 0)
    ranks.exchange()
    assert [one.newest for one in ranks.each] == [30, 30, 30]
    assert (ranks.due(30), ranks.due(39), ranks.due(40), ranks.due(33, last=True)) == (False, False, True, True)


@pytest.mark.parametrize("sealing", [False, True])
def test_a_failure_on_one_rank_is_known_to_all_and_gives_up_this_checkpoint_alone(sealing: bool) -> None:
    ranks = Ranks()
    ranks.exchange()
    ranks.begin(10)
    if sealing:
        ranks.write(10)
        ranks.exchange()
    ranks.each[1].failed(ranks.view, 10, "disk full")
    found = ranks.exchange()
    assert found is not None
    assert (found.error, found.complete, ranks.stage) == ("b: disk full", False, CheckpointStage.IDLE)
    assert (ranks.due(19), ranks.due(20)) == (False, True)
    assert not ranks.due(10, last=True)


def test_ranks_that_disagree_on_a_tensor_or_leave_a_gap_complete_nothing() -> None:
    for other, said in (
        (share(1, 10, world=4), r"tensor 'w' is U8 \(3,\) on a and U8 \(4,\) on b"),
        (share(0, 10), "nobody"),
    ):
        ranks = Ranks()
        ranks.exchange()
        ranks.begin(10)
        ranks.write(10, 0, 2)
        ranks.each[1].written(ranks.view, 10, other)
        found = ranks.exchange()
        assert found is not None
        assert found.manifest is None
        with pytest.raises(CheckpointError, match=said):
            raise CheckpointError(found.error)


def test_a_rank_that_takes_no_part_ends_it_on_all() -> None:
    ranks = Ranks()
    ranks.exchange()
    ranks.begin(10)
    told = [ranks.each[0].report(), CheckpointReport(0), ranks.each[2].report()]
    assert ranks.each[0].conclude(told, NODES).error == "b takes no part in the checkpoint of step 10"


def test_a_malformed_report_is_an_error_of_ours() -> None:
    for data in (b"", b"\xff", b"\x93\x01\x02", "text", None, 7):
        with pytest.raises(CheckpointError):
            decoded_report(data)


def test_any_order_of_files_views_and_failures_keeps_all_ranks_in_one_stage() -> None:
    """`Ranks` asserts at every exchange that what all conclude, and whether anything is due, is the same."""
    rng = random.Random(5)
    completed = 0
    for _ in range(60):
        ranks = Ranks(every=3)
        for step in range(60):
            chance = rng.random()
            if chance < 0.06:
                ranks.enter()
            for rank, one in enumerate(ranks.each):
                if one.stage is CheckpointStage.WRITING and rng.random() < 0.6:
                    one.written(ranks.view, one.step, share(rank, one.step))
                elif one.stage is CheckpointStage.SEALING and rng.random() < 0.6:
                    one.sealed(ranks.view, one.step)
                elif one.step > 0 and rng.random() < 0.03:
                    one.failed(ranks.view, one.step, "full")
            found = ranks.exchange()
            completed += found is not None and found.complete
            if ranks.due(step):
                ranks.begin(step)
    assert completed > 100
