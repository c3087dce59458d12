"""`quicoll doctor` beside a coordinator, behind a mapped port, and where nobody is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from forwarder import Forwarder
from ports import named_port

import quicoll
from quicoll import Event
from quicoll.cli.main import main
from quicoll.doctor.examination import examine_host
from quicoll.doctor.network import answer
from quicoll.membership.serving import serve
from quicoll_transport.security.authority import create_authority, issue
from quicoll_transport.security.credentials import Credentials


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    create_authority(directory, job="alpha")
    issue(directory, role="coordinator", node="coordinator")
    for node in ("a", "b"):
        issue(directory, role="worker", node=node)
    return directory


@asynccontextmanager
async def coordinator(certs: Path, journal: Path) -> AsyncIterator[str]:
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def observe(event: Event) -> None:
        if event.kind == "listening":
            address.set_result(event.fields["address"])

    task = asyncio.create_task(
        serve(certs=certs, observer=observe, job="alpha", world_size=1, listen="127.0.0.1:0", journal=journal)
    )
    try:
        yield await address
    finally:
        task.cancel()
        await asyncio.wait({task})


async def states(certs: Path, address: str, **options: Any) -> dict[str, str]:
    findings = await examine_host(certs=certs, job="alpha", node="a", coordinator=address, patience=30.0, **options)
    found = {finding.check: finding.state for finding in findings}
    return {name: found.get(name, "") for name in ("coordinator", "clock", "mtu", "nat", "peer")}


async def test_a_coordinator_is_asked_beside_the_rank_of_the_same_name_that_is_at_work(
    certs: Path, tmp_path: Path
) -> None:
    async with (
        coordinator(certs, tmp_path / "journal") as address,
        quicoll.join(coordinator=address, certs=certs, job="alpha", node="a", listen="127.0.0.1:0") as job,
    ):
        view = job.view.view_id
        said = await states(certs, address)
        async with job.step():
            await job.group.barrier()
        assert job.view.view_id == view
    assert said == {"coordinator": "fine", "clock": "fine", "mtu": "fine", "nat": "fine", "peer": ""}


async def test_another_doctor_is_reached_at_a_ranks_address_and_a_narrow_path_is_seen(
    certs: Path, tmp_path: Path
) -> None:
    b = Credentials.from_directory(certs, role="worker", node="b")
    async with Forwarder(most=1300) as mapped, coordinator(certs, tmp_path / "journal") as address:
        config = quicoll.Config.resolve(environ={}, node="b", listen=f"127.0.0.1:{named_port()}")
        host, _, number = config.listen.partition(":")
        mapped.target = (host, int(number))
        standing = asyncio.create_task(answer(config, b, 60.0))
        said = await states(certs, address, peers=[f"127.0.0.1:{mapped.port}"])
        standing.cancel()
        await asyncio.wait({standing})
    assert (said["peer"], said["mtu"]) == ("fine", "note")


def test_what_is_wrong_is_in_the_exit_status_and_in_json(
    certs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["--certs", str(certs), "--job", "alpha", "--node", "a"]
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *where])
    text = capsys.readouterr().out
    assert (ended.value.code, "Nothing is wrong." in text, "No coordinator is named" in text) == (0, True, True)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json", *where, "--coordinator", "127.0.0.1:9"])
    report = json.loads(capsys.readouterr().out)
    assert (ended.value.code, report["wrong"]) == (1, 1)
    (finding,) = [each for each in report["findings"] if each["state"] == "wrong"]
    assert finding["check"] == "coordinator"
    assert "nothing listens" in finding["advice"]
    monkeypatch.setenv("QUICOLL_TIMEOUT", "soon")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *where])
    assert ended.value.code == 1
    assert "(from QUICOLL_TIMEOUT)" in capsys.readouterr().out


async def test_a_misspelt_variable_is_wrong_and_the_sentence_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    misspelt = "QUICOLL_" + "CORDINATOR"
    monkeypatch.setenv(misspelt, "127.0.0.1:1")
    (found,) = [each for each in await examine_host() if each.check == "settings"]
    assert found.says == f"the variable {misspelt} is none of quicoll's; did you mean QUICOLL_COORDINATOR?"
