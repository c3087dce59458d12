"""What a doctor says of certificates, keys and who may read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from quicoll import Config
from quicoll.doctor.certificates import certificates
from quicoll_transport.security.authority import create_authority, issue


@pytest.fixture
def made(tmp_path: Path) -> Path:
    directory = tmp_path / "certs"
    create_authority(directory, job="alpha")
    issue(directory, role="worker", node="a", days=30)
    (directory / "ca.key").unlink()
    return directory


def said(directory: Path, now: datetime | None = None, **settings: Any) -> list[tuple[str, str, str]]:
    options = {"job": "alpha", "node": "a", "listen": "127.0.0.1:0", **settings}
    config = Config.resolve(environ={}, certs=directory, **options)
    return [(each.state, each.says, each.advice) for each in certificates(config, now)[0]]


def test_good_ones_are_fine(made: Path) -> None:
    ((state, says, _),) = said(made)
    assert state == "fine"
    assert says.startswith("spiffe://quicoll/alpha/worker/a, signed by an authority that is here, valid until")


def test_a_missing_directory_and_a_missing_node_are_wrong(made: Path, tmp_path: Path) -> None:
    assert said(tmp_path / "none")[0][0] == "wrong"
    ((state, says, advice),) = said(made, node="b")
    assert (state, "worker-b.pem" in says, "--node b" in advice) == ("wrong", True, True)


def test_no_directory_where_nothing_is_named_is_a_note_that_says_who_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ((finding,), credentials) = certificates(Config.resolve(environ={}, job="alpha", node="a", listen="127.0.0.1:0"))
    assert (finding.state, credentials) == ("note", None)
    assert "`quicoll run`, torchrun and Slurm need none" in finding.says
    assert finding.advice == "For several machines otherwise: quicoll certs init certs --job alpha"
    named = Config.resolve(environ={}, job="alpha", node="a", listen="127.0.0.1:0", coordinator="10.0.0.1:4433")
    assert certificates(named)[0][0].state == "wrong", "whoever names a coordinator needs them"


def test_a_key_that_others_may_read_is_wrong(made: Path) -> None:
    (made / "worker-a.key").chmod(0o640)
    ((state, says, advice),) = said(made)
    assert (state, "others than its owner" in says) == ("wrong", True)
    assert advice.startswith("chmod 600")


def test_trust_that_others_may_write_is_wrong(made: Path) -> None:
    (made / "ca.pem").chmod(0o666)
    assert ("wrong", f"chmod go-w {made / 'ca.pem'}") in [(state, advice) for state, _, advice in said(made)]


@pytest.mark.parametrize(
    ("days", "state", "says", "advice"),
    [
        (31, "wrong", "expired", "Issue a new one"),
        (-1, "wrong", "not valid before", "Set this host's clock"),
        (20, "note", "ends on", "Issue a new one; a running rank takes it"),
    ],
)
def test_dates_are_judged(made: Path, days: int, state: str, says: str, advice: str) -> None:
    findings = said(made, datetime.now(UTC) + timedelta(days=days))
    assert findings[0][0] == state
    assert says in findings[0][1]
    assert findings[0][2].startswith(advice)


def test_another_jobs_certificate_is_wrong(made: Path) -> None:
    ((state, says, advice),) = said(made, job="beta")
    assert (state, "'alpha'" in says, "'beta'" in says, "QUICOLL_JOB" in advice) == ("wrong", True, True, True)


def test_the_authoritys_key_beside_a_rank_is_noted(made: Path, tmp_path: Path) -> None:
    (made / "ca.key").write_text("not read")
    assert [state for state, says, _ in said(made) if "ca.key" in says] == ["note"]


def test_a_deny_list_that_cannot_be_used_is_wrong(made: Path, tmp_path: Path) -> None:
    (tmp_path / "deny").write_text("nonsense\n")
    assert [state for state, _, _ in said(made, deny=tmp_path / "deny")] == ["wrong"]
