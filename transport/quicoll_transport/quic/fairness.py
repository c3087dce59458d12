"""How a rate is divided among those who claim parts of it: max-min fairness. Sans-IO, integers."""

from __future__ import annotations

__all__ = ["level_of"]


def level_of(claims: list[int], left: int) -> int | None:
    """Return what each has at most, such that all of them together have what there is.

    The more who claims little leaves, the more the others have.

    Args:
        claims: The smallest first.
        left: What there is.
    Returns:
        None: the claims do not come to more.
    """
    count = len(claims)
    for claim in claims:
        if claim * count > left:
            return max(left // count, 1)
        left, count = left - claim, count - 1
    return None
