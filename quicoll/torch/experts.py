"""Experts divided among ranks: each token goes to the ranks that have its experts, and what they make of it comes back.

    experts = Experts([nn.Linear(32, 32) for _ in range(8)], group, k=2)     # of which each rank keeps its part
    y = experts(x, router(x))                                                # x: (tokens of this rank, width)

Which experts a token goes to is decided by the scores alone: the k highest, of equal ones the first. No token is
dropped and none is padded: as many rows travel as there are, by all_to_all with uneven parts. An expert gets its tokens
in the order of the ranks, and of a rank's tokens in theirs. So with the same tokens in the same order, divided among
however many ranks, an expert computes with the same rows in the same order: outputs and gradients have the same bits.

The loss is the sum of all ranks' losses, as for data parallel training, and every rank calls `backward`; an expert's
gradients are those of all tokens that came to it. A rank to whose experts no token came computes them with no rows.
Sources: Shazeer et al. (arXiv:1701.06538) for the mixture, Lepikhin et al. (arXiv:2006.16668) for its division.

Failures: scores that are not one for each expert, more experts asked for than there are: LocalError, before anything is
sent. Scores that are not numbers (NaN) are refused likewise: their order is none. Others as `quicoll.torch.functional`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from quicoll.checks import whole
from quicoll.errors import LocalError
from quicoll.torch import functional
from quicoll.torch.groups import blocking_group
from quicoll.torch.parallel import parts

__all__ = ["Experts", "top_k"]


def top_k(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the k highest scores of each token; of equal ones, those of the first experts.

    Args:
        scores: (tokens, experts).
        k: How many.
    Returns:
        The experts, (tokens, k) int64, the highest score first; and how much each counts, (tokens, k): the softmax of
        the chosen scores, through which gradients go.
    Raises:
        LocalError: There are not so many experts, or a score is not a number.
    """
    if scores.dim() != 2 or not 1 <= whole(k, "k") <= scores.shape[1]:
        raise LocalError(f"{k} experts of scores of shape {tuple(scores.shape)}")
    if bool(torch.isnan(scores).any()):
        raise LocalError("a score is not a number, so it is neither higher nor lower than others")
    # torch.topk does not say which of equal ones it takes; a stable sort does.
    chosen = torch.sort(scores.detach(), dim=1, descending=True, stable=True).indices[:, :k]
    return chosen, torch.softmax(scores.gather(1, chosen), dim=1)


class Experts(nn.Module):
    """A mixture of experts of which each rank has some. See the module's head."""

    def __init__(self, experts: Sequence[nn.Module], group: Any = None, *, k: int = 2) -> None:
        """Keep this rank's experts.

        Args:
            experts: All of them, equal on all ranks; each makes (rows, width) of (rows, width). A rank keeps its own,
                as `quicoll.torch.parallel.parts` divides their number.
            group: As for `quicoll.torch.functional.all_reduce`.
            k: How many experts each token goes to.
        Raises:
            LocalError: There are not so many.
        """
        super().__init__()
        self.group = blocking_group(group)
        self.total, self.k = len(experts), whole(k, "k")
        if not 1 <= self.k <= self.total:
            raise LocalError(f"each token goes to {k} of {self.total} experts")
        self.counts = parts(self.total, self.group.world_size)
        begin = sum(self.counts[: self.group.rank])
        self.mine = nn.ModuleList(experts[begin : begin + self.counts[self.group.rank]])

    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Send each token to its experts, and add up what comes back.

        Args:
            x: (tokens, width): this rank's, any number of them.
            scores: (tokens, experts): the router's.
        Returns:
            (tokens, width): of each token the sum of what its experts make of it, by how much each counts, in the order
            of their scores.
        Raises:
            LocalError: The scores do not fit.
            QuicollError: An operation failed.
        """
        if scores.shape != (x.shape[0], self.total):
            raise LocalError(f"scores of shape {tuple(scores.shape)} for {x.shape[0]} tokens and {self.total} experts")
        chosen, shares = top_k(scores, self.k)
        order = torch.sort(chosen.flatten(), stable=True).indices  # by expert, and for each in the tokens' order
        for_expert = torch.bincount(chosen.flatten(), minlength=self.total)
        for_rank = [int(part.sum()) for part in torch.split(for_expert, self.counts)]
        # What comes from a rank lies there by expert: how much of it is for which.
        came_for = torch.cat(self.group.all_to_all(list(torch.split(for_expert, self.counts))))
        rows, came = functional.all_to_all(x[order // self.k], self.group, counts=for_rank)
        made, _ = functional.all_to_all(self._computed(rows, came_for), self.group, counts=came)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        of_token = made[back].view(x.shape[0], self.k, made.shape[1])
        y = of_token[:, 0] * shares[:, :1]
        for place in range(1, self.k):
            y = y + of_token[:, place] * shares[:, place : place + 1]
        return y

    def _computed(self, rows: torch.Tensor, came_for: torch.Tensor) -> torch.Tensor:
        """Let each expert compute its rows, of all ranks together; the results lie as the rows did."""
        if not self.mine:
            return rows
        pieces = torch.split(rows, came_for.tolist())  # by rank, and for each by expert
        here = len(self.mine)
        results: list[tuple[torch.Tensor, ...]] = []
        for place, expert in enumerate(self.mine):
            own = pieces[place::here]
            results.append(torch.split(expert(torch.cat(own)), [piece.shape[0] for piece in own]))
        return torch.cat([result[rank] for rank in range(self.group.world_size) for result in results])
