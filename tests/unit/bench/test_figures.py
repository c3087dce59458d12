"""Medians, spreads and ratios."""

from __future__ import annotations

import pytest

from quicoll.bench.figures import row_of


def rounds(*seconds: float) -> list[dict[str, float]]:
    return [{"seconds": each, "cpu": 2 * each} for each in seconds]


CASE = {"name": "all_reduce 2 MB", "kind": "all_reduce", "size": 2_000_000}


def test_a_row_has_medians_and_their_spread() -> None:
    row = row_of({"case": CASE, "samples": {"quicoll": rounds(0.3, 0.1, 0.2)}})
    figure = row.figures["quicoll"]
    assert (figure.least_s, figure.median_s, figure.most_s) == (0.1, 0.2, 0.3)
    assert row.rate("quicoll") == pytest.approx(10.0)
    assert row.cpu_per_gb("quicoll") == pytest.approx(200.0)
    assert row.ratios == {}


def test_a_ratio_is_of_pairs_so_that_a_slow_minute_of_the_machine_does_not_count() -> None:
    """In the second round everything took ten times as long. The ratio of the medians would be 10."""
    row = row_of({"case": CASE, "samples": {"quicoll": rounds(2.0, 20.0, 20.0), "gloo": rounds(1.0, 10.0, 1.0)}})
    assert row.ratios == {"gloo": 2.0}
