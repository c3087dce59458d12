"""What plans take on a network."""

from __future__ import annotations

from typing import Any

import pytest
from plan_networks import MS, alike, plans, reductions, two_sites

from quicoll import plan
from quicoll.plan.forecast import limit, predict
from quicoll.plan.network import MEMORY_RATE, NetworkModel


def test_a_message_takes_its_bytes_once_and_its_way_once_and_its_sender_hears_of_it_a_delay_later() -> None:
    forecast = predict(plans("send", 2, source=0, to=1, elements=10**6, itemsize=1), alike(2))
    assert forecast.done == pytest.approx((10 * MS + 10 * MS + 10 * MS, 10 * MS + 10 * MS))
    assert [(flight.start, flight.end) for flight in forecast.flights] == [(0, pytest.approx(20 * MS))]
    assert (forecast.crossing, forecast.busiest) == (0, 10**6)


def test_processors_take_their_time_for_each_message_at_both_ends() -> None:
    forecast = predict(plans("send", 2, source=0, to=1, elements=0, itemsize=1), alike(2, message=1 * MS))
    assert forecast.seconds == 0  # no elements, no message
    forecast = predict(plans("send", 2, source=0, to=1, elements=1, itemsize=1), alike(2, message=1 * MS))
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


def shared(latency: float, rate: float) -> NetworkModel:
    """Ranks 0 and 1 share a host, 2 and 3 another."""
    return NetworkModel.between((0, 0, 1, 1), latency=0.0, rate=MEMORY_RATE, far_latency=latency, far_rate=rate)


def test_what_goes_through_memory_is_copied_by_both_processors_and_takes_no_port() -> None:
    network = shared(10 * MS, 1e8)
    nbytes = 1 << 20
    two = plans("scatter", 4, root=0, counts=[0, nbytes, 10**6, 0], itemsize=1)
    forecast = predict(two, network)
    copied, message = nbytes / MEMORY_RATE, network.message
    assert forecast.done[1] == pytest.approx(2 * (message + copied))
    assert forecast.done[2] == pytest.approx(copied + 3 * message + 20 * MS)  # its sender copies before
    assert network.port(0) == 1e8  # and not what memory has
    assert [network.shared(0, each) for each in (1, 2)] == [True, False]
    alone = NetworkModel.between((0, 0), latency=0.0, rate=MEMORY_RATE)
    assert alone.port(0) == MEMORY_RATE


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
