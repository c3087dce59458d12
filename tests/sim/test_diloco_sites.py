"""DiLoCo on two levels, in simulated clusters: data parallel inside of a site, rounds across sites.

The bits are those of one rank, wherever the workers and their parts are, and whatever is lost on the way.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from depth import deep
from diloco_jobs import (
    EVERY,
    ROUNDS,
    Ended,
    adam,
    nesterov,
    of_dropout,
    of_layers,
    samples,
    trained,
)
from torch.nn import functional

from quicoll.errors import LocalError
from quicoll.sim import RunFailed
from quicoll.train.diloco_journal import RoundJournal

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim import Simulation

WORKERS, PARTS = 2, 4
TWO: dict[str, Any] = {"shards": WORKERS * PARTS, "parts": PARTS, "backup": 0}


pytestmark = pytest.mark.usefixtures("one_thread")


def plainly() -> dict[str, torch.Tensor]:
    """One process: a copy of the model for each worker, whose gradients are the mean over its parts."""
    job = of_layers()
    outer = nesterov(job)
    workers = [copy.deepcopy(job) for _ in range(WORKERS)]
    inners = [adam(each) for each in workers]
    for number in range(ROUNDS):
        for step in range(1, EVERY + 1):
            for place, (model, optimizer) in enumerate(zip(workers, inners, strict=True)):
                found = []
                for part in range(PARTS):
                    x, y = samples(place * PARTS + part, number * EVERY + step)
                    loss = functional.mse_loss(model(x)[:, 0], y)
                    found.append(torch.autograd.grad(loss, [*model.parameters()]))
                for value, (a, b, c, d) in zip(model.parameters(), zip(*found, strict=True), strict=True):
                    value.grad = ((a + b) + (c + d)) / 4
                optimizer.step()
        with torch.no_grad():
            for value, *own in zip(*(each.parameters() for each in (job, *workers)), strict=True):
                value.grad = ((value - own[0]) + (value - own[1])) / 2
        outer.step()
        with torch.no_grad():
            for value, *own in zip(*(each.parameters() for each in (job, *workers)), strict=True):
                for each in own:
                    each.copy_(value)
    return {name: value.detach() for name, value in job.named_parameters()}


def test_the_bits_are_those_of_a_plain_loop_in_one_process_wherever_the_sites_are() -> None:
    wanted = plainly()
    alone = trained(1, **TWO)
    assert alone.losses[ROUNDS] < alone.losses[1]
    for sites in ("a", *deep(("aab",), ("aa", "ab", "aabb", "abab", "aaabb", "aaaab", "aabbcc"))):
        found = trained(len(sites), sites=sites, **TWO)
        found.same(alone)
        for model in found.models:
            for name, value in wanted.items():
                assert torch.equal(model[name], value), (sites, name)


VARIANTS: dict[str, dict[str, Any]] = {
    "four workers, of which a site has two": {"shards": 12, "parts": 3, "fragments": 2, "delay": 1},
    "more ranks in a site than parts": {"shards": 4, "parts": 2},
    "int4 with what it loses": {"wire": "int4", "fragments": 2, "delay": 1},
    "the largest with what they lose": {"wire": "topk:1/8", "fragments": 3, "delay": 2},
    "dropout, and data in epochs that no round divides": {
        "make": of_dropout, "data": True, "fragments": 2, "delay": 2, "wire": "int8"
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_bits_are_those_of_one_rank_on_any_number_of_sites_and_ranks(variant: str) -> None:
    options = TWO | VARIANTS[variant]
    alone = trained(1, **options)
    for sites in deep(("aaabb",), ("aaa", "abab", "aaabb", "aabbcc")):
        trained(len(sites), sites=sites, **options).same(alone)


def test_a_fragment_that_spans_many_blocks_of_the_wire_format_is_cut_into_lanes_without_another_bit() -> None:
    def wide() -> torch.nn.Module:
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.Linear(6, 1500), torch.nn.Tanh(), torch.nn.Linear(1500, 1))

    for wire in ("int4", "topk:1/64", "topk-2bit:1/16", "bfloat16", None):
        options = TWO | {"make": wide, "wire": wire, "rounds": 2, "every": 2}
        trained(5, sites="aaabb", **options).same(trained(1, **options))


RECIPE: dict[str, Any] = TWO | {
    "fragments": 2, "delay": 2, "make": of_dropout, "data": True, "rounds": 4, "wire": "int8"
}  # fmt: skip


def journal_of(found: Ended) -> RoundJournal:
    (text,) = found.journals
    assert len(found.digests) == 1
    return RoundJournal.parse(text)


def replayed(found: Ended, sites: str, **options: Any) -> None:
    """The same bits of everything from the journal, at other sites, where nothing fails and nobody is slow."""
    (text,) = found.journals
    again = trained(len(sites), sites=sites, replay=text, **options)
    again.same(found)
    assert again.journals == found.journals


@pytest.mark.parametrize("lost", deep((1,), (0, 1, 3)))
def test_a_rank_that_is_lost_inside_of_a_site_takes_nothing_along_that_the_others_there_have_not(lost: int) -> None:
    def events(sim: Simulation) -> None:
        sim.at(2.6).crash(lost)
        sim.at(5.6).restart(lost)

    found = trained(4, sites="aabb", pace=0.25, events=events, **RECIPE)
    assert found.aborted > 0
    assert found.journals == {""}
    found.same(trained(1, **RECIPE))


def lose_a_site(sim: Simulation) -> None:
    for rank in (2, 3):
        sim.at(2.6).crash(rank)
        sim.at(7.6).restart(rank)


def test_a_site_that_is_lost_with_all_its_ranks_begins_its_workers_anew_elsewhere_and_a_replay_has_the_same_bits() -> (
    None
):
    found = trained(5, sites="aabba", pace=0.25, events=lose_a_site, **RECIPE)
    assert found.aborted > 0
    entries = [entry for number in range(1, 5) if (entry := journal_of(found).of_round(number)).anew]
    assert [entry.anew for entry in entries] == [(1,)]
    assert found.digests != trained(1, **RECIPE).digests
    for sites in deep(("a",), ("a", "aab", "abab")):
        replayed(found, sites, **RECIPE)


def test_a_site_that_is_lost_changes_no_bit_where_another_keeps_a_copy() -> None:
    found = trained(4, sites="aabb", pace=0.25, events=lose_a_site, **RECIPE | {"backup": 1})
    assert found.aborted > 0
    assert found.journals == {""}
    found.same(trained(1, **RECIPE))


def test_a_rank_and_then_a_site_that_are_lost_are_replayed_by_the_journal_on_any_number_of_ranks() -> None:
    def events(sim: Simulation) -> None:
        sim.at(1.7).crash(0)
        sim.at(7.6).restart(0)
        lose_a_site(sim)

    found = trained(6, sites="aabbaa", pace=0.25, events=events, **RECIPE)
    assert found.aborted > 1
    assert any(journal_of(found).of_round(number).anew for number in range(1, 5))
    for sites in deep(("aab",), ("a", "aab", "aabb")):
        replayed(found, sites, **RECIPE)


def test_ranks_and_sites_that_come_and_go_by_order_change_no_bit() -> None:
    def events(sim: Simulation) -> None:
        sim.at(1.3).scale(2)
        sim.at(4.3).scale(4)

    trained(4, sites="abba", pace=0.25, events=events, **RECIPE).same(trained(1, **RECIPE))


def test_all_ranks_of_a_site_stop_together_where_one_of_them_is_slow_and_a_replay_has_the_same_bits() -> None:
    def slow_fourth(job: Job) -> float:
        return 1.0 if job.node == "worker-3" else 0.25

    found = trained(4, sites="aabb", pace=slow_fourth, quorum=1, grace=0.5, **RECIPE)
    waiting = trained(4, sites="aabb", pace=slow_fourth, **RECIPE)
    assert found.seconds < waiting.seconds - 2.0
    for number in range(1, 5):
        entry = journal_of(found).of_round(number)
        assert entry.done, "each round has been cut"
        assert sum(row[0] for row in entry.done) == EVERY > sum(row[1] for row in entry.done) > 0, entry
    for sites in deep(("aab",), ("a", "aab")):
        replayed(found, sites, **RECIPE)


def test_parts_that_the_shards_are_no_multiple_of_are_refused() -> None:
    with pytest.raises(
        (RunFailed, LocalError), match="each logical worker has 3 of the shards, which 8 are no multiple"
    ):
        trained(1, shards=8, parts=3, rounds=1)
    with pytest.raises((RunFailed, LocalError), match="parts 1 or more"):
        trained(1, shards=8, parts=0, rounds=1)
