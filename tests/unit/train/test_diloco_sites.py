"""Who computes which part of which worker, and who exchanges which lane with whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quicoll.state.layout import Layout
from quicoll.train.diloco_sites import WorkerHome, lane_cuts


def homes_of(sizes: list[int], workers: int, parts: int) -> list[WorkerHome]:
    """The home of each rank; sites of so many ranks each."""
    firsts = [sum(sizes[:place]) for place in range(len(sizes))]
    peers = tuple(tuple(range(first + 1, first + size)) for first, size in zip(firsts, sizes, strict=True))
    layout = Layout(workers, tuple(firsts), 0, peers)
    return [WorkerHome.of(layout, rank, parts) for rank in range(sum(sizes))]


sites = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@given(sites, st.integers(1, 8), st.integers(1, 8))
def test_every_part_of_every_worker_is_computed_by_one_rank_of_its_home(
    sizes: list[int], workers: int, parts: int
) -> None:
    homes = homes_of(sizes, workers, parts)
    done = [(worker, part) for home in homes for worker in home.workers for part in home.parts]
    assert sorted(done) == [(worker, part) for worker in range(workers) for part in range(parts)]
    for rank, home in enumerate(homes):
        assert rank in home.ranks
        assert all(homes[other].workers == home.workers for other in home.ranks)


@given(sites, st.integers(1, 8))
def test_every_worker_has_one_rank_that_speaks_for_it_and_they_speak_in_the_order_of_workers(
    sizes: list[int], workers: int
) -> None:
    homes = homes_of(sizes, workers, 2)
    said = [worker for rank in range(len(homes)) for worker in homes[0].spoken_by(rank)]
    assert said == list(range(workers))
    for rank, home in enumerate(homes):
        assert home.speaks == (rank == home.ranks[0])
        assert home.spoken_by(rank) == (home.workers if home.speaks else range(0))


@given(sites)
def test_every_lane_is_carried_by_one_rank_of_each_home_and_the_ranks_of_a_home_have_them_in_order(
    sizes: list[int],
) -> None:
    homes = homes_of(sizes, 4, 2)
    lanes = homes[0].lanes
    assert lanes == max(sizes)
    for lane in range(lanes):
        carriers = homes[0].carriers(lane)
        assert [homes[rank].place for rank in carriers] == list(range(len(sizes)))
        assert all(home.carriers(lane) == carriers for home in homes)
        assert all((lane in home.carries()) == (rank in carriers) for rank, home in enumerate(homes))
    for home in homes:
        assert [lane for rank in home.ranks for lane in homes[rank].carries()] == list(range(lanes))


@given(st.integers(0, 100_000), st.sampled_from([1, 64, 256, 4096]), st.integers(1, 9))
def test_lanes_are_whole_blocks_and_together_all_of_a_tensor(size: int, block: int, lanes: int) -> None:
    cuts = lane_cuts(size, block, lanes)
    assert [cut.start for cut in cuts] == [0, *(cut.stop for cut in cuts[:-1])]
    assert cuts[-1].stop == size
    assert all(cut.start % block == 0 or cut.start == size for cut in cuts)
    lengths = [cut.stop - cut.start for cut in cuts]
    assert max(lengths) - min(lengths) < 2 * block
