"""Which fragment of the parameters is exchanged when, in a round of inner steps. Pure: numbers alone.

A round is `every` inner steps. The parameters are cut into fragments of whole tensors, in their order, of nearly equal
size. Each fragment has its turn once in a round, one after the other, evenly spread:

    fragment f is applied    after inner step a(f) = ceil((f + 1) * every / fragments), so the last one at the end
    its exchange begins      after inner step a(f) - delay, with the parameters as they are then

Between the two, inner steps go on while the exchange is under way. Both are numbers of steps: when a result arrives has
no say in where it is applied. All exchanges of a round begin and end in it, so nothing is under way at its end.

At one inner step, what was begun before is applied first, then exchanges begin, then what has no delay is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from quicoll.checks import whole
from quicoll.errors import LocalError

__all__ = ["FragmentTurn", "cut_fragments", "turns_of"]


@dataclass(frozen=True, slots=True)
class FragmentTurn:
    """A point in a round.

    Attributes:
        at: So many inner steps of the round are done then.
        fragment: Whose turn it is.
        begins: Whether its exchange begins; otherwise what came of it is applied.
    """

    at: int
    fragment: int
    begins: bool


def turns_of(every: int, fragments: int, delay: int) -> tuple[FragmentTurn, ...]:
    """Return the turns of a round, in their order.

    Args:
        every: Inner steps of a round.
        fragments: Into how many the parameters are cut.
        delay: Inner steps from the begin of an exchange until its result is applied.
    Returns:
        Two for each fragment.
    Raises:
        LocalError: There cannot be such a round.
    """
    every, fragments, delay = whole(every, "every"), whole(fragments, "fragments"), whole(delay, "delay")
    if every < 1 or fragments < 1 or delay < 0:
        raise LocalError(f"every and fragments are 1 or more, delay 0 or more, not {every}, {fragments} and {delay}")
    if fragments > every:
        raise LocalError(f"{fragments} fragments have no turn each in {every} inner steps: fragments is at most every")
    ends = [-(-(fragment + 1) * every // fragments) for fragment in range(fragments)]
    if delay > ends[0]:
        raise LocalError(
            f"a delay of {delay} inner steps is longer than a fragment's turn, which is {ends[0]} of the {every} inner "
            f"steps of a round with {fragments} fragments"
        )
    # Of one inner step: (0) results that were under way, (1) exchanges that begin, (2) results without a delay.
    points = [(end - delay, 1, fragment) for fragment, end in enumerate(ends)]
    points += [(end, 0 if delay else 2, fragment) for fragment, end in enumerate(ends)]
    return tuple(FragmentTurn(at, fragment, order == 1) for at, order, fragment in sorted(points))


def cut_fragments(sizes: Sequence[int], fragments: int) -> tuple[range, ...]:
    """Cut tensors into runs of nearly equal size, none of them empty.

    Args:
        sizes: Elements of each tensor, in order.
        fragments: How many runs.
    Returns:
        The numbers of each run's tensors.
    Raises:
        LocalError: There are fewer tensors than runs.
    """
    if fragments > len(sizes):
        raise LocalError(
            f"{fragments} fragments of {len(sizes)} parameters: a fragment has at least one whole parameter"
        )
    before = [0, *accumulate(sizes)]  # elements before each tensor
    cuts = [0]
    for fragment in range(1, fragments):
        ideal = before[-1] * fragment / fragments
        possible = range(cuts[-1] + 1, len(sizes) - (fragments - fragment) + 1)
        cuts.append(min(possible, key=lambda place: (abs(before[place] - ideal), place)))
    return tuple(range(start, stop) for start, stop in zip(cuts, [*cuts[1:], len(sizes)], strict=True))
