"""Options that say who takes part: what a person writes, and what `quicoll run` hands to its coordinator."""

from __future__ import annotations

import pytest

from quicoll.cli.membership_options import coordinator_options, node_patterns


@pytest.mark.parametrize(
    ("given", "names"),
    [(None, ()), (["a"], ("a",)), (["a, b,", "gpu-*"], ("a", "b", "gpu-*")), ([" "], ())],
)
def test_nodes_are_separated_by_commas_and_may_be_said_again(given: list[str] | None, names: tuple[str, ...]) -> None:
    assert node_patterns(given) == names


def test_what_is_not_said_is_not_handed_on() -> None:
    assert coordinator_options(None, 1, None, None) == []
    assert coordinator_options(["a,b"], 2, 4, 30.0) == [
        *("--nodes", "a", "--nodes", "b", "--min-world-size", "2", "--max-world-size", "4", "--vote-timeout", "30.0")
    ]
