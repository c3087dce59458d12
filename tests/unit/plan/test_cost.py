"""The cost model: what a walk of plans predicts, in cases that can be worked out by hand; and the choice by it."""

from __future__ import annotations

from typing import Any

import pytest

from quicoll import plan
from quicoll.errors import LocalError
from quicoll.plan.cost import MAX_WALKED, NetworkModel, agreed, choose, limit, predict, quantised

MS = 1e-3


def plans(name: str, world: int, **arguments: Any) -> list[plan.Plan]:
    return [getattr(plan, name)(rank=rank, world=world, **arguments) for rank in range(world)]


def reductions(
    algorithm: str, network: NetworkModel, nbytes: int, *, op: str = "all_reduce", **more: Any
) -> list[plan.Plan]:
    world = network.world
    given = {
        "elements": nbytes // 4,
        "leaves": world,
        "itemsize": 4,
        "wide_itemsize": 4,
        "sites": network.sites,
        **more,
    }
    return plans(op, world, algorithm=algorithm, **given)


def alike(world: int, *, latency: float = 10 * MS, rate: float = 1e8, message: float = 0.0) -> NetworkModel:
    return NetworkModel.between((0,) * world, latency=latency, rate=rate, message=message)


def two_sites(each: int, *, far_rate: float = 1e7, message: float = 1e-4) -> NetworkModel:
    return NetworkModel.between(
        (0,) * each + (1,) * each, latency=1e-4, rate=1.25e8, far_latency=25 * MS, far_rate=far_rate, message=message
    )


def test_a_message_takes_its_bytes_once_and_its_way_once_and_its_sender_hears_of_it_a_delay_later() -> None:
    forecast = predict(plans("send", 2, source=0, to=1, elements=10**6, itemsize=1), alike(2))
    assert forecast.done == pytest.approx((10 * MS + 10 * MS + 10 * MS, 10 * MS + 10 * MS))
    assert [(flight.start, flight.end) for flight in forecast.flights] == [(0, pytest.approx(20 * MS))]
    assert (forecast.crossing, forecast.busiest) == (0, 10**6)


def test_processors_take_their_time_for_each_message_at_both_ends() -> None:
    forecast = predict(plans("send", 2, source=0, to=1, elements=0, itemsize=1), alike(2, message=1 * MS))
    assert forecast.seconds == 0  # no elements, no message
    forecast = predict(plans("barrier", 2), alike(2, message=1 * MS))
    assert forecast.seconds == pytest.approx(2 * (10 + 1) * MS, abs=1.01 * MS)


def test_messages_of_one_rank_follow_each_other_through_its_port() -> None:
    """Three parts of 1 MB leave one port of 100 MB/s: the last is there after 30 ms and the delay."""
    forecast = predict(plans("scatter", 4, root=0, counts=[0, 10**6, 10**6, 10**6], itemsize=1), alike(4))
    assert sorted(forecast.done[1:]) == pytest.approx([20 * MS, 30 * MS, 40 * MS])
    forecast = predict(plans("gather", 4, root=0, counts=[0, 10**6, 10**6, 10**6], itemsize=1), alike(4))
    assert forecast.done[0] == pytest.approx(40 * MS)


def test_what_goes_between_two_sites_shares_one_path_and_ranks_of_one_site_do_not() -> None:
    pairs = plans("all_to_all", 4, counts=[[0, 0, 0, 0]] * 2 + [[10**6, 0, 0, 0], [0, 10**6, 0, 0]], itemsize=1)
    near = predict(pairs, alike(4))
    far = predict(pairs, NetworkModel.between((0, 0, 1, 1), latency=10 * MS, rate=1e8, message=0.0))
    assert max(near.done[:2]) == pytest.approx(20 * MS)
    assert max(far.done[:2]) == pytest.approx(30 * MS)
    assert (near.crossing, far.crossing) == (0, 2 * 10**6)


def test_a_direct_all_reduce_comes_near_its_limit_and_nothing_beats_it() -> None:
    for world in (2, 4, 8):
        network = alike(world, latency=1 * MS, message=1e-5)
        lowest = limit("all_reduce", 64 << 20, network)
        assert lowest == pytest.approx(2 * (world - 1) / world * (64 << 20) / 1e8 + 2 * MS)
        seconds = predict(reductions("direct", network, 64 << 20), network).seconds
        assert lowest <= seconds < 1.35 * lowest


def test_a_tree_takes_at_most_twice_as_many_delays_as_the_world_has_bits_and_direct_two() -> None:
    """From rank r to the head it is as many hops as r has bits set. Each counts one delay more, for the last sender to
    hear of its message."""
    for world in (2, 3, 5, 8, 13, 16, 31, 33):
        network = alike(world, rate=1e12)
        levels = max(rank.bit_count() for rank in range(world))
        assert levels <= (world - 1).bit_length()
        assert predict(reductions("tree", network, 4), network).seconds == pytest.approx(
            (2 * levels + 1) * 10 * MS, rel=1e-4
        )
        assert predict(reductions("direct", network, 4), network).seconds == pytest.approx(3 * 10 * MS, rel=1e-4)
        assert predict(reductions("exchange", network, 4), network).seconds == pytest.approx(2 * 10 * MS, rel=1e-4)


def test_hierarchical_crosses_between_two_sites_once_each_way_where_each_site_is_a_node_of_the_tree() -> None:
    nbytes = 1 << 22
    for each in (2, 4, 8):
        network = two_sites(each)
        forecast = predict(reductions("hierarchical", network, nbytes), network)
        assert forecast.crossing == 2 * nbytes
        assert predict(reductions("direct", network, nbytes), network).crossing == 2 * each * nbytes


def test_what_makes_up_no_node_of_the_tree_crosses_as_it_is() -> None:
    """3 + 3 ranks: ((0 1)(2 3))(4 5). For every owner either site sends two values and gets one result."""
    network = two_sites(3)
    nbytes = 6 << 20
    assert predict(reductions("hierarchical", network, nbytes), network).crossing == 3 * nbytes
    reduced = predict(reductions("hierarchical", network, nbytes, op="reduce", root=0), network)
    assert reduced.crossing == 2 * nbytes


def test_every_algorithm_of_every_operation_ends_and_moves_what_its_plans_say() -> None:
    for world in (1, 2, 3, 6, 9):
        network = NetworkModel.between(tuple(rank % 2 for rank in range(world)), latency=1e-4, rate=1e8)
        for op, known in plan.ALGORITHMS.items():
            for algorithm in known:
                more: dict[str, Any] = {"counts": [700] * world}
                if op in ("all_reduce", "reduce", "broadcast"):
                    more = {"elements": 5000}
                if op in ("reduce", "broadcast", "gather", "scatter"):
                    more["root"] = world - 1
                if op in plan.CANONICAL:
                    more |= {"leaves": 7, "wide_itemsize": 8}
                made = plans(op, world, algorithm=algorithm, itemsize=4, sites=network.sites, chunk_bytes=3000, **more)
                forecast = predict(made, network)
                assert sum(flight.nbytes for flight in forecast.flights) == sum(each.bytes_sent for each in made)
                assert forecast.seconds >= limit(op, 0, network)


def test_the_walk_is_the_same_every_time() -> None:
    network = two_sites(3)
    first, second = (predict(reductions("hierarchical", network, 1 << 20), network) for _ in range(2))
    assert first == second


# ---------------------------------------------------------------------------------------------------------------------
# The choice


def test_few_bytes_over_a_long_way_are_exchanged_many_go_by_sites_and_on_one_site_directly() -> None:
    far, near = two_sites(4), NetworkModel.between((0,) * 8, latency=1e-4, rate=1.25e8)
    assert choose("all_reduce", 8, 64, 8, far.sites, far) == "exchange"
    assert choose("all_reduce", 8, 64 << 20, 8, far.sites, far) == "hierarchical"
    assert choose("all_reduce", 8, 64 << 20, 8, near.sites, near) == "direct"
    assert choose("reduce_scatter", 8, 64 << 20, 8, far.sites, far) == "hierarchical"
    # Ranks of two sites in turns: no two leaves of a site make up a node, so there is nothing to save.
    mixed = NetworkModel.between((0, 1) * 4, latency=1e-4, rate=1.25e8, far_latency=25 * MS, far_rate=1e7)
    assert choose("reduce", 8, 64 << 20, 8, mixed.sites, mixed) == "direct"
    many = NetworkModel.between((0,) * 24, latency=2e-5, rate=1.25e8)
    assert choose("all_reduce", 24, 64, 24, many.sites, many) == "tree"


def test_the_chosen_one_is_the_cheapest_of_those_that_keep_the_canonical_bits() -> None:
    for network in (two_sites(2), two_sites(3), alike(5, message=1e-4), alike(3, latency=1e-4, message=1e-4)):
        for nbytes in (4, 1 << 14, 1 << 18):
            seconds = {
                name: predict(reductions(name, network, nbytes), network).seconds
                for name in plan.CANONICAL["all_reduce"]
            }
            taken = choose("all_reduce", network.world, nbytes, network.world, network.sites, network)
            assert seconds[taken] == min(seconds.values())


def test_the_choice_hangs_on_nothing_but_its_arguments_and_the_size_counts_by_powers_of_two() -> None:
    far = two_sites(4)
    for nbytes in (5, 1000, 70_000, 3 << 20):
        rounded = 1 << (nbytes - 1).bit_length()
        assert choose("all_reduce", 8, nbytes, 8, far.sites, far) == choose("all_reduce", 8, rounded, 8, far.sites, far)
    assert choose("all_reduce", 8, 1000, 8, (5, 5, 5, 5, 2, 2, 2, 2), far) == choose(
        "all_reduce", 8, 1000, 8, (0, 0, 0, 0, 1, 1, 1, 1), far
    )


def test_worlds_too_large_to_walk_go_by_rule() -> None:
    world = MAX_WALKED + 1
    one, two = (
        alike(world, latency=1e-5, message=1e-4),
        NetworkModel.between(tuple(rank % 2 for rank in range(world)), latency=1e-4, rate=1e8),
    )
    assert choose("all_reduce", world, 100, world, one.sites, one) == "tree"
    assert choose("all_reduce", world, 1 << 20, world, one.sites, one) == "direct"
    assert choose("all_reduce", world, 100, world, alike(world).sites, alike(world)) == "direct"
    assert choose("all_reduce", world, 100, world, two.sites, two) == "hierarchical"


def test_nothing_to_choose_is_direct_and_what_has_one_algorithm_is_refused() -> None:
    assert choose("reduce", 1, 100, 1, (), alike(1)) == "direct"
    assert choose("reduce_scatter", 3, 0, 3, (), alike(3)) == "direct"
    assert choose("broadcast", 3, 100, 0, (), alike(3)) == "tree"
    assert choose("all_gather", 3, 100, 0, (), alike(3)) == "direct"
    assert choose("gather", 20, 100, 0, (), alike(20)) == "direct"
    with pytest.raises(LocalError, match="all_to_all has one algorithm"):
        choose("all_to_all", 3, 10, 3, (), alike(3))


def test_moves_go_by_sites_where_that_is_cheaper() -> None:
    """3 + 3 ranks: a binomial tree from rank 1 crosses three times, one by sites once."""
    network = two_sites(3)
    for nbytes in (64, 1 << 20):
        assert choose("broadcast", 6, nbytes, 0, network.sites, network, root=1) == "hierarchical"
        assert choose("all_gather", 6, nbytes, 0, network.sites, network) == "hierarchical"
    assert choose("broadcast", 8, 64, 0, two_sites(4).sites, two_sites(4)) == "tree"  # its first half is one site
    many = NetworkModel.between(tuple(rank // 10 for rank in range(30)), latency=1e-4, rate=1e8)
    assert {choose(op, 30, 64, 0, many.sites, many) for op in plan.MOVES} == {"hierarchical"}


@pytest.mark.parametrize("op", sorted(plan.MOVES))
def test_the_chosen_way_of_a_move_is_the_cheapest(op: str) -> None:
    for network in (two_sites(2), two_sites(5), NetworkModel.between((0, 1, 1, 1, 2), latency=1e-4, rate=1e8)):
        world = network.world
        for size in (64, 1 << 20):
            sized: dict[str, Any] = {"elements": size} if op == "broadcast" else {"counts": [size // world] * world}
            if op != "all_gather":
                sized["root"] = world - 1
            seconds = {
                name: predict(
                    plans(op, world, algorithm=name, sites=network.sites, itemsize=1, **sized), network
                ).seconds
                for name in plan.MOVES[op]
            }
            total = size if op == "broadcast" else size // world * world
            taken = choose(op, world, total, 0, network.sites, network, itemsize=1, root=world - 1)
            assert seconds[taken] <= min(seconds.values()) * 1.02


# ---------------------------------------------------------------------------------------------------------------------
# What ranks agree on


def test_ranks_agree_on_the_larger_of_what_either_end_has_measured() -> None:
    rows = [(0, 128, 0, 1 << 20), (256, 0, 1 << 21, 0)]
    network = agreed(rows, (7, 7))
    assert network.latency == ((0.0, 256e-6), (256e-6, 0.0))
    assert network.rate[0][1] == network.rate[1][0] == 1 << 21
    assert network.sites == (0, 0)


def test_what_nobody_has_measured_has_a_default() -> None:
    network = agreed([(0,) * 4] * 2, (0, 1))
    assert network.latency[0][1] == 1e-6
    assert network.rate[0][1] > 1e6


@pytest.mark.parametrize("rows", [[(0, 0)], [(0, 1, 1, 0), (0, 1, 1)], [(0, -1, 0, 0)] * 2, [(0, 1 << 62, 0, 0)] * 2])
def test_measurements_of_another_shape_or_out_of_bounds_are_refused(rows: list[tuple[int, ...]]) -> None:
    if len(rows) == 1:
        assert agreed(rows, (0,)).world == 1
        return
    with pytest.raises(LocalError, match="another world size"):
        agreed(rows, (0,) * len(rows))


def test_measurements_are_rounded_up_to_powers_of_two() -> None:
    assert [quantised(value) for value in (0, 1, 2, 3, 1000, 1024, 1025)] == [1, 1, 2, 4, 1024, 1024, 2048]


@pytest.mark.parametrize(
    ("latency", "rate", "said"),
    [
        (((0.0,),), ((1.0, 1.0), (1.0, 1.0)), "latency must be 2 rows of 2"),
        (((0.0, -1.0), (0.0, 0.0)), ((1.0, 1.0), (1.0, 1.0)), "not negative"),
        (((0.0, 0.0), (0.0, 0.0)), ((1.0, 0.0), (1.0, 1.0)), "above 0"),
    ],
)
def test_a_network_that_cannot_be_is_refused(latency: Any, rate: Any, said: str) -> None:
    with pytest.raises(LocalError, match=said):
        NetworkModel(latency, rate, (0, 0))
    with pytest.raises(LocalError, match="a network of 3 ranks for 2 plans"):
        predict(plans("barrier", 2), alike(3))
