"""`quicoll certs` as a person or a script sees it: what is printed, and the exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from quicoll.cli.main import main
from quicoll_transport.security.authority import create_authority
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.identity import WORKER, Identity


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def quicoll(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv: str | Path) -> Result:
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in argv])
        out, err = capsys.readouterr()
        return Result(int(caught.value.code or 0), out, err)

    return run


@pytest.fixture
def directory(tmp_path: Path, quicoll: Command) -> Path:
    assert quicoll("certs", "init", tmp_path / "certs", "--job", "j").status == 0
    return tmp_path / "certs"


def refused(result: Result) -> str:
    """The one line on stderr of a command that did nothing."""
    assert result.status == 2
    assert result.out == ""
    assert result.err.startswith("quicoll: ")
    assert result.err.count("\n") == 1
    return result.err.removeprefix("quicoll: ").rstrip("\n")


def test_init_says_what_to_give_away_and_what_to_keep(tmp_path: Path, quicoll: Command) -> None:
    result = quicoll("certs", "init", tmp_path / "certs", "--job", "j")
    assert (result.status, result.err) == (0, "")
    first, public, private = result.out.splitlines()
    assert first.startswith("authority of job j, valid until 20")
    assert str(tmp_path / "certs" / "ca.pem") in public
    assert str(tmp_path / "certs" / "ca.key") in private
    assert "keep it here" in private


@pytest.mark.parametrize("algorithm", ["ed25519", "p256"])
@pytest.mark.parametrize("role", ["worker", "coordinator"])
def test_issued_files_are_credentials(tmp_path: Path, quicoll: Command, algorithm: str, role: str) -> None:
    assert quicoll("certs", "init", tmp_path, "--job", "j", "--algorithm", algorithm).status == 0
    result = quicoll("certs", "issue", tmp_path, "--role", role, "--node", "n", "--days", "7")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith(f"spiffe://quicoll/j/{role}/n, valid until 20")
    assert Credentials.from_directory(tmp_path, role=role, node="n").identity == Identity("j", role, "n")


def test_days_reach_the_certificate(directory: Path, quicoll: Command) -> None:
    before = datetime.now(UTC)
    quicoll("certs", "issue", directory, "--role", "worker", "--node", "n", "--days", "7")
    until = Credentials.from_directory(directory, role=WORKER, node="n").certificate.not_valid_after_utc
    assert before + timedelta(days=7, seconds=-1) <= until <= datetime.now(UTC) + timedelta(days=7)


def test_further_names_reach_the_certificate(directory: Path, quicoll: Command) -> None:
    names = ("--dns", "a.example", "--dns", "b.example", "--ip", "192.0.2.1")
    assert quicoll("certs", "issue", directory, "--role", "worker", "--node", "n", *names).status == 0
    certificate = Credentials.from_directory(directory, role=WORKER, node="n").certificate
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.DNSName) == ["a.example", "b.example"]
    assert [str(address) for address in found.get_values_for_type(x509.IPAddress)] == ["192.0.2.1"]


def test_show_prints_identity_validity_and_fingerprint(directory: Path, quicoll: Command) -> None:
    quicoll("certs", "issue", directory, "--role", "worker", "--node", "n")
    credentials = Credentials.from_directory(directory, role=WORKER, node="n")
    result = quicoll("certs", "show", directory / "worker-n.pem")
    assert result.status == 0
    shown = dict(line.split(maxsplit=1) for line in result.out.replace("not ", "not-").splitlines())
    assert shown == {
        "identity": "spiffe://quicoll/j/worker/n",
        "not-before": f"{credentials.certificate.not_valid_before_utc:%Y-%m-%d %H:%M:%SZ}",
        "not-after": f"{credentials.certificate.not_valid_after_utc:%Y-%m-%d %H:%M:%SZ}",
        "state": "valid",
        "sha256": credentials.fingerprint,
    }


def test_show_as_json_has_an_entry_for_each_certificate(directory: Path, quicoll: Command) -> None:
    quicoll("certs", "issue", directory, "--role", "worker", "--node", "n")
    both = directory / "both.pem"
    both.write_bytes((directory / "worker-n.pem").read_bytes() + (directory / "ca.pem").read_bytes())
    entries = json.loads(quicoll("certs", "show", both, "--json").out)
    assert [entry["identity"] for entry in entries] == ["spiffe://quicoll/j/worker/n", "authority of job j"]


def test_what_is_made_is_one_json_object_that_names_its_files(tmp_path: Path, quicoll: Command) -> None:
    made = quicoll("certs", "init", tmp_path, "--job", "j", "--json")
    issued = quicoll("certs", "issue", tmp_path, "--role", "worker", "--node", "n", "--json")
    for result, identity, names in (
        (made, "authority of job j", ("ca.pem", "ca.key")),
        (issued, "spiffe://quicoll/j/worker/n", ("worker-n.pem", "worker-n.key")),
    ):
        assert (result.status, result.err) == (0, "")
        found = json.loads(result.out)
        assert (found["identity"], found["state"]) == (identity, "valid")
        assert (found["certificate"], found["key"]) == tuple(str(tmp_path / name) for name in names)
        [shown] = json.loads(quicoll("certs", "show", found["certificate"], "--json").out)
        assert {name: found[name] for name in shown} == shown


@pytest.mark.parametrize(("years_ago", "state"), [(3, "expired"), (0, "valid"), (-1, "not yet valid")])
def test_show_says_whether_it_is_valid_now(tmp_path: Path, quicoll: Command, years_ago: int, state: str) -> None:
    create_authority(tmp_path, job="j", days=365, now=datetime.now(UTC) - timedelta(days=365 * years_ago))
    [entry] = json.loads(quicoll("certs", "show", tmp_path / "ca.pem", "--json").out)
    assert entry["state"] == state


def test_show_does_not_repeat_the_text_of_a_foreign_authority(tmp_path: Path, quicoll: Command) -> None:
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "\x1b[2Jgotcha")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(datetime(2026, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2027, 1, 1, tzinfo=UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, None)
    )
    (tmp_path / "foreign.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    result = quicoll("certs", "show", tmp_path / "foreign.pem")
    assert "authority, not made by quicoll" in result.out
    assert "gotcha" not in result.out


def test_a_second_init_changes_nothing_and_says_why(directory: Path, quicoll: Command) -> None:
    before = {path: path.read_bytes() for path in directory.iterdir()}
    assert "is there already" in refused(quicoll("certs", "init", directory, "--job", "j"))
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_a_second_issue_says_which_file_is_there(directory: Path, quicoll: Command) -> None:
    quicoll("certs", "issue", directory, "--role", "worker", "--node", "n")
    again = quicoll("certs", "issue", directory, "--role", "worker", "--node", "n")
    assert refused(again).startswith(f"{directory / 'worker-n.key'}: is there already")


def test_issue_without_an_authority_names_the_file(tmp_path: Path, quicoll: Command) -> None:
    result = quicoll("certs", "issue", tmp_path, "--role", "worker", "--node", "n")
    assert refused(result) == f"{tmp_path / 'ca.key'}: cannot be read: No such file or directory"


def test_a_wrong_name_is_refused(directory: Path, quicoll: Command) -> None:
    assert "node must be 1 to 64" in refused(quicoll("certs", "issue", directory, "--role", "worker", "--node", "a/b"))


def test_show_of_a_file_without_certificate_is_refused(directory: Path, quicoll: Command) -> None:
    assert refused(quicoll("certs", "show", directory / "ca.key")).endswith("holds no readable PEM certificate")


def test_a_line_break_in_a_path_does_not_break_the_line(tmp_path: Path, quicoll: Command) -> None:
    assert refused(quicoll("certs", "show", tmp_path / "a\nb")).startswith(f"{tmp_path}/a b: cannot be read")


@pytest.mark.parametrize(
    "argv",
    [
        ("certs", "issue", "DIR", "--role", "boss", "--node", "n"),
        ("certs", "init", "DIR", "--job", "j", "--algorithm", "rsa"),
        ("certs", "init", "DIR"),
        ("certs", "unknown"),
        ("unknown",),
    ],
    ids=["role", "algorithm", "no job", "unknown certs command", "unknown command"],
)
def test_wrong_usage_exits_with_2_and_makes_nothing(
    tmp_path: Path, quicoll: Command, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = quicoll(*argv)
    assert result.status == 2
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


def python(*statements: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", "\n".join(statements)], capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_says_how_to_install_it(missing: str) -> None:
    # None in sys.modules makes the import fail as for a package that is not installed.
    done = python(
        "import sys", f"sys.modules[{missing!r}] = None", "from quicoll.cli.main import main", "main(['certs'])"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"quicoll: the command needs {missing}: pip install 'quicoll[cli]'\n"


@pytest.mark.slow
def test_certs_load_no_tensor_library() -> None:
    done = python(
        "import sys",
        "from quicoll.cli.main import main",
        "try: main(['certs', '--help'])",
        "except SystemExit: print([name for name in ('torch', 'sklearn') if name in sys.modules])",
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_version_is_the_installed_one(quicoll: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quicoll.cli.app.installed_version", {"quicoll": "9.8.7"}.__getitem__)
    assert quicoll("--version") == Result(0, "9.8.7\n", "")
