"""What a rank insists on, what it takes from the coordinator, and when it says that the two do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quicoll.config import Config
from quicoll.engine.common_settings import DECISION_MARGIN_S, CommonSettings

if TYPE_CHECKING:
    import pytest

S = 1_000_000_000


def settings(**given: Any) -> CommonSettings:
    return CommonSettings(Config.resolve(environ={}, node="a", listen="127.0.0.1:0", **given))


def test_only_what_was_set_is_insisted_on() -> None:
    assert settings().insisted("timeout") is None
    assert settings(timeout=1.5).insisted("timeout") == 3 * S // 2


def test_what_is_taken_from_the_coordinator_is_in_force_and_says_where_it_came_from() -> None:
    common = settings()
    before = common.config
    common.adopt_lost_after(7 * S)
    assert (common.config.lost_after, common.config.sources["lost_after"]) == (7.0, "coordinator")
    assert common.config.sources["node"] == before.sources["node"]
    assert before.sources["lost_after"] == "default"


def test_a_wait_for_a_decision_that_nobody_set_outlasts_the_wait_for_votes() -> None:
    common = settings()
    hold = common.config.hold_timeout
    common.heed_vote_timeout(round(hold * S) - 1)
    assert common.config.hold_timeout == hold
    common.heed_vote_timeout(round(hold * S))
    assert common.config.hold_timeout == hold + DECISION_MARGIN_S
    assert common.config.sources["hold_timeout"] == "coordinator"


def test_one_that_was_set_stays_and_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    common = settings(hold_timeout=10.0)
    common.heed_vote_timeout(9 * S)
    assert caplog.messages == []
    common.heed_vote_timeout(300 * S)
    common.heed_vote_timeout(300 * S)
    assert common.config.hold_timeout == 10.0
    (warning,) = caplog.messages
    assert "a: hold_timeout is 10 s, and the coordinator waits 300 s for votes" in warning
