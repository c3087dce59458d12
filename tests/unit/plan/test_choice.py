"""Which algorithm is taken."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from plan_networks import MS, alike, plans, reductions, two_sites

from quicoll import plan
from quicoll.errors import LocalError
from quicoll.plan.choice import MAX_WALKED, RULES, choose, has_choice
from quicoll.plan.forecast import Forecast, predict
from quicoll.plan.network import MEMORY_RATE, NetworkModel


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


def test_with_a_wire_format_nothing_is_exchanged_but_between_two_ranks() -> None:
    """It sends p - 1 times what a rank has, instead of less than twice, and who names a format wants fewer bytes."""
    for world, taken in ((2, "exchange"), (4, "direct")):
        far = NetworkModel.between((0,) * world, latency=25 * MS, rate=1.25e8)
        for thrifty, name in ((False, "exchange"), (True, taken)):
            chosen = choose("all_reduce", world, 30_000, world, far.sites, far, itemsize=1, thrifty=thrifty)
            assert chosen == name, (world, thrifty)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
def test_where_ranks_share_hosts_much_goes_across_once(op: str) -> None:
    hosts = NetworkModel.between((0, 0, 1, 1), latency=1e-4, rate=MEMORY_RATE, far_latency=2e-4, far_rate=1.25e8)
    size = 16 << 20
    more = {} if op == "all_reduce" else {"counts": [size // 16] * 4}

    def walked(algorithm: str) -> Forecast:
        given = {"leaves": 4, "itemsize": 4, "wide_itemsize": 4, "sites": hosts.sites, "algorithm": algorithm}
        return predict(plans(op, 4, **given, **(more or {"elements": size // 4})), hosts)

    taken, direct = walked(choose(op, 4, size, 4, hosts.sites, hosts)), walked("direct")
    assert taken.crossing * 2 == direct.crossing
    assert taken.seconds < 0.6 * direct.seconds
    assert walked("hierarchical").seconds < 0.6 * direct.seconds
    assert choose("all_gather", 4, size, 4, hosts.sites, hosts) == "hierarchical"


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


def test_a_choice_that_has_changed_asks_for_another_number_of_the_rules() -> None:
    """Ranks compare that number and nothing else: where the digest is another one, raise RULES, and note both here."""
    chosen = []
    for sites in ((0, 0), (0, 1), (0,) * 4, (0, 0, 1, 1), (0, 1, 2, 3), (0,) * 7, (0, 0, 0, 1, 1, 2, 2), (0,) * 20):
        for near, far in (
            ((2e-5, MEMORY_RATE), (2e-4, 1.25e8)),
            ((1e-4, 1.25e8), (25 * MS, 2.5e7)),
            ((25 * MS, 2.5e7), (25 * MS, 2.5e7)),
        ):
            network = NetworkModel.between(sites, latency=near[0], rate=near[1], far_latency=far[0], far_rate=far[1])
            for op in ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter"):
                for nbytes in (4, 1 << 12, 1 << 16, 1 << 18, 1 << 22, 1 << 26):
                    for thrifty in (False, True):
                        if has_choice(op, len(sites), nbytes, sites):
                            taken = choose(op, len(sites), nbytes, len(sites), sites, network, thrifty=thrifty)
                            chosen.append(taken)
    assert len(set(chosen)) > 3
    digest = hashlib.sha256(" ".join(chosen).encode()).hexdigest()[:16]
    assert (RULES, digest) == (2, "b00c719d5034ce70")
