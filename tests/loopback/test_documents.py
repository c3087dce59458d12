"""What the documents print runs as they print it: each block of Python, each command, each name of a variable.

A block that is a program of its own runs as one. The others are pieces of a program: what they leave out (a job, a
tensor, a training loop) is made here and nothing in them is changed. A block that nobody runs fails the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_processes import LOST_AFTER

import quicoll
import quicoll_transport
from quicoll import checkpoint
from quicoll.cli.main import main
from quicoll.membership.serving import serve
from quicoll.testing import cluster
from quicoll_transport.security.authority import create_authority, issue

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "certs" / "README.md",
    *sorted((ROOT / "examples").rglob("README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SOURCES = [str(Path(package.__file__ or "").resolve().parent.parent) for package in (quicoll, quicoll_transport)]

INHERITED = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}

Run = Callable[[str, Path], Awaitable[None]]

pytestmark = pytest.mark.loopback


def blocks() -> dict[str, str]:
    """By document and the first words that are no import."""
    found = {}
    for document in DOCUMENTS:
        for block in re.findall(r"^```python\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE):
            first = next(line for line in block.splitlines() if line and not line.startswith(("import ", "from ")))
            found[f"{document.relative_to(ROOT)}: {first[:60]}"] = block
    return found


def of_page(document: str, number: int = 0) -> str:
    """A block of a page, by its number there."""
    return [block for name, block in blocks().items() if name.startswith(f"{document}:")][number]


async def piece(block: str, **names: Any) -> dict[str, Any]:
    """Run statements that may await, with these names; the names that they made."""
    scope: dict[str, Any] = dict(names)
    code = f"async def piece():\n{textwrap.indent(block, '    ')}\n    return locals()"
    exec(compile(code, "<document>", "exec"), scope)  # noqa: S102 - that is the test
    made: dict[str, Any] = await scope["piece"]()
    return made


def program(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**INHERITED, "PYTHONPATH": os.pathsep.join(SOURCES), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# What comes before a block of tests for pytest, by the first words of the block.
SCENARIOS = {
    "README.md: @quicoll.sim.scenario(seeds=200, ranks=4)": "import quicoll\nfrom my_package import train\n",
    "examples/partition_safety/README.md: def split(sim):": "import line_fit\nimport quicoll\n",
    "docs/howto/pytest.md: @quicoll.sim.scenario(seeds=20, ranks=3)": "",
    "docs/simulation.md: def split(sim):": "import my_package\n",
    "docs/simulation.md: @quicoll.sim.scenario(seeds=100, ranks=3)": "",
    "docs/tutorials/split.md: def split(sim):": "",
    "docs/tutorials/split.md: async def train(job, epochs):": "",
}


async def scenarios(block: str, directory: Path) -> None:
    """With one seed each."""
    (name,) = (name for name in SCENARIOS if blocks()[name] == block)
    (directory / "my_package.py").write_text(TRAIN)
    (directory / "fit.py").write_text(of_page("docs/tutorials/asyncio_loop.md"))
    (directory / "test_of_page.py").write_text(SCENARIOS[name] + block)
    (directory / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"
    )
    search = os.pathsep.join([*SOURCES, str(directory), str(ROOT / "examples" / "partition_safety")])
    options = ["-v", "-p", "quicoll.pytest_plugin", "-p", "no:cacheprovider", "--sim-seed", "1"]
    said = program("-m", "pytest", *options, cwd=directory, PYTHONPATH=search)
    assert said.count(" PASSED") == block.count("@quicoll.sim.scenario") > 0, said


# A step takes its time, as any real one: ranks that do nothing but commit would do thousands of steps while they wait
# for one that is away.
TRAIN = """
import asyncio
import numpy as np
import quicoll

async def train(job, steps):
    job.register_state(dict, lambda state: None)
    while job.committed_step < steps:
        try:
            async with job.step():
                await asyncio.sleep(0.1)
                await job.group.all_reduce(np.ones(3))
        except quicoll.StepAborted:
            pass
"""


async def script(block: str, directory: Path) -> None:
    (directory / "allreduce.py").write_text(block)
    said = program(
        "-m", "quicoll.cli.main", "run", "-n", "2", "--lost-after", LOST_AFTER, "allreduce.py", cwd=directory
    )
    assert sorted(line for line in said.splitlines() if "rank " in line) == [
        "[worker-0] rank 0 of 2: [3. 3. 3.]",
        "[worker-1] rank 1 of 2: [3. 3. 3.]",
    ]


async def alone(block: str, directory: Path) -> None:
    (directory / "block.py").write_text(block)
    program("-W", "error", "block.py", cwd=directory)


async def training(block: str, directory: Path) -> None:
    """Three ranks, eight shards, five steps: equal weights, and those of plain numpy."""

    def gradient(shard: int, step: int) -> np.ndarray:
        return np.random.default_rng([shard, step]).standard_normal(4, np.float32)

    async def rank(job: quicoll.Job) -> bytes:
        weights = np.zeros(4, np.float32)
        await piece(
            block,
            job=job,
            quicoll=quicoll,
            steps=5,
            gradient=gradient,
            save=lambda: {"weights": weights},
            load=lambda state: np.copyto(weights, state["weights"]),
            apply=lambda mean: np.add(weights, mean, out=weights),
        )
        np.testing.assert_allclose(weights, sum(gradient(s, n) for s in range(8) for n in range(1, 6)) / 8, rtol=1e-5)
        return weights.tobytes()

    async with cluster(3) as jobs:
        assert len(set(await asyncio.gather(*map(rank, jobs)))) == 1


async def in_a_test(block: str, directory: Path) -> None:
    made = await piece(block, quicoll=quicoll)
    assert len(made["jobs"]) == 3


async def calls(block: str, directory: Path) -> None:
    async with cluster(3) as jobs:
        gradients = [np.ones(2), np.ones((2, 2), np.float32)]
        for made in await asyncio.gather(*(piece(block, job=job, x=np.ones(2), gradients=gradients) for job in jobs)):
            assert made["total"].tolist() == [3.0, 3.0]
            assert [total.tolist() for total in made["totals"]] == [[3.0, 3.0], [[3.0, 3.0], [3.0, 3.0]]]


async def fed_back(block: str, directory: Path) -> None:
    x = np.linspace(-1, 1, 9, dtype=np.float32)
    async with cluster(2) as jobs:
        for made in await asyncio.gather(*(piece(block, job=job, np=np, x=x) for job in jobs)):
            assert np.abs(made["total"] - 2 * x).max() <= 4 / 251
            assert 0 < np.abs(made["lost"]).max() <= 1 / 251


async def sub_groups(block: str, directory: Path) -> None:
    async with cluster(6, timeout=60.0) as jobs:
        made = await asyncio.gather(*(piece(block, job=job, x=np.ones(2)) for job in jobs))
    assert [each["row"].ranks for each in made] == [(0, 1, 2, 3)] * 4 + [(4, 5)] * 2
    columns = [(4, 0), (5, 1), (2,), (3,), (4, 0), (5, 1)]  # ordered by -rank
    assert [each["column"].ranks for each in made] == columns
    assert [each["total"].tolist() for each in made] == [[4.0, 4.0]] * 4 + [[2.0, 2.0]] * 2
    assert [None if each["first"] is None else each["first"].ranks for each in made] == (
        [(0, 1)] * 2 + [None] * 2 + [(4, 5)] * 2
    )


async def stragglers(block: str, directory: Path) -> None:
    async with cluster(3, straggler_after=0.05) as jobs:
        early = [job.group.barrier() for job in jobs[:2]]
        await asyncio.wait(map(asyncio.ensure_future, early), timeout=0.3)
        await asyncio.gather(*early, jobs[2].group.barrier())
        assert (await piece(block, job=jobs[0]))["row"].node == "worker-2"


async def a_bad_line(block: str, directory: Path) -> None:
    scope: dict[str, Any] = {}
    exec(block, scope)  # noqa: S102 - that is the test
    await scope["test_my_training_survives_a_bad_line"]()


async def bad_memory(block: str, directory: Path) -> None:
    from quicoll.testing import corrupt_payloads
    from quicoll_transport.faults.compose import PayloadCorrupt

    async def work(jobs: list[quicoll.Job]) -> None:
        for _ in range(40):
            await asyncio.gather(*(job.group.all_reduce(np.ones(1000)) for job in jobs))

    async with cluster(2) as jobs:
        names = {"jobs": jobs, "corrupt_payloads": corrupt_payloads, "PayloadCorrupt": PayloadCorrupt, "work": work}
        await piece(block.replace("    ...\n", "    await work(jobs)\n"), **names)


async def states(block: str, directory: Path) -> None:
    """Two ranks that forgot their seed."""
    import torch

    async def rank(job: quicoll.Job) -> str:
        model = torch.nn.Linear(3, 2)
        names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "sampler": object()}
        await piece(block, job=job, **names)
        return await job.check_state()

    async with cluster(2) as jobs:
        assert len(set(await asyncio.gather(*map(rank, jobs)))) == 1


async def sampled(block: str, directory: Path) -> None:
    """The mean of all samples, three times; two ranks, and a last step of an epoch with fewer samples than parts."""
    points = np.arange(37.0)[:, None] * np.ones(2)
    held = [np.zeros(2) for _ in range(2)]

    def gradient(some: Any) -> Any:
        assert len(some), "a part without samples has no gradient"
        return some.mean(axis=0)

    async with cluster(2) as jobs:
        await asyncio.gather(
            *(
                piece(block, job=job, points=points, weights=weights, gradient=gradient)
                for job, weights in zip(jobs, held, strict=True)
            )
        )
        assert [job.committed_step for job in jobs] == [9, 9]
    assert held[0].tobytes() == held[1].tobytes()


async def divided(block: str, directory: Path) -> None:
    """Two ranks, each with half of the moments: the weights of one alone."""
    ends = []
    for ranks in (1, 2):
        held = [np.zeros(100, np.float32) for _ in range(ranks)]

        def gradient(weights: Any, shard: int) -> Any:
            return weights - np.sin(np.arange(100, dtype=np.float32) * np.float32(shard + 1))

        async with cluster(ranks) as jobs:
            await asyncio.gather(
                *(
                    piece(
                        block, job=job, weights=w, gradient=gradient, save=lambda w=w: {"w": w}, load=lambda state: None
                    )
                    for job, w in zip(jobs, held, strict=True)
                )
            )
        ends += [weights.tobytes() for weights in held]
    assert len(set(ends)) == 1
    assert any(ends[0])


async def tiers(block: str, directory: Path) -> None:
    held = [np.zeros(3) for _ in range(2)]

    async def rank(job: quicoll.Job, weights: Any) -> list[str]:
        names = {"np": np, "quicoll": quicoll, "gradient": np.ones_like, "weights": weights}
        made = await piece(block, job=job, **names)
        return [*job.tiers.current.active, *job.tiers.current.cold, *made["pieces"]]

    async with cluster(2) as jobs:
        said = await asyncio.gather(*map(rank, jobs, held))
    assert said == [["dense", "experts", "of worker-0", "of worker-1"]] * 2
    assert held[0].tobytes() == held[1].tobytes()


async def a_worker(block: str, directory: Path) -> None:
    import torch

    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            return torch.full((3,), index / 40), index % 2

    async def rank(job: quicoll.Job) -> Any:
        return (await piece(block, job=job, model=torch.nn.Linear(3, 2), dataset=Data()))["result"]

    with contextlib.chdir(directory):
        async with cluster(2) as jobs:
            one, other = await asyncio.gather(*map(rank, jobs))
    assert (one.steps, one.digest) == (9, other.digest)
    assert quicoll.checkpoint.of_step(directory / "checkpoints", 9).step == 9


async def in_rounds(block: str, directory: Path) -> None:
    import torch

    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Any:
            return torch.full((3,), index / 100), index % 2

    async def rank(job: quicoll.Job) -> Any:
        return (await piece(block, job=job, model=torch.nn.Linear(3, 2), dataset=Data()))["result"]

    with contextlib.chdir(directory):
        async with cluster(2) as jobs:
            one, other = await asyncio.gather(*map(rank, jobs))
    assert (one.steps, one.digest) == (4, other.digest)
    assert quicoll.checkpoint.of_step(directory / "checkpoints", 4).step == 4


async def without_asyncio(block: str, directory: Path) -> None:
    (directory / "mean.py").write_text(block)
    said = program("-m", "quicoll.cli.main", "run", "-n", "2", "--lost-after", LOST_AFTER, "mean.py", cwd=directory)
    assert sorted(line for line in said.splitlines() if " after step " in line) == [
        "[worker-0] rank 0: 3.500 after step 30",
        "[worker-1] rank 1: 3.500 after step 30",
    ]


async def by_name(block: str, directory: Path) -> None:
    """Under torchrun, with nothing else. From a checkout the backend is known by its import."""
    head = "import torch\nimport torch.distributed as dist\nimport quicoll.torch_backend\n"
    # One write for a line: torchrun starts Python unbuffered, and both ranks write to one pipe.
    tail = (
        "x = torch.ones(2)\ndist.all_reduce(x)\nprint(f'sum {x.tolist()}\\n', end='')\ndist.destroy_process_group()\n"
    )
    (directory / "train.py").write_text(head + block + tail)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    said = program(*command, cwd=directory, QUICOLL_LOST_AFTER=LOST_AFTER)
    assert said.count("sum [2.0, 2.0]") == 2


async def divided_loop(block: str, directory: Path) -> None:
    """Two ranks; the parameters in the end are those of the loop without `divide`, on one."""

    def looped(made: str, ranks: int) -> set[str]:
        code = f"""
import quicoll.blocking, quicoll.checkpoint, quicoll.torch, quicoll.train
import torch
torch.manual_seed(1)
torch.set_num_threads(1)
dataset = torch.utils.data.TensorDataset(torch.randn(256, 16), torch.arange(256) % 4)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with quicoll.blocking.join() as job:
{textwrap.indent(made, "    ")}
    for step in training.epochs(1):
        with step:
            for x, y in step.shards:
                step.backward(torch.nn.functional.cross_entropy(model(x), y))
    print(f"{{len(optimizer.state)}} states, digest {{quicoll.checkpoint.digest(model.state_dict())}}")
"""
        (directory / "loop.py").write_text(code)
        said = program("-m", "quicoll.cli.main", "run", "-n", str(ranks), "--seed", "7", "loop.py", cwd=directory)
        return {line.split("] ")[-1] for line in said.splitlines() if "digest" in line}

    (alone,) = looped("training = quicoll.torch.Training(job, model, optimizer, dataset, batch_size=64, shards=8)", 1)
    assert looped(block, 2) == {alone.replace("2 states", "0 states")}


async def hooked(block: str, directory: Path) -> None:
    code = f"""
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
import quicoll.torch
dist.init_process_group("quicoll", init_method="file://{directory}/store", rank=0, world_size=1)
net = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
batches = [(torch.randn(16, 4), torch.zeros(16, dtype=torch.int64)) for _ in range(2)]
first = net.weight.detach().clone()
def loss_of(model, x, y):
    return cross_entropy(model(x), y)
{block}
assert not torch.equal(first, net.weight)
dist.destroy_process_group()
"""
    program("-c", code, cwd=directory, QUICOLL_LOST_AFTER=LOST_AFTER)


async def routed(block: str, directory: Path) -> None:
    """Rows that go to experts and come back, on two ranks."""
    code = f"""
import asyncio
import torch
from quicoll.testing import cluster
from quicoll.torch import functional
counts, expert = [1, 2], torch.square
def one(group):
    x = torch.arange(6.0).reshape(3, 2).requires_grad_()
{textwrap.indent(block, "    ")}
    y.sum().backward()
    assert torch.equal(y, x.detach() ** 2) and torch.equal(x.grad, 2 * x.detach())
async def main():
    async with cluster(2, lost_after={LOST_AFTER}) as jobs:
        await asyncio.gather(*(asyncio.to_thread(one, job.group) for job in jobs))
asyncio.run(main())
"""
    program("-c", code, cwd=directory)


async def mixed(block: str, directory: Path) -> None:
    code = f"""
import asyncio
import torch
from torch import nn
import quicoll.torch
from quicoll.testing import cluster
torch.manual_seed(0)
router, given = nn.Linear(32, 8), torch.randn(6, 32)
all_experts = [nn.Linear(32, 32) for _ in range(8)]
def one(group):
    x = given[3 * group.rank : 3 * group.rank + 3]
{textwrap.indent(block.replace("[nn.Linear(32, 32) for _ in range(8)]", "all_experts"), "    ")}
    return y
async def main():
    async with cluster(2, lost_after={LOST_AFTER}) as jobs:
        found = torch.cat(await asyncio.gather(*(asyncio.to_thread(one, job.group) for job in jobs)))
    best = torch.topk(router(given), 2)
    for row, chosen, share, y in zip(given, best.indices.tolist(), torch.softmax(best.values, 1), found):
        torch.testing.assert_close(y, share[0] * all_experts[chosen[0]](row) + share[1] * all_experts[chosen[1]](row))
asyncio.run(main())
"""
    program("-c", code, cwd=directory)


async def computed_again(block: str, directory: Path) -> None:
    """A block of two ranks whose gradients are those of the layers that it was made of."""
    code = f"""
import asyncio
import torch
from torch import nn
import quicoll.torch
from quicoll.testing import cluster
from quicoll.torch.parallel import ParallelMLP
torch.manual_seed(0)
up, down, given = nn.Linear(8, 12), nn.Linear(12, 8), torch.randn(3, 8)
def one(group):
    block, x = ParallelMLP(up, down, group), given.clone().requires_grad_()
{textwrap.indent(block, "    ")}
    y.square().sum().backward()
    return x.grad
async def main():
    async with cluster(2) as jobs:
        found = await asyncio.gather(*(asyncio.to_thread(one, job.group) for job in jobs))
    x = given.clone().requires_grad_()
    down(nn.functional.gelu(up(x))).square().sum().backward()
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], x.grad)
asyncio.run(main())
"""
    program("-c", code, cwd=directory)


async def meshed(block: str, directory: Path) -> None:
    code = f"""
import quicoll.blocking
import quicoll.torch
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential()
model.up, model.down, x = nn.Linear(8, 12), nn.Linear(12, 8), torch.randn(3, 8)
y = model(x)
with quicoll.blocking.join() as job:
{textwrap.indent(block, "    ")}
    print(f"rank {{job.rank}} has", *(tuple(each.to_local().shape) for each in model.parameters()))
    torch.testing.assert_close(model(x), y)
"""
    (directory / "mesh.py").write_text(code)
    said = program("-m", "quicoll.cli.main", "run", "-n", "4", "mesh.py", cwd=directory)
    assert sorted(line.split("] ")[-1] for line in said.splitlines() if " has " in line) == [
        f"rank {rank} has (3, 8) (3,) (4, 6) (4,)" for rank in range(4)
    ]


async def checkpoints(block: str, directory: Path) -> None:
    """Two ranks, then three that go on from what these have saved."""

    async def rank(job: quicoll.Job, steps: int) -> int:
        names = {"quicoll": quicoll, "checkpoint": checkpoint, "np": np}
        await piece(block, job=job, directory=directory, steps=steps, **names)
        return job.committed_step

    for world, steps in ((2, 7), (3, 12)):
        async with cluster(world) as jobs:
            assert {*await asyncio.gather(*(rank(job, steps) for job in jobs))} == {steps}
        found = checkpoint.latest(directory)
        assert found is not None
        assert (found.step, found.tensors["rows"].sum()) == (steps, 64 * 4 * steps)


async def own_rule(block: str, directory: Path) -> None:
    made = await piece(block)
    async with cluster(2) as jobs, quicoll.testing.disturb_network(jobs[0], made["DropLarge"]()) as installed:
        await asyncio.gather(*(job.group.all_reduce(np.ones(10)) for job in jobs))
    assert installed.stats.seen > 0


async def overlapping(block: str, directory: Path) -> None:
    weights = {}

    async def rank(job: quicoll.Job) -> None:
        held = weights[job.rank] = np.zeros(3)
        names = {"read": lambda number: number, "gradients": lambda batch: np.full(3, float(batch + job.rank))}
        await piece(block, job=job, steps=5, apply=lambda mean: np.add(held, mean, out=held), **names)

    async with cluster(2) as jobs:
        await asyncio.gather(*(rank(job) for job in jobs))
    assert [held.tolist() for held in weights.values()] == [[17.5] * 3] * 2


async def certificate(block: str, directory: Path) -> None:
    """After the commands above it on that page."""
    for line in commands(ROOT / "docs" / "howto" / "certificates.md"):
        with contextlib.chdir(directory), pytest.raises(SystemExit) as ended:
            main(shlex.split(line)[1:])
        assert ended.value.code == 0, line
    await alone(block, directory)


async def in_order(block: str, directory: Path) -> None:
    await piece(block)


async def one_process(block: str, directory: Path) -> None:
    (directory / "plain.py").write_text(block)
    said = program("plain.py", cwd=directory)
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", said, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]


async def any_number(block: str, directory: Path) -> None:
    """The digest of two ranks is that of one."""
    (directory / "loop.py").write_text(block)
    digests = set()
    for ranks in (1, 2):
        said = program(*RUN, "-n", ranks, "--seed", "7", "--lost-after", LOST_AFTER, "loop.py", cwd=directory)
        found = re.findall(r"digest (\w+)$", said, re.MULTILINE)
        assert len(found) == ranks
        digests.update(found)
    assert len(digests) == 1


async def fitted(block: str, directory: Path) -> None:
    (directory / "fit.py").write_text(block)
    said = program(*RUN, "-n", 3, "--lost-after", LOST_AFTER, "fit.py", cwd=directory, STEPS="30")
    ends = re.findall(r"after step 30: \[.*\] (\w+)$", said, re.MULTILINE)
    assert len(ends) == 3
    assert len(set(ends)) == 1


async def grown_and_shrunk(block: str, directory: Path) -> None:
    """The commands of the page, one after the other, while the program runs."""
    (directory / "long.py").write_text(block)
    first, *asked = (shlex.split(line)[1:] for line in commands(ROOT / "docs" / "tutorials" / "scaling.md"))
    answers, said = ask_while_it_runs(first, asked, directory)
    assert "has 4 ranks: worker-0, worker-1, worker-2, worker-3" in answers[0]
    assert "has 2 ranks: worker-0, worker-1" in answers[1]
    assert "has 2 ranks: " in answers[2]
    assert "worker-0" not in answers[2].splitlines()[-1]
    assert "of 4 at step" in said


def ask_while_it_runs(run: list[str], asked: list[list[str]], directory: Path) -> tuple[list[str], str]:
    """Start a run of this host, ask it for what is to be asked, and end it; the answers and what its workers said."""
    command = [sys.executable, "-m", "quicoll.cli.main", *run]
    environment = {**INHERITED, "PYTHONPATH": os.pathsep.join(SOURCES), "QUICOLL_LOST_AFTER": LOST_AFTER}
    said: list[str] = []
    with subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            said.append(line)
            if " is rank " in line:
                break
        try:
            answers = [
                program("-m", "quicoll.cli.main", *words, "--run", running.pid, cwd=directory) for words in asked
            ]
        finally:
            running.terminate()
        said += running.stdout  # a line for each change of the ranks: less than the pipe holds
    assert running.returncode == 128 + signal.SIGTERM, "".join(said)
    return answers, "".join(said)


RUN = ("-m", "quicoll.cli.main", "run")
RECIPES = "docs/howto/"


def recipes() -> list[str]:
    """The blocks of the pages on a torch loop put together to two programs."""
    head = """
import quicoll.blocking
import quicoll.torch
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
torch.set_num_threads(1)
points = torch.randn(515, 16)
dataset = TensorDataset(points, (points @ torch.randn(16, 4)).argmax(1))
"""
    tail = 'print(f"after {step.number} steps of {job.world_size}: {step.loss:.4f}, digest {training.digest()}")\n'

    def page(name: str, number: int = 0) -> str:
        return of_page(f"{RECIPES}{name}.md", number)

    shards = "        for x, y in step.shards:\n"
    noisy = shards + textwrap.indent(page("dropout", 1), " " * 12)
    loops = [
        page("dropout")
        + "with quicoll.blocking.join() as job:\n"
        + textwrap.indent(
            page("optimizer")
            + page("scheduler").replace("total_steps=16", "total_steps=18")
            + page("accumulation").replace(shards, noisy)
            + tail,
            "    ",
        ),
        "with quicoll.blocking.join() as job:\n"
        + textwrap.indent(page("batchnorm") + page("mixed_precision") + tail, "    "),
    ]
    return [head + loop for loop in loops]


async def recipe(block: str, directory: Path) -> None:
    """It is in one of the programs, which `test_the_recipes_for_a_torch_loop_go_together` runs."""
    lines = {line.strip() for loop in recipes() for line in loop.splitlines()}
    missing = [line for line in block.splitlines() if line.strip() not in lines and "total_steps" not in line]
    assert missing == []


async def one_rank(block: str, directory: Path) -> None:
    """The other ranks are elsewhere; here it is alone."""
    create_authority(directory / "certs", job="alpha")
    issue(directory / "certs", role="coordinator", node="coordinator")
    issue(directory / "certs", role="worker", node="notebook")
    heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def observe(event: quicoll.Event) -> None:
        if event.kind == "listening" and not heard.done():
            heard.set_result(event.fields["address"])

    options = {"job": "alpha", "world_size": 1, "journal": directory / "journal.db", "listen": "127.0.0.1:0"}
    serving = asyncio.create_task(serve(certs=directory / "certs", observer=observe, **options))
    await asyncio.wait({serving, heard}, return_when=asyncio.FIRST_COMPLETED)
    with contextlib.chdir(directory):
        made = await piece(block, quicoll=quicoll, np=np, address=await heard)
    assert made["total"].tolist() == [1.0, 1.0, 1.0]
    serving.cancel()
    await asyncio.wait({serving})


async def cells(block: str, directory: Path) -> None:
    made = await piece(block)
    assert [total.tolist() for total in made["totals"]] == [[6.0, 6.0]] * 3


RUNS: dict[str, Run] = {
    "README.md: async def main():": script,
    "README.md: job.register_state(save, load)  # how a rank that was away g": training,
    "README.md: async with quicoll.testing.cluster(3, lost_after=0.6) as job": in_a_test,
    "README.md: @quicoll.sim.scenario(seeds=200, ranks=4)": scenarios,
    "examples/partition_safety/README.md: def split(sim):": scenarios,
    "docs/checkpoints.md: saver = quicoll.train.Checkpointer(job, directory, every=5)": checkpoints,
    "docs/collectives.md: total = await job.group.all_reduce(x)  # one after the other": calls,
    "docs/collectives.md: lost = np.zeros_like(x)  # one for each leaf, from the first": fed_back,
    "docs/collectives.md: row = await job.group.split(job.rank // 4)  # ranks of one c": sub_groups,
    "docs/collectives.md: for row in job.stragglers():": stragglers,
    "docs/explanation/same_bits.md: a, b, c = np.float32(1e8), np.float32(-1e8), np.float32(1.0)": in_order,
    "docs/faults.md: MS = 1_000_000  # rules count in nanoseconds": a_bad_line,
    "docs/faults.md: async with corrupt_payloads(jobs[1], PayloadCorrupt(min_byte": bad_memory,
    "docs/faults.md: class DropLarge:": own_rule,
    "docs/howto/accumulation.md: for step in training.epochs(2):": recipe,
    "docs/howto/batchnorm.md: model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64),": recipe,
    'docs/howto/certificates.md: credentials = Credentials.from_directory("certs/train", role': certificate,
    "docs/howto/diloco.md: sampler = quicoll.data.Sampler(len(dataset), batch_size=16, ": in_rounds,
    "docs/howto/dropout.md: model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropo": recipe,
    'docs/howto/dropout.md: noise = step.seed.derive("noise", step.shard).generator("tor': recipe,
    "docs/howto/mixed_precision.md: for step in training.epochs(2):": recipe,
    "docs/howto/notebooks.md: opened = contextlib.AsyncExitStack()": cells,
    'docs/howto/notebooks.md: job = await quicoll.connect(coordinator=address, job="alpha"': one_rank,
    "docs/howto/optimizer.md: decayed = [p for p in model.parameters() if p.dim() > 1]": recipe,
    "docs/howto/pytest.md: @quicoll.sim.scenario(seeds=20, ranks=3)": scenarios,
    "docs/howto/scheduler.md: scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, m": recipe,
    "docs/internals/simulation.md: disk = SimDisk(random.Random(7), now_ns=lambda: 0)  # has th": alone,
    "docs/membership.md: while job.committed_step < steps:": overlapping,
    "docs/membership.md: def save():": states,
    "docs/messages.md: async def main():": alone,
    "docs/simulation.md: def split(sim):": scenarios,
    "docs/simulation.md: @quicoll.sim.scenario(seeds=100, ranks=3)": scenarios,
    'docs/tiers.md: cold = job.shared_state("archive", consistency="eventual")': tiers,
    "docs/torch.md: training = quicoll.torch.Training(": divided_loop,
    "docs/torch.md: model = DistributedDataParallel(net)": hooked,
    "docs/torch.md: tokens, came = functional.all_to_all(x, group, counts=counts": routed,
    "docs/torch.md: experts = quicoll.torch.Experts([nn.Linear(32, 32) for _ in ": mixed,
    'docs/torch.md: mesh = quicoll.torch.device_mesh(job.group, (2, 2), ("dp", "': meshed,
    "docs/torch.md: y = quicoll.torch.recomputed(block, x, group=group, check=Tr": computed_again,
    'docs/torch_backend.md: dist.init_process_group("quicoll")  # instead of "gloo"': by_name,
    "docs/training.md: sampler = quicoll.data.Sampler(len(points), batch_size=16, s": sampled,
    'docs/training.md: moments = quicoll.Sharded(len(weights), {"m": "float32", "v"': divided,
    "docs/training.md: task = quicoll.train.TorchTask(": a_worker,
    "docs/training.md: class Mean:": without_asyncio,
    "docs/tutorials/asyncio_loop.md: TRUE = np.array([2.0, -1.0, 0.5], np.float32)": fitted,
    "docs/tutorials/scaling.md: with quicoll.blocking.join() as job:": grown_and_shrunk,
    "docs/tutorials/split.md: def split(sim):": scenarios,
    "docs/tutorials/split.md: async def train(job, epochs):": scenarios,
    "docs/tutorials/torch_loop.md: # plain.py": one_process,
    "docs/tutorials/torch_loop.md: # loop.py": any_number,
}


def test_every_block_is_run() -> None:
    assert list(blocks()) == list(RUNS)


# Those that start processes.
STARTS = {
    script,
    alone,
    without_asyncio,
    scenarios,
    by_name,
    divided_loop,
    hooked,
    routed,
    mixed,
    computed_again,
    meshed,
    one_process,
    any_number,
    fitted,
    grown_and_shrunk,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.warm("torch")] * (run in STARTS)) for name, run in RUNS.items()]
)
async def test_a_block_runs_as_it_is_printed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await RUNS[name](blocks()[name], tmp_path)


# -- what the recipes and the tutorials say beside their blocks --------------------------------------------------------


@pytest.mark.warm("torch")
@pytest.mark.parametrize("number", [0, 1])
def test_the_recipes_for_a_torch_loop_go_together_with_the_same_bits_on_one_rank_and_two(
    number: int, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(recipes()[number])
    ends = set()
    for ranks in (1, 2):
        said = program(*RUN, "-n", ranks, "--seed", "7", "--lost-after", LOST_AFTER, "loop.py", cwd=tmp_path)
        found = re.findall(r"after (\d+) steps of (\d): (.*)$", said, re.MULTILINE)
        assert [int(world) for _, world, _ in found] == [ranks] * ranks
        ends |= {(steps, end) for steps, _, end in found}
    assert len(ends) == 1, ends


@pytest.mark.warm("torch")
def test_the_loop_that_the_tutorial_breaks_is_caught_as_it_prints(tmp_path: Path) -> None:
    """By the tutorial's own command, with the lines of the page but for the numbers, which are of a version."""
    page = (ROOT / "docs" / "tutorials" / "split.md").read_text()
    assert "    pytest -x test_fit.py\n" in page

    def told(text: str) -> list[str]:
        found = [line.strip() for line in text.splitlines() if "VERDICT" in line or "Run it again:" in line]
        return list(dict.fromkeys(re.sub(r"\d+(\.\d+)?", "N", line) for line in found))  # in CI pytest says it again

    whole, careless = of_page("docs/tutorials/asyncio_loop.md"), "                weights[:] -= 0.1 * mean\n"
    broken = re.sub(r" {16}def apply\(.*?on_commit\(apply\)\n", careless, whole, flags=re.DOTALL)
    assert careless in broken
    assert "apply" not in broken
    (tmp_path / "fit.py").write_text(broken)
    (tmp_path / "test_fit.py").write_text(of_page("docs/tutorials/split.md"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    options = ["-p", "quicoll.pytest_plugin", "-p", "no:cacheprovider", "-x", "-k", "chance"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env={**INHERITED, "PYTHONPATH": os.pathsep.join([*SOURCES, str(tmp_path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert told(done.stdout) == told(page)


@pytest.mark.warm("torch")
def test_the_commands_of_two_machines_by_hand_do_what_the_page_says(tmp_path: Path) -> None:
    """One after the other, both machines being this one."""
    page = (ROOT / "docs" / "tutorials" / "two_machines.md").read_text()
    lines = [line.strip() for line in re.findall(r"^    .*$", page, re.MULTILINE)]
    workers = [line for line in lines if line.endswith(" python fit.py")]
    (tmp_path / "fit.py").write_text(of_page("docs/tutorials/asyncio_loop.md"))
    environment = {**INHERITED, "PYTHONPATH": os.pathsep.join(SOURCES), "STEPS": "30"}

    def start(words: list[str], **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    for line in lines:
        if line.startswith("quicoll certs "):
            program("-m", "quicoll.cli.main", *shlex.split(line)[1:], cwd=tmp_path)
    (line,) = (line for line in lines if line.startswith("quicoll coordinator "))
    words = shlex.split(line.replace("10.0.0.1:4433", "127.0.0.1:0"))[1:]
    with start(["-m", "quicoll.cli.main", *words, "--lost-after", LOST_AFTER]) as coordinator:
        try:
            assert coordinator.stdout is not None
            address = next(found[0] for said in coordinator.stdout if (found := re.search(r"127\.0\.0\.1:\d+", said)))
            ranks = []
            for worker in workers:
                *variables, _, script = worker.replace("10.0.0.1:4433", address).split()
                ranks.append(start([script], **dict(variable.split("=", 1) for variable in variables)))
            said = [rank.communicate()[0] for rank in ranks]
        finally:
            coordinator.terminate()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    ends = {found for each in said for found in re.findall(r"after step 30: .* (\w+)$", each, re.MULTILINE)}
    assert len(said) == 2
    assert len(ends) == 1, said
    assert coordinator.returncode == 0


# -- commands, variables, links --------------------------------------------------------------------------------------


def commands(document: Path) -> list[str]:
    """Lines of `quicoll ...` in indented blocks, without what is set before them and said behind them."""
    found = []
    for line in document.read_text().splitlines():
        words = re.fullmatch(r"    (?:[A-Z_]+=\S+ )*(quicoll .*?)(?: {2,}#.*)?", line)
        if words:
            found.append(words[1])
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_has_these_options(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in commands(document):
        words = shlex.split(line)[1:]
        at = 2 if words[0] in ("audit", "certs") else 1
        with pytest.raises(SystemExit) as ended:  # all is parsed before help is printed
            main([*words[:at], "--help", *words[at:]])
        assert ended.value.code == 0, (line, capsys.readouterr().err)


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_the_text_names_is_there(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in sorted(set(re.findall(r"`quicoll ([a-z]+(?:-[a-z]+)*)\b", document.read_text()))):
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0, name


def test_every_variable_that_the_documents_name_is_read_by_something() -> None:
    read = "\n".join(
        path.read_text()
        for folder in ("quicoll", "transport", "tests", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
    )
    settings = {f"QUICOLL_{name.upper()}" for name in quicoll.Config.resolve(environ={}).sources}
    for document in DOCUMENTS:
        for name in sorted(set(re.findall(r"\bQUICOLL_[A-Z_]*[A-Z]\b", document.read_text()))):
            assert name in settings or f'"{name}"' in read, f"{document.name}: {name}"


def test_every_file_that_a_document_links_to_is_there() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def headings(document: Path) -> set[str]:
    """Their names in links, as both GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_every_heading_that_a_document_links_to_is_there() -> None:
    for document in DOCUMENTS:
        for target, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
            assert heading in headings(document.parent / target if target else document), f"{document.name}: {heading}"


def test_every_path_and_module_that_a_document_names_is_there() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for path in sorted(
            set(re.findall(r"\b((?:quicoll|tests|benchmarks|examples|docs)/[a-z_/]+\.(?:py|md|svg))\b", text))
        ):
            assert (ROOT / path).exists() or (ROOT / "transport" / path).exists(), f"{document.name}: {path}"
