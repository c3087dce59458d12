"""A mixture of experts divided among ranks: every token goes to the ranks that have its experts, and comes back.

    quicoll run -n 3 examples/experts.py

Each rank has some of the experts and some of the tokens; the router is on all of them. A step is committed on all ranks
or on none. Each rank prints how far its experts and the router are from those of one process.
"""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

import quicoll.blocking
from quicoll.torch import Experts
from quicoll.torch.parallel import parts

STEPS, TOKENS, WIDTH, TOTAL = 30, 48, 16, 8


def samples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step % 4))
    return x, torch.sin(x)


def alone(experts: Sequence[nn.Module], router: nn.Linear) -> None:
    """The same on one process: each expert computes every token, and what was not chosen counts as nothing."""
    optimizer = torch.optim.SGD([*nn.ModuleList(experts).parameters(), *router.parameters()], lr=0.2)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, wanted = samples(step)
        scores = router(x)
        best = torch.topk(scores, 2)
        shares = torch.zeros_like(scores).scatter(1, best.indices, torch.softmax(best.values, 1))
        y = sum(shares[:, place : place + 1] * expert(x) for place, expert in enumerate(experts))
        F.mse_loss(y, wanted, reduction="sum").div(TOKENS).backward()
        optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    every = [nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH)) for _ in range(TOTAL)]
    router = nn.Linear(WIDTH, TOTAL)
    others = copy.deepcopy(every), copy.deepcopy(router)
    with quicoll.blocking.join() as job:
        experts = Experts(every, job.group, k=2)
        counts = parts(TOKENS, job.world_size)
        begin = sum(counts[: job.rank])
        mine = slice(begin, begin + counts[job.rank])
        optimizer = torch.optim.SGD([*experts.parameters(), *router.parameters()], lr=0.2)
        for number in range(STEPS):
            with job.step() as step:
                optimizer.zero_grad()
                x, wanted = (each[mine] for each in samples(number))
                loss = F.mse_loss(experts(x, router(x)), wanted, reduction="sum").div(TOKENS)
                loss.backward()  # an expert's gradients are those of all ranks' tokens; the router's are added here
                gradients = [each.grad for each in router.parameters()]
                job.group.all_reduce(gradients, out=gradients)
                total = job.group.all_reduce(loss.detach())
                step.on_commit(optimizer.step)
            if job.rank == 0 and number % 10 == 9:
                print(f"step {number + 1}: loss {total.item():.4f}", flush=True)
        alone(*others)
        first = sum(experts.counts[: job.rank])
        compared = [*experts.mine, router], [*others[0][first : first + len(experts.mine)], others[1]]
        far = max(
            float((one - other).detach().abs().max())
            for ours, theirs in zip(*compared, strict=True)
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True)
        )
        print(f"rank {job.rank} with {len(experts.mine)} experts: at most {far:.1e} from one process", flush=True)


if __name__ == "__main__":
    main()
