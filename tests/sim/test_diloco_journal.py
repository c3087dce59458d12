"""What a clock or a failure decides in a DiLoCo job: it is in the journal, and a replay of it has the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from depth import deep
from diloco_jobs import EVERY, WORKERS, Ended, of_dropout, of_layers, trained

from quicoll.errors import LocalError
from quicoll.sim import RunFailed
from quicoll.train.diloco_journal import RoundJournal

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim import Simulation


pytestmark = pytest.mark.usefixtures("one_thread")


RECIPE: dict[str, Any] = {
    "fragments": 2, "delay": 2, "make": of_dropout, "data": True, "rounds": 4, "wire": "int8", "backup": 0
}  # fmt: skip


def one_journal(found: Ended) -> str:
    (text,) = found.journals
    assert len(found.digests) == 1
    return text


def replayed(found: Ended, ranks: int, **options: Any) -> None:
    """The same bits of everything from the journal, where nothing fails and nobody is slow."""
    again = trained(ranks, **options, replay=one_journal(found))
    again.same(found)
    assert again.journals == found.journals


@pytest.mark.parametrize("when", deep((2.6,), (1.6, 2.1, 2.6, 3.3, 5.2)))
def test_workers_that_are_lost_with_their_rank_begin_anew_and_a_replay_has_the_same_bits(when: float) -> None:
    def events(sim: Simulation) -> None:
        sim.at(when).crash(1)
        sim.at(when + 3.0).restart(1)

    found = trained(3, pace=0.25, events=events, **RECIPE)
    assert found.aborted > 0
    rounds = [each for number in range(1, 5) if (each := RoundJournal.parse(one_journal(found)).of_round(number)).anew]
    assert rounds
    assert all(each.anew == (1,) for each in rounds), rounds
    assert found.digests != trained(1, **RECIPE).digests
    for ranks in deep((1,), (1, 2, 4)):
        replayed(found, ranks, **RECIPE)


def test_ranks_that_are_killed_one_after_the_other_are_replayed_by_the_journal() -> None:
    def events(sim: Simulation) -> None:
        for number in range(3):
            sim.at(1.9 + 3.1 * number).crash(number)
            sim.at(2.8 + 3.1 * number).restart(number)

    found = trained(3, pace=0.25, events=events, **RECIPE)
    assert (
        len({each for number in range(5) for each in RoundJournal.parse(one_journal(found)).of_round(number).anew}) > 1
    )
    replayed(found, 2, **RECIPE)


def test_a_job_in_which_nothing_happened_has_an_empty_journal_and_its_replay_is_the_job() -> None:
    found = trained(2, **RECIPE)
    assert found.journals == {""}
    replayed(found, 3, **RECIPE)


def test_a_quorum_changes_no_bit_where_all_are_in_time() -> None:
    found = trained(4, pace=0.25, quorum=3, grace=1.0, **RECIPE)
    assert found.journals == {""}
    found.same(trained(1, **RECIPE))


SLOW: dict[str, Any] = {
    "at once": {"make": of_layers, "fragments": 1, "delay": 0, "data": False, "wire": None},
    "in fragments with a delay": {},
    "the largest of one in eight": {"wire": "topk:1/8", "fragments": 3},
}


def slow_third(job: Job) -> float:
    return 1.0 if job.node == "worker-2" else 0.25


@pytest.mark.parametrize("recipe", deep(["in fragments with a delay"], SLOW))
def test_workers_of_a_slow_rank_count_with_what_they_did_and_a_replay_has_the_same_bits(recipe: str) -> None:
    options = RECIPE | SLOW[recipe]
    found = trained(4, pace=slow_third, quorum=3, grace=0.5, **options)
    waiting = trained(4, pace=slow_third, **options)
    assert found.seconds < 0.7 * waiting.seconds
    journal = RoundJournal.parse(one_journal(found))
    for number in range(1, 5):
        entry = journal.of_round(number)
        assert entry.done, "each round has been cut"
        for row in entry.done:
            assert row[0] == row[1] == row[3] >= row[2], row  # the others have done all
        done = [sum(row[worker] for row in entry.done) for worker in range(WORKERS)]
        assert done[0] == EVERY > done[2] > 0, done
    for ranks in deep((1,), (1, 2, 3)):
        replayed(found, ranks, **options)


def test_a_worker_that_did_little_counts_little_and_one_that_did_nothing_not_at_all() -> None:
    def very_slow(job: Job) -> float:
        return 12.0 if job.node == "worker-1" else 0.25

    recipe = {"rounds": 1, "fragments": 1, "delay": 0, "shards": 2, "backup": 0}
    found = trained(2, pace=very_slow, quorum=1, **recipe)
    entry = RoundJournal.parse(one_journal(found)).of_round(1)
    assert entry.done[0] == (EVERY, 1)  # the step that it is in is ended
    of_it = trained(1, **recipe, replay='[{"number":1,"done":[[6,0],[0,0]]}]')
    alone = trained(1, **recipe, replay='[{"number":1,"done":[[6,6],[0,0]]}]')
    assert of_it.digests != alone.digests
    assert set(of_it.losses.values()) != set(alone.losses.values())


def test_nobody_is_cut_below_the_quorum() -> None:
    def slow_half(job: Job) -> float:
        return 0.75 if job.node in ("worker-1", "worker-2") else 0.25

    found = trained(4, pace=slow_half, quorum=3, **RECIPE)
    journal = RoundJournal.parse(one_journal(found))
    # The third that arrives makes the quorum: until then both slow ones go on.
    waiting = trained(4, pace=slow_half, quorum=4, **RECIPE)
    assert waiting.journals == {""}
    for number in range(1, 5):
        for row in journal.of_round(number).done:
            assert min(row) >= max(row) - 1, row


@pytest.mark.parametrize("seed", deep(range(1), range(6)))
def test_slow_ranks_kills_and_cuts_together_are_replayed_by_the_journal(seed: int) -> None:
    def events(sim: Simulation) -> None:
        sim.at(1.7 + 0.3 * seed).crash(seed % 3)
        sim.at(4.0 + 0.3 * seed).restart(seed % 3)
        sim.at(5.2 + 0.2 * seed).partition({(seed + 1) % 3}, {seed % 3, (seed + 2) % 3, "coordinator"})
        sim.at(7.0 + 0.2 * seed).repair()

    found = trained(3, pace=slow_third, events=events, quorum=2, grace=0.3, **RECIPE)
    assert found.aborted > 0
    assert one_journal(found)
    replayed(found, 2, **RECIPE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quorum": 0}, "quorum is 1 to the number of logical workers, 4, not 0"),
        ({"quorum": 5}, "quorum is 1 to the number of logical workers, 4, not 5"),
        ({"grace": 1.0}, "give a quorum="),
        ({"quorum": 2, "grace": -1.0}, "grace is 0 to 86400 seconds"),
        ({"replay": "nonsense"}, "this is no journal of DiLoCo"),
        ({"replay": '[{"number":2},{"number":1}]'}, "its rounds are not in order"),
        ({"replay": '[{"number":2,"anew":[4]}]'}, "round 2 is not one of 4 workers and 2 stretches of 6, 0"),
        ({"replay": '[{"number":1,"done":[[7,0,0,0],[0,0,0,0]]}]'}, "round 1 is not one of 4 workers"),
    ],
)
def test_a_quorum_or_a_journal_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((RunFailed, LocalError), match=words):
        trained(1, rounds=1, **options)
