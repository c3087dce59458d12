"""How much of the time that gradients travel is hidden behind the backward pass, on a slow link between two ranks.

    python benchmarks/overlap.py [--emulator ../shared/wanem/wanem.py] [--mbit 200] [--rtt-ms 10] [--mib 32]
                                 [--layers 32] [--compute 2.0] [--device emulated|cpu] [--rounds 5] [--json FILE]

Two processes in network namespaces of their own, with an emulated link between them (needs root, gcc and ip(8)). Told
are, in one run and as medians over the rounds: the time of forward and backward pass alone; that of the all_reduce of
all gradients alone; and that of a whole step
    of quicoll.torch.Training, with bucket_bytes=0 and with buckets;
    of DistributedDataParallel over the backend "quicoll", which has buckets of its own;
each also over the longer of the two parts, which no step can be shorter than: a step with buckets should be near it.

--device emulated: a layer takes its time asleep, a third of it in the forward pass, as one does that waits for an
accelerator; two cores would otherwise be what is measured. --device cpu: layers compute, each rank with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _emulator import load_emulator
from torch import nn

import quicoll.blocking
from quicoll.torch import Training
from quicoll_transport.security.authority import create_authority, issue

ROOT = Path(__file__).resolve().parent.parent
PORT = 7100
MIB = 1 << 20


class _Slow(torch.autograd.Function):
    """Takes its time asleep; each element of the gradient is the same."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        time.sleep(seconds / 3)
        ctx.seconds, ctx.shape = seconds, weight.shape
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.seconds / 3)
        return gradients[0], torch.full(ctx.shape, float(gradients[0].mean())), None


class Layer(nn.Module):
    def __init__(self, elements: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Slow.apply(x, self.weight, self.seconds)


def model(mib: int, layers: int, compute: float, device: str) -> tuple[nn.Module, torch.Tensor]:
    """A model with so many MiB of parameters and the time of its passes, and what it is given."""
    elements = mib * MIB // 4 // layers
    if device == "emulated":
        return nn.Sequential(*[Layer(elements, compute / layers) for _ in range(layers)]), torch.ones(4)
    width = int(elements**0.5)
    made = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    x = torch.ones(64, width)
    for _ in range(2):
        began = time.perf_counter()
        made(x).mean().backward()
    x = torch.ones(max(8, int(64 * compute / (time.perf_counter() - began))), width)
    made.zero_grad()
    return made, x


def timed(work: Callable[[], object], rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def rank(options: argparse.Namespace) -> dict[str, list[float]]:
    """What one rank measures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bucket = options.bucket_mib * MIB
    found: dict[str, list[float]] = {}
    with quicoll.blocking.join() as job:
        net, x = model(options.mib, options.layers, options.compute, options.device)
        gradients = [torch.ones_like(value) for value in net.parameters()]

        def passes() -> None:
            net(x).mean().backward()
            net.zero_grad()

        passes()
        found["passes"] = timed(passes, options.rounds)
        job.group.all_reduce(gradients)
        found["all_reduce"] = timed(lambda: job.group.all_reduce(gradients), options.rounds)
        # The state is registered once for a job; both loops have the same.
        for name, size in (("at the end", 0), ("in buckets", bucket)):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
            training = Training(job, net, optimizer, shards=job.world_size, bucket_bytes=size)
            last = job.committed_step + options.rounds + 1
            found[name] = []
            for step in training.steps(last):
                job.group.barrier()
                began = time.perf_counter()
                with step:
                    for _ in step.shards:
                        step.backward(net(x).mean())
                found[name].append(time.perf_counter() - began)
    for each in ("at the end", "in buckets"):
        del found[each][0]
    dist.init_process_group("quicoll")
    parallel = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=options.bucket_mib)

    def step_of_ddp() -> None:
        parallel(x).mean().backward()
        net.zero_grad()

    for _ in range(2):  # DDP makes its buckets anew after the first
        step_of_ddp()
    found["DDP"] = timed(step_of_ddp, options.rounds)
    dist.destroy_process_group()
    return found


def run(options: argparse.Namespace) -> list[dict[str, list[float]]]:
    """Both ranks' figures."""
    wanem = load_emulator(options.emulator)
    rate = options.mbit * 1_000_000
    profile = wanem.commands(rate=rate, rtt=options.rtt_ms, loss=0.0, queue=1_250_000)
    with tempfile.TemporaryDirectory() as temporary, wanem.Wan(2, profile, prefix="overlap", seconds=590) as wan:
        certs = Path(temporary)
        create_authority(certs, job="overlap", days=1)
        issue(certs, role="coordinator", node="coordinator", days=1)
        for node in ("worker-0", "worker-1"):
            issue(certs, role="worker", node=node, days=1)
        address = f"{wan.addr(0)}:{PORT}"
        shared = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "quicoll.cli.main", "coordinator", "--listen", address, "--world-size", "2"]
        named = [*command, "--job", "overlap", "--certs", certs, "--journal", certs / "journal.sqlite"]
        wan.popen(0, named, shared)
        ranks = []
        for number in range(2):
            environment = {
                **shared,
                "QUICOLL_JOB": "overlap",
                "QUICOLL_CERTS": certs,
                "QUICOLL_COORDINATOR": address,
                "QUICOLL_NODE": f"worker-{number}",
                "QUICOLL_LISTEN": f"{wan.addr(number)}:0",
                "RANK": number,
                "WORLD_SIZE": 2,
                "LOCAL_RANK": 0,
                "MASTER_ADDR": wan.addr(0),
                "MASTER_PORT": PORT + 1,
            }
            argv = [sys.executable, __file__, *sys.argv[1:], "--rank", str(certs / f"{number}.json")]
            ranks.append(wan.popen(number, argv, environment))
        if [each.wait(580) for each in ranks] != [0, 0]:
            raise SystemExit("a rank failed")
        return [json.loads((certs / f"{number}.json").read_text()) for number in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulator", type=Path, default=ROOT.parent / "shared" / "wanem" / "wanem.py")
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--rtt-ms", type=float, default=10.0)
    parser.add_argument("--mib", type=int, default=32, help="of parameters")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--compute", type=float, default=2.0, help="seconds of both passes")
    parser.add_argument("--bucket-mib", type=int, default=2)
    parser.add_argument("--device", choices=("emulated", "cpu"), default="emulated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        options.rank.write_text(json.dumps(rank(options)))
        return
    figures = run(options)
    medians = {name: max(statistics.median(each[name]) for each in figures) for name in figures[0]}
    bound = max(medians["passes"], medians["all_reduce"])
    for name, seconds in medians.items():
        print(f"{name:12} {seconds:7.3f} s   {seconds / bound:5.2f} x the longer part")
    if options.json is not None:
        options.json.write_text(json.dumps({"options": {**vars(options)}, "ranks": figures}, default=str, indent=1))


if __name__ == "__main__":
    main()
