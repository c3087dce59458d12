"""DiLoCo in simulated clusters: the bits of a plain loop in one process, on any number of ranks and through aborts."""

from __future__ import annotations

import asyncio
import copy
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from depth import deep
from diloco_jobs import (
    EVERY,
    ROUNDS,
    WORKERS,
    Ended,
    adam,
    loss_of,
    nesterov,
    of_dropout,
    of_indices,
    of_layers,
    samples,
    trained,
)
from torch import nn
from torch.nn import functional

from quicoll.data import Sampler
from quicoll.errors import JobDone, LocalError
from quicoll.sim import Conditions, RunFailed, Settings, Simulation, scenario
from quicoll.train import CheckpointPolicy, DiLoCo, WorkerFigures

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from quicoll.job import Job


pytestmark = pytest.mark.usefixtures("one_thread")


def clipped(model: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.SGD(model.parameters(), lr=1.0)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    made.register_step_pre_hook(clip)
    return made


def plainly(
    *, fragments: Sequence[Sequence[int]], delay: int, mix: float, wire: float = 0.0, fresh: bool = False
) -> dict[str, torch.Tensor]:
    """DiLoCo as a paper has it: one process, a copy of the model for each worker. Parameters by name.

    wire: What is exchanged is bfloat16, and so much of what that loses is sent the next time; 0: float32. fresh: inner
    optimizers begin anew.
    """
    job = of_layers()
    outer = nesterov(job)
    workers = [copy.deepcopy(job) for _ in range(WORKERS)]
    inners = [adam(each) for each in workers]
    whole = [*job.parameters()]
    own = [[*each.parameters()] for each in workers]
    ends = {(number + 1) * EVERY // len(fragments): which for number, which in enumerate(fragments)}
    lost = [[torch.zeros_like(value, requires_grad=False) for value in whole] for _ in workers]
    under_way: dict[int, dict[int, torch.Tensor]] = {}

    def sent(worker: int, place: int) -> torch.Tensor:
        delta = (whole[place] - own[worker][place]).detach()
        if wire:
            delta += lost[worker][place] * wire
            given, delta = delta, delta.bfloat16().float()
            lost[worker][place] = given - delta
        return delta

    def begin(at: int) -> None:
        if at in ends:
            under_way[at] = {}
            for place in ends[at]:
                deltas = [sent(worker, place) for worker in range(WORKERS)]
                mean = ((deltas[0] + deltas[1]) + (deltas[2] + deltas[3])) / 4
                under_way[at][place] = mean.bfloat16().float() if wire else mean

    for number in range(ROUNDS):
        if fresh:
            inners = [adam(each) for each in workers]
        begin(delay)
        for step in range(1, EVERY + 1):
            for place, (model, optimizer) in enumerate(zip(workers, inners, strict=True)):
                optimizer.zero_grad()
                x, y = samples(place, number * EVERY + step)
                functional.mse_loss(model(x)[:, 0], y).backward()
                optimizer.step()
            if delay == 0:
                begin(step)
            for place, gradient in under_way.pop(step, {}).items():
                whole[place].grad = gradient
            outer.step()
            with torch.no_grad():
                for place, value in enumerate(whole):
                    if value.grad is not None:
                        for each in own:
                            each[place].copy_(each[place] * mix + value * (1.0 - mix))
            outer.zero_grad()
            if delay:
                begin(step + delay)
    return {name: value.detach() for name, value in job.named_parameters()}


RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "at once": ({}, {"fragments": [range(6)], "delay": 0, "mix": 0.0}),
    "with a delay": ({"delay": 2}, {"fragments": [range(6)], "delay": 2, "mix": 0.5}),
    "in fragments": ({"fragments": 2}, {"fragments": [range(2), range(2, 6)], "delay": 0, "mix": 0.0}),
    "in fragments with a delay": (
        {"fragments": 3, "delay": 2, "mix": 0.25},
        {"fragments": [range(1), range(1, 3), range(3, 6)], "delay": 2, "mix": 0.25},
    ),
    "with inner optimizers that begin anew": (
        {"keep_inner": False},
        {"fragments": [range(6)], "delay": 0, "mix": 0.0, "fresh": True},
    ),
    "in fewer bits": (
        {"fragments": 2, "delay": 1, "wire": "bfloat16"},
        {"fragments": [range(2), range(2, 6)], "delay": 1, "mix": 0.5, "wire": 1.0},
    ),
    "in fewer bits, of which half is sent again": (
        {"fragments": 2, "delay": 1, "wire": "bfloat16", "feedback": 0.5},
        {"fragments": [range(2), range(2, 6)], "delay": 1, "mix": 0.5, "wire": 0.5},
    ),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_are_those_of_a_plain_loop_in_one_process_on_any_number_of_ranks(recipe: str) -> None:
    options, plain = RECIPES[recipe]
    wanted = plainly(**plain)
    alone = trained(1, **options)
    assert alone.losses[ROUNDS] < alone.losses[1]
    for ranks in (1, *deep((2, 4), (2, 3, 4, 5))):
        found = trained(ranks, **options)
        found.same(alone)
        for model in found.models:
            for name, value in wanted.items():
                assert torch.equal(model[name], value), (ranks, name)


VARIANTS: dict[str, dict[str, Any]] = {
    "dropout": {"make": of_dropout, "fragments": 2, "delay": 1},
    "data in epochs that no round divides": {"data": True, "fragments": 3, "delay": 2},
    "a schedule": {"schedule": lambda step: min(1.0, step / 10)},
    "an inner optimizer without a state": {"inner": lambda model: torch.optim.SGD(model.parameters(), lr=0.1)},
    "an inner momentum, dampened": {
        "inner": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    },
    "an inner optimizer that is made with a state": {"inner": lambda model: torch.optim.Adagrad(model.parameters())},
    "int4 with what it loses": {"wire": "int4", "fragments": 2, "delay": 1},
    "the largest with what they lose": {"wire": "topk:1/8", "fragments": 3, "delay": 2},
    "the largest in two bits with what they lose": {"wire": "topk-2bit:1/8", "fragments": 3, "delay": 2},
    "a wire format without feedback": {"wire": "int8", "feedback": False},
    "an inner optimizer that is made with a state, anew in each round": {
        "inner": lambda model: torch.optim.Adagrad(model.parameters()),
        "keep_inner": False,
    },
    "three workers": {"shards": 3, "fragments": 2},
    "int8 with what it loses": {"wire": "int8", "fragments": 2, "delay": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_bits_are_those_of_one_rank_on_any_number_of_them(variant: str) -> None:
    alone = trained(1, **VARIANTS[variant])
    for ranks in deep((3,), (2, 3, 4, 5)):
        trained(ranks, **VARIANTS[variant]).same(alone)


def test_a_hook_of_the_inner_optimizer_clips_what_a_worker_s_step_moves() -> None:
    found = trained(2, inner=clipped, rounds=1)
    found.same(trained(1, inner=clipped, rounds=1))
    before = of_layers().state_dict()
    moved = sum(float((value - before[name]).square().sum()) for name, value in found.models[0].items()) ** 0.5
    assert 0 < moved <= 1.9 * 0.7 * EVERY * 1e-3 * 1.001  # the outer step of as many inner ones


def test_the_schedule_is_by_the_number_of_the_inner_step_over_all_rounds() -> None:
    asked: list[int] = []

    def schedule(step: int) -> float:
        asked.append(step)
        return 0.0 if step > EVERY else 1.0

    found, once = trained(1, schedule=schedule, rounds=2, inner=plain_sgd), trained(1, rounds=1, inner=plain_sgd)
    assert sorted(set(asked)) == list(range(1, 2 * EVERY + 1))
    assert found.losses[1] == once.losses[1]
    # The second round moves no worker: the outer optimizer gets zeros, and goes on by its momentum alone.
    before = dict(of_layers().named_parameters())
    for name, value in once.models[0].items():
        momentum = (value - before[name].detach()) * 0.9 / 1.9 * 0.9
        assert torch.allclose(found.models[0][name], value + momentum, atol=1e-6)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


RECIPE: dict[str, Any] = {
    "fragments": 2, "delay": 2, "make": of_dropout, "data": True, "rounds": 6, "wire": "int8"
}  # fmt: skip


STATELESS: dict[str, Any] = {"fragments": 1, "delay": 0, "feedback": False, "keep_inner": False}


@pytest.mark.parametrize(
    ("when", "options"),
    deep([(2.1, {}), (3.8, STATELESS)], [*((when, {}) for when in (0.9, 1.6, 2.1, 2.8, 3.8)), (3.8, STATELESS)]),
)
def test_a_rank_that_is_killed_in_a_round_and_whose_workers_others_take_over_changes_no_bit(
    when: float, options: dict[str, Any]
) -> None:
    def events(sim: Simulation) -> None:
        sim.at(when).crash(1)
        sim.at(when + 20.0).restart(1)  # when the job is done

    found = trained(3, pace=0.25, events=events, **RECIPE | options)
    assert found.aborted > 0
    assert len(found.models) == 2
    found.same(trained(1, **RECIPE | options))


def test_ranks_that_are_killed_one_after_the_other_and_come_back_change_no_bit() -> None:
    def events(sim: Simulation) -> None:
        for number in range(3):
            sim.at(1.1 + 4.2 * number).crash(number)
            sim.at(2.0 + 4.2 * number).restart(number)

    found = trained(3, pace=0.25, events=events, **RECIPE)
    assert found.aborted > 0
    found.same(trained(1, **RECIPE))


def test_ranks_that_are_cut_off_in_a_round_and_in_a_vote_change_no_bit() -> None:
    def events(sim: Simulation) -> None:
        sim.at(2.2).partition({0}, {1, 2, "coordinator"})
        sim.at(5.0).repair()
        sim.at_vote(1, start=7.0, after=0.001).partition({1}, {0, 2, "coordinator"})
        sim.at(12.0).repair()

    found = trained(3, pace=0.25, events=events, **RECIPE)
    assert found.aborted > 0
    found.same(trained(1, **RECIPE))


@pytest.mark.parametrize("seed", deep(range(2), range(8)))
def test_generated_faults_change_no_bit(seed: int) -> None:
    recipe = RECIPE | {"make": of_layers}  # a dropout of another seed has other bits
    wanted = trained(1, **recipe)
    digests: list[str] = []

    async def unchanged(job: Job, _: Simulation) -> None:
        model = of_layers()
        diloco = DiLoCo(
            job, model, adam(model), nesterov(model), of_indices, wire="int8", every=EVERY, fragments=2, delay=2,
            data=Sampler(50, batch_size=2 * WORKERS, shards=WORKERS, seed=3), backup=2,
        )  # fmt: skip
        with suppress(JobDone):  # it came when the others had ended, and there is no checkpoint
            digests.append((await diloco.run(steps=RECIPE["rounds"])).digest)

    outcome = scenario(ranks=3, steps=RECIPE["rounds"], compute=0.25)(unchanged).run(seed)
    assert outcome.error is None, outcome.error
    assert set(digests) == wanted.digests


def test_ranks_that_come_and_go_by_order_need_no_backup() -> None:
    def events(sim: Simulation) -> None:
        sim.at(1.3).scale(2)
        sim.at(4.3).scale(4)

    trained(3, pace=0.25, events=events, backup=0, **RECIPE).same(trained(1, **RECIPE))


def resumed(directory: Path, rounds: int, ranks: int, **options: Any) -> Ended:
    policy = CheckpointPolicy(str(directory), every=2)
    return trained(ranks, **RECIPE | {"rounds": rounds, "checkpoints": policy, "backup": 0} | options)


def test_a_job_goes_on_from_its_checkpoint_on_another_number_of_ranks_with_the_same_bits(tmp_path: Path) -> None:
    first = resumed(tmp_path / "one", 3, 3)
    on = resumed(tmp_path / "one", 6, 2)
    assert sorted(on.losses) == [4, 5, 6]
    at_once = resumed(tmp_path / "other", 6, 1)
    assert on.digests == at_once.digests != first.digests
    assert {**first.losses, **on.losses} == at_once.losses


def test_a_checkpoint_of_another_recipe_is_refused_by_what_differs(tmp_path: Path) -> None:
    resumed(tmp_path, 2, 1)
    with pytest.raises(RunFailed, match="delay is 1 here and 2 in the job"):
        resumed(tmp_path, 4, 1, delay=1)


def test_a_rank_with_another_recipe_is_refused_by_name_and_the_others_train() -> None:
    refused: list[str] = []
    ended: list[int] = []

    async def worker(job: Job, _: Simulation) -> None:
        model = of_layers()
        diloco = DiLoCo(
            job, model, adam(model), nesterov(model), loss_of, shards=WORKERS, fragments=1, delay=0,
            every=EVERY + (job.node == "worker-2"),
        )  # fmt: skip
        try:
            ended.append((await diloco.run(steps=2)).steps)
        except LocalError as error:
            refused.append(str(error))

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=3, limit=100.0)).run()
    assert outcome.error is None, outcome.error
    assert ended == [2, 2]
    assert "'every'" in refused[0]


def test_between_rounds_and_while_one_is_awaited_the_model_has_the_parameters_of_the_job() -> None:
    seen: list[list[list[bytes]]] = []

    async def worker(job: Job, _: Simulation) -> None:
        model = of_layers()
        mine: list[list[bytes]] = [[] for _ in range(3)]
        seen.append(mine)

        def look(number: int) -> None:
            values = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
            mine[(number - 1) // EVERY].append(values)

        diloco = DiLoCo(
            job, model, adam(model), nesterov(model), loss_of, shards=WORKERS, every=EVERY, fragments=2, delay=1,
            on_inner_step=look,
        )  # fmt: skip
        await diloco.run(steps=3)

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=2, limit=100.0)).run()
    assert outcome.error is None, outcome.error
    committed = [its[-1] for its in seen[0]]
    assert committed == [its[-1] for its in seen[1]]
    assert len(set(committed)) == 3
    for rounds in seen:
        assert set(rounds[0]) == {committed[0]}
        for number in (1, 2):  # ahead of the decision on a round they are those before it, and after it its own
            before, after = committed[number - 1 : number + 1]
            ahead = rounds[number].count(before)
            assert rounds[number] == [before] * ahead + [after] * (EVERY - ahead)


def of_many(width: int = 2000) -> nn.Module:
    """Make a model of 8 * width + 1 parameters."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))


ELEMENTS = 16_001


@pytest.mark.parametrize(
    ("options", "exchanged", "copied"),
    [
        ({}, 4 * ELEMENTS, 0),
        ({"fragments": 4}, 4 * (ELEMENTS - 1), 0),  # the last fragment travels in an announcement
        ({"wire": "int8"}, (1 + 4 / 256) * ELEMENTS, 0),
        ({"wire": "int4"}, (1 / 2 + 2 / 64) * ELEMENTS, 0),
        ({"wire": "topk:1/64"}, 4 * ELEMENTS / 73, 0),
        # Of the worker of a rank: two moments, a count for each of four parameters, and two flags.
        ({"backup": 1}, 4 * ELEMENTS, 4 * (2 * ELEMENTS + 4 + 2)),
        # Beside them own parameters, but for those of the last fragment, and what the wire format has lost.
        ({"backup": 1, "wire": "int8", "fragments": 4}, (1 + 4 / 256) * ELEMENTS, 4 * (4 * ELEMENTS - 1 + 4 + 2)),
        # A worker with nothing of its own.
        ({"backup": 1, "wire": "int8", "feedback": False, "keep_inner": False}, (1 + 4 / 256) * ELEMENTS, 4 * 2),
    ],
)
def test_a_rank_sends_in_a_round_what_one_exchange_of_gradients_takes_and_the_copies_that_were_asked_for(
    options: dict[str, Any], exchanged: float, copied: int
) -> None:
    for of_rounds in sent_in_two_rounds(2, **options):
        padding = 0 if options.get("wire") is None else 260 * options.get("fragments", 1)  # of the last block of each
        assert 0 <= of_rounds - 2 * (exchanged + copied) < 400 + 2 * padding, (of_rounds, exchanged, copied)


@pytest.mark.parametrize(("wire", "fewer"), [("int4", 400), ("topk:1/64", 2000), ("topk-2bit:1/16", 2000)])
@pytest.mark.parametrize("options", deep([{"fragments": 4, "delay": 2}], [{}, {"fragments": 4, "delay": 2}]))
def test_a_round_of_a_hundred_steps_sends_as_many_times_fewer_bytes_than_gradients_in_each_step(
    wire: str, fewer: int, options: dict[str, Any]
) -> None:
    # Gradients: reduced and gathered, 2 (p - 1) / p of them a step. A round's bytes do not depend on its steps.
    gradients = 100 * 2 * 3 / 4 * 4 * (8 * 9312 + 1)
    for of_rounds in sent_in_two_rounds(4, width=9312, wire=wire, **options):
        assert of_rounds / 2 < gradients / fewer, gradients / (of_rounds / 2)


def test_a_small_model_in_int4_is_summed_by_all_ranks_so_that_each_of_them_sends_four_hundred_times_less() -> None:
    # 56 steps of the 26,945 parameters of a model: in int4 they are less than what one rank sums of float32.
    gradients = 56 * 2 * 3 / 4 * 4 * (8 * 3368 + 1)
    for of_rounds in sent_in_two_rounds(4, width=3368, wire="int4", algorithm="direct"):
        assert of_rounds / 2 < gradients / 400, gradients / (of_rounds / 2)


def test_a_round_without_fragments_goes_over_into_the_next_an_exchange_after_its_last_inner_step() -> None:
    lengths: list[float] = []

    async def worker(job: Job, sim: Simulation) -> None:
        ends: list[float] = []
        model = of_many()
        diloco = DiLoCo(
            job, model, adam(model), nesterov(model), loss_of, shards=4, wire="int4", every=4, fragments=1, delay=0,
            algorithm="direct", on_inner_step=lambda _: asyncio.sleep(1.0), on_step=lambda _: ends.append(sim.now),
        )  # fmt: skip
        await diloco.run(steps=6)
        lengths.extend(later - earlier for earlier, later in pairwise(ends[2:-1]))

    far = Conditions(latency_ns=25_000_000)
    outcome = Simulation(worker, seed=3, settings=Settings(ranks=4, limit=100.0, conditions=far)).run()
    assert outcome.error is None, outcome.error
    # Two delays of the exchange, during which the workers' rows are staged. The two of the vote are not waited for.
    assert max(lengths) < 4.0 + 2.9 * 0.025, lengths


def sent_in_two_rounds(ranks: int, *, width: int = 2000, **options: Any) -> list[int]:
    """What each rank sends over links in the third and the fourth round."""
    sent: list[list[int]] = []

    async def worker(job: Job, _: Simulation) -> None:
        mine: list[int] = []
        sent.append(mine)

        async def count(number: int) -> None:
            await asyncio.sleep(1.0)  # what is not acknowledged yet is not counted
            mine.append(sum(link.bytes_sent for link in await job.links()))

        model = of_many(width)
        diloco = DiLoCo(
            job, model, adam(model), nesterov(model), loss_of, shards=ranks, every=8, on_step=count,
            **({"fragments": 1, "delay": 0} | options),
        )  # fmt: skip
        await diloco.run(steps=4)

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=ranks, limit=100.0)).run()
    assert outcome.error is None, outcome.error
    return [mine[3] - mine[1] for mine in sent]  # the first round has what a view begins with


def test_between_sites_a_round_whose_exchanges_have_a_delay_waits_for_nothing() -> None:
    shares: list[float] = []

    async def worker(job: Job, _: Simulation) -> None:
        model = of_many()
        seen: list[WorkerFigures] = []
        diloco = DiLoCo(
            job, model, adam(model), nesterov(model), loss_of, shards=WORKERS, wire="int4", every=100, fragments=4,
            delay=5, on_inner_step=lambda _: asyncio.sleep(0.05), on_step=lambda _: seen.append(diloco.figures),
        )  # fmt: skip
        await diloco.run(steps=4)
        # The first has what a view begins with, the second a comparison of states, and no other follows the last.
        shares.append(seen[2].since(seen[1]).communication_share)

    between = Conditions(latency_ns=25_000_000, loss=0.001, bytes_per_second=25_000_000, queue_bytes=1 << 20)
    outcome = Simulation(worker, seed=3, settings=Settings(ranks=4, limit=100.0, conditions=between)).run()
    assert outcome.error is None, outcome.error
    assert len(shares) == 4
    assert max(shares) < 0.004, shares  # 20 ms of 5 s; an exchange takes 50, what ends a round 25, its vote 50


class WithRunningMeans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 1)


def in_halves() -> nn.Module:
    return of_layers().to(torch.bfloat16)


def in_part(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters()][:2], lr=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every and fragments are 1 or more"),
        ({"every": 4, "delay": 5}, "a delay of 5 inner steps is longer than a fragment's turn, which is 4"),
        ({"fragments": 7}, "7 fragments have no turn each in 6 inner steps"),
        ({"every": 20, "fragments": 7}, "7 fragments of 6 parameters"),
        ({"mix": 0.5}, "mix is 0 to 1, and needs a delay"),
        ({"mix": 1.5, "delay": 1}, "mix is 0 to 1, and needs a delay"),
        ({"feedback": 1.5}, "feedback is True, False, or 0 to 1, not 1.5"),
        ({"backup": -1}, "backup is 0 or more"),
        ({"wire": "int3"}, "wire format 'int3' is not known"),
        ({"shards": None}, "how many logical shards"),
        ({"make": WithRunningMeans}, "norm.running_mean, norm.running_var"),
        ({"make": in_halves}, "what is trained is float32"),
        ({"inner": in_part}, "SGD has other parameters than those of the model"),
        ({"outer": in_part}, "SGD has other parameters than those of the model"),
        ({"inner": lambda model: torch.optim.LBFGS(model.parameters())}, "LBFGS cannot be used here"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_sent(options: dict[str, Any], words: str) -> None:
    async def worker(job: Job, _: Simulation) -> None:
        given: dict[str, Any] = {"every": EVERY, "fragments": 1, "delay": 0, "shards": WORKERS} | options
        model = given.pop("make", of_layers)()
        inner, outer = given.pop("inner", adam)(model), given.pop("outer", nesterov)(model)
        with pytest.raises(LocalError, match=words):
            DiLoCo(job, model, inner, outer, loss_of, **given)

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=1, limit=100.0)).run()
    assert outcome.error is None, outcome.error


def test_local_sgd_is_an_outer_optimizer_that_takes_the_mean_as_it_is() -> None:
    ends: list[dict[str, torch.Tensor]] = []

    async def worker(job: Job, _: Simulation) -> None:
        model = of_layers()
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        diloco = DiLoCo(job, model, adam(model), outer, loss_of, shards=2, every=EVERY, fragments=1, delay=0)
        await diloco.run(steps=1)
        ends.append({name: value.detach().clone() for name, value in model.named_parameters()})

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=2, limit=100.0)).run()
    assert outcome.error is None, outcome.error
    alone = [of_layers(), of_layers()]
    for number, model in enumerate(alone):
        optimizer = adam(model)
        for step in range(1, EVERY + 1):
            optimizer.zero_grad()
            x, y = samples(number, step)
            functional.mse_loss(model(x)[:, 0], y).backward()
            optimizer.step()
    one, other = (dict(model.named_parameters()) for model in alone)
    for name, value in ends[0].items():
        assert torch.allclose(value, (one[name] + other[name]) / 2, atol=1e-6)
