"""Quantities as people read them on a terminal or a page: durations, rates, sizes, shares."""

from __future__ import annotations

__all__ = ["duration_words", "rate_words", "round_trip_words", "share_words", "size_words"]


def duration_words(nanoseconds: int) -> str:
    """Return a duration for people, in its two largest units."""
    seconds = nanoseconds / 1e9
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for size, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit} {rest} {name}" if rest else f"{whole // size} {unit}"
    raise AssertionError("the last size is less than what is left")


def round_trip_words(nanoseconds: int) -> str:
    """Return a round trip in milliseconds."""
    milliseconds = nanoseconds / 1e6
    return f"{milliseconds:.1f} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"


def size_words(nbytes: int) -> str:
    """Return a number of bytes in the largest decimal unit that leaves a whole one, as networks count."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{size:.1f} {unit}" if size < 99.95 else f"{size:.0f} {unit}"
    return f"{size / 1000:.4g} TB"


def rate_words(bytes_per_s: int) -> str:
    """Return a rate of bytes."""
    return f"{size_words(bytes_per_s)}/s"


def share_words(share: float) -> str:
    """Return a share of 0 to 1 in percent; what is above 0 is not said to be 0."""
    percent = 100 * share
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"
