"""Signed audits: what is as it was signed is proved, and whatever somebody does to the files is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from scripted_audit import record

from quicoll.audit.log import AuditLog, _digits, audit_file, read_log
from quicoll.audit.seal import SEAL_STEPS, Sealer, seal_file
from quicoll.audit.verify import Verification, verify_run
from quicoll.cli.main import main
from quicoll.errors import AuditError
from quicoll_transport.security.authority import Authority, KeyAlgorithm
from quicoll_transport.security.credentials import Credentials

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

START = datetime(2026, 11, 23, 23, 0, tzinfo=UTC)
ABOUT = {"version": "0.1.0", "code": "abc123", "fingerprint": "f00d", "environment": {"numpy": "2.3"}, "step": 40}


class Signed:
    """A run whose files are signed by nodes of an authority, with a clock that is moved by hand."""

    def __init__(self, directory: Path, *, algorithm: KeyAlgorithm = "ed25519", job: str = "test") -> None:
        self.directory = directory
        self.algorithm = algorithm
        self.authority = Authority.create(job=job, algorithm=algorithm, now=START)
        self.now = START
        self.held: dict[str, Credentials] = {}

    def issue(self, node: str, *, role: str = "worker", by: Authority | None = None, days: int = 30) -> Credentials:
        authority = by or self.authority
        certificate, key = authority.sign(role=role, node=node, days=days, now=self.now)
        return Credentials.from_parts(certificate, private_key=key, trust=[authority.certificate], now=self.now)

    def log(self, node: str = "worker-0", credentials: Credentials | None = None, **about: Any) -> AuditLog:
        self.held[node] = credentials or self.held.get(node) or self.issue(node)
        path = audit_file(self.directory, node)
        sealer = Sealer(
            seal_file(path),
            credentials=lambda: self.held[node],
            now=lambda: self.now,
            about={**ABOUT, **about},
        )
        return AuditLog(path, job=self.authority.job, node=node, sealer=sealer)

    def write(self, *, world: int = 2, steps: int = 3, change: Any = lambda record: record) -> Signed:
        logs = [self.log(f"worker-{rank}") for rank in range(world)]
        for step in range(41, 41 + steps):
            self.now += timedelta(seconds=1)
            for rank, log in enumerate(logs):
                log.begin(step=step, view=1, rank=rank, world=world)
                log.record(change(record(step, rank, world=world)))
        for log in logs:
            log.close()
        return self

    def verify(self) -> Verification:
        return verify_run(self.directory, [self.authority.certificate])

    def faults(self) -> str:
        return "\n".join(self.verify().faults)

    @property
    def audit(self) -> Path:
        return audit_file(self.directory, "worker-0")

    @property
    def seals(self) -> Path:
        return seal_file(self.audit)


def replaced(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def rechained(path: Path, change: Callable[[dict[str, Any]], None], line: int) -> None:
    """Alter a line as somebody does who knows the format: with checksums that are right from there on."""
    chain = ""
    lines: list[bytes] = []
    for number, each in enumerate(path.read_bytes().splitlines()):
        told = json.loads(each[17:])
        if number == line:
            change(told)
        text = json.dumps(told, separators=(",", ":")).encode()
        chain = _digits(chain, text)
        lines.append(chain.encode() + b" " + text + b"\n")
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("algorithm", ["ed25519", "p256"])
def test_what_was_signed_is_proved_with_who_when_which_view_and_from_what(
    tmp_path: Path, algorithm: KeyAlgorithm
) -> None:
    run = Signed(tmp_path, algorithm=algorithm).write()
    found = run.verify()
    assert (found.faults, found.gaps, found.job) == ((), (), "test")
    assert [(file.node, file.signed) for file in found.files] == [("worker-0", 7), ("worker-1", 7)]
    (stretch,) = found.files[0].stretches
    assert stretch.closed
    assert (stretch.opened, stretch.until) == ("2026-11-23T23:00:00.000000+00:00", "2026-11-23T23:00:03.000000+00:00")
    assert (stretch.views, stretch.steps, stretch.calls, stretch.from_step) == ((1, 1), (41, 43), 3, 40)
    assert (stretch.version, stretch.code, stretch.fingerprint) == ("0.1.0", "abc123", "f00d")
    assert stretch.environment == {"numpy": "2.3"}
    assert stretch.certificates == (run.held["worker-0"].fingerprint,)


def test_signatures_leave_the_audit_itself_as_it_is(tmp_path: Path) -> None:
    """Equal runs have equal files, signed at whatever time."""
    one, other = Signed(tmp_path / "a").write(), Signed(tmp_path / "b")
    other.now += timedelta(hours=1)
    other.write()
    assert one.audit.read_bytes() == other.audit.read_bytes()
    assert one.seals.read_bytes() != other.seals.read_bytes()


def test_a_line_that_was_altered_is_seen_although_its_checksums_are_right(tmp_path: Path) -> None:
    run = Signed(tmp_path).write()

    def other_result(told: dict[str, Any]) -> None:
        told["result"] = "made up"

    rechained(run.audit, other_result, line=4)
    assert read_log(run.audit).whole
    assert "worker-0.audit: lines 2 to 7 are not those that were signed at 2026-11-23T23:00:03" in run.faults()
    assert run.verify().files[0].stretches == ()


@pytest.mark.parametrize("kept", [1, 3, 6])
def test_an_end_that_was_cut_off_is_seen(tmp_path: Path, kept: int) -> None:
    run = Signed(tmp_path).write()
    replaced(run.audit, lambda lines: lines[:kept])
    assert f"cut off: signature 2 is over 7 lines, and there are {kept}" in run.faults()


def test_an_end_that_was_cut_off_with_its_signatures_is_not_taken_for_the_end(tmp_path: Path) -> None:
    run = Signed(tmp_path).write()
    replaced(run.audit, lambda lines: lines[:1])
    replaced(run.seals, lambda lines: lines[:1])
    found = run.verify()
    assert found.faults == ()
    assert "the signature of its end is missing" in found.gaps[0]
    assert "nothing of rank 0 in 3 of 3 places, first in step 41" in found.gaps


def test_lines_that_were_added_behind_the_end_are_seen(tmp_path: Path) -> None:
    run = Signed(tmp_path).write()
    log = AuditLog(run.audit, job="test", node="worker-0")
    log.record(record(43, 0, seq=1))
    log.close()
    assert "its last 1 lines are not signed" in run.faults()


def test_a_signature_that_was_exchanged_is_seen(tmp_path: Path) -> None:
    run = Signed(tmp_path).write()

    def swapped(lines: list[bytes]) -> list[bytes]:
        (one, first), (other, second) = (line.split(b" ", 1) for line in lines)
        return [other + b" " + first, one + b" " + second]

    replaced(run.seals, swapped)
    assert "signature 1 is not the certificate's: it was altered, or exchanged" in run.faults()


def test_a_time_that_was_altered_is_seen(tmp_path: Path) -> None:
    run = Signed(tmp_path).write()
    replaced(run.seals, lambda lines: [lines[0], lines[1].replace(b"T23:00:03", b"T23:00:04")])
    assert "signature 2 is not the certificate's: it was altered, or exchanged" in run.faults()


def test_a_signature_that_was_taken_out_is_seen(tmp_path: Path) -> None:
    run = Signed(tmp_path)
    run.write(steps=2 * SEAL_STEPS + 1, world=1)
    assert len(run.seals.read_bytes().splitlines()) == 4
    replaced(run.seals, lambda lines: [lines[0], *lines[2:]])
    assert "signature 2 does not follow the one before it" in run.faults()


def test_the_files_of_another_node_or_run_are_not_taken_for_these(tmp_path: Path) -> None:
    run = Signed(tmp_path / "a").write()
    seal_file(audit_file(run.directory, "worker-1")).write_bytes(run.seals.read_bytes())
    assert "worker-1.audit: signature 1 is of worker-0 in job test, and was put here" in run.faults()
    run.write()  # appended to, by the same node: the seals of its earlier life do not follow from what stands there
    other = Signed(tmp_path / "b")
    other.authority = run.authority
    other.write(change=lambda each: each)
    other.seals.write_bytes(run.seals.read_bytes())
    assert "cut off" in other.faults()


def test_a_certificate_that_had_expired_proves_nothing(tmp_path: Path) -> None:
    run = Signed(tmp_path)
    log = run.log(credentials=run.issue("worker-0", days=1))
    run.now += timedelta(days=2)
    log.close()
    assert "signature 2 shows a certificate that is not accepted: the certificate expired at 2026-11-24" in run.faults()


def test_a_certificate_that_has_expired_since_proves_what_it_did(tmp_path: Path) -> None:
    run = Signed(tmp_path)
    run.now = START - timedelta(days=5 * 365)
    run.authority = Authority.create(job="test", days=10, now=run.now)
    run.held = {f"worker-{rank}": run.issue(f"worker-{rank}", days=1) for rank in range(2)}
    run.write()
    assert {each.certificate.not_valid_after_utc.year for each in run.held.values()} == {2021}
    assert run.verify().faults == ()


def test_a_certificate_of_another_authority_or_node_or_role_proves_nothing(tmp_path: Path) -> None:
    foreign = Signed(tmp_path / "a")
    foreign.log(credentials=foreign.issue("worker-0", by=Authority.create(job="test", now=START))).close()
    assert "was not signed by an authority that we trust" in foreign.faults()
    operator = Signed(tmp_path / "b")
    operator.log(credentials=operator.issue("worker-0", role="operator")).close()
    assert "signature 1 is by operator/worker-0, and the file is of worker/worker-0" in operator.faults()
    stolen = Signed(tmp_path / "c")
    stolen.log(credentials=stolen.issue("worker-1")).close()
    assert "signature 1 is of worker-1 in job test, and was put here" in stolen.faults()


def test_an_audit_without_signatures_proves_nothing(tmp_path: Path) -> None:
    run = Signed(tmp_path).write()
    run.seals.unlink()
    assert "worker-0.audit: it is not signed: worker-0.seal cannot be read" in run.faults()
    run.seals.write_bytes(b"")
    assert "worker-0.audit: it is not signed" in run.faults()
    run.audit.unlink()
    assert "worker-0.seal: the audit that it signs is not there" in run.faults()


def test_lines_of_a_process_that_was_killed_are_told_apart_from_those_that_are_signed(tmp_path: Path) -> None:
    run = Signed(tmp_path)
    log = run.log()
    log.begin(step=1, view=1, rank=0, world=1)
    log.record(record(1, 0, world=1))
    found = run.verify()  # while it runs, as after a kill
    log.close()
    assert found.faults == ()
    assert "worker-0.audit: its last 2 lines are not signed" in found.gaps
    assert not found.files[0].stretches[0].closed


def test_a_process_that_goes_on_with_a_file_signs_what_was_there(tmp_path: Path) -> None:
    run = Signed(tmp_path)
    first = run.log()
    first.begin(step=1, view=1, rank=0, world=1)
    cast("Sealer", first._sealer).close()
    second = run.log(step=0)
    second.resumed(7, "checkpoints/step-7")
    second.begin(step=8, view=2, rank=0, world=1)
    second.close()
    found = run.verify()
    assert (found.faults, [each.closed for each in found.files[0].stretches]) == ((), [False, True])
    assert [(each.from_step, each.source) for each in found.files[0].stretches] == [(40, ""), (7, "checkpoints/step-7")]


def test_a_new_certificate_signs_from_when_it_is_there(tmp_path: Path) -> None:
    run = Signed(tmp_path)
    log = run.log()
    old = run.held["worker-0"]
    run.held["worker-0"] = run.issue("worker-0")
    log.close()
    found = run.verify()
    assert found.faults == ()
    assert found.files[0].stretches[0].certificates == (old.fingerprint, run.held["worker-0"].fingerprint)


def test_a_view_that_is_over_is_signed_when_the_next_one_begins_a_step(tmp_path: Path) -> None:
    run = Signed(tmp_path)
    log = run.log()
    log.begin(step=1, view=1, rank=0, world=1)
    log.begin(step=1, view=2, rank=0, world=1)
    told = json.loads(run.seals.read_bytes().splitlines()[-1].split(b" ", 1)[1])
    log.close()
    assert (told["why"], told["lines"], told["view"], told["step"]) == ("view", 2, 1, 1)


def test_ranks_that_signed_different_results_of_one_operation_are_named(tmp_path: Path) -> None:
    def change(each: Any) -> Any:
        return record(each.step, each.rank, result="other") if (each.step, each.rank) == (42, 1) else each

    run = Signed(tmp_path).write(change=change)
    assert "step 42: ranks 0 and 1 signed different results of all_reduce float32 (3) sum default" in run.faults()


def test_files_that_are_no_signatures_are_refused_and_not_believed(tmp_path: Path) -> None:
    run = Signed(tmp_path).write()
    whole = run.seals.read_bytes()
    for data in (
        b"\n",
        b"x" * 100 + b"\n",
        b"AAAA {}\n",
        whole[:50],
        b"\xff\xfe \n",
        whole.replace(b"quicoll-seal-1", b"x"),
    ):
        run.seals.write_bytes(data)
        found = run.verify()
        assert found.faults or found.gaps
        assert found.files[0].signed == 0


def test_no_key_stands_in_the_files(tmp_path: Path) -> None:
    run = Signed(tmp_path).write()
    raw = cast("Ed25519PrivateKey", run.held["worker-0"].private_key).private_bytes_raw()
    for path in (run.audit, run.seals):
        assert raw not in path.read_bytes()
        assert b"PRIVATE" not in path.read_bytes()
        assert path.stat().st_mode & 0o077 == 0


def test_the_command_says_what_is_proved_and_its_status_is_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Signed(tmp_path / "run").write()
    ca = tmp_path / "ca.pem"
    ca.write_bytes(run.authority.certificate.public_bytes(Encoding.PEM))

    def told(*arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            main(["audit", "verify", str(run.directory), *arguments])
        return ended.value.code, "".join(capsys.readouterr())

    status, text = told("--ca", str(ca))
    assert status in (0, None)
    assert "worker-0.audit: worker-0, 7 lines signed" in text
    assert "steps 41 to 43 in views 1 to 1, 3 calls" in text
    assert "quicoll 0.1.0, program abc123, environment f00d" in text
    assert text.endswith("verified: 2 files of job test, 14 lines signed\n")
    assert json.loads(told("--ca", str(tmp_path), "--json")[1])["verdict"] == "verified"
    replaced(run.audit, lambda lines: lines[:-1])
    assert told("--ca", str(ca))[0] == 1
    run.audit.unlink()
    run.seals.unlink()
    assert told("--ca", str(ca))[0] == 2


def test_a_file_of_signatures_that_cannot_be_written_is_an_error_of_the_audit(tmp_path: Path) -> None:
    run = Signed(tmp_path)
    run.seals.mkdir(parents=True)
    with pytest.raises(AuditError, match="cannot be written"):
        run.log()
