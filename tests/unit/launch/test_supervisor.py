"""The supervisor with real child processes: starts, restarts within bounds, passes signals on, leaves nobody behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from quicoll.errors import LocalError
from quicoll.launch import reaper
from quicoll.launch.supervisor import Supervisor
from quicoll.rendezvous.applicant import certificate_pem, key_pem
from quicoll_transport.security.authority import Authority, create_authority, issue
from quicoll_transport.security.credentials import node_files

pytestmark = pytest.mark.slow

COORDINATOR = """
    import json, os, pathlib, sys, time
    listen = sys.argv[sys.argv.index("--listen") + 1]
    port = int(listen.rpartition(":")[2]) or 40404
    events = pathlib.Path(os.environ["QUICOLL_EVENTS"])
    with open(events / "starts", "a") as file:
        file.write(listen + "\\n")
    with open(events / "coordinator.jsonl", "a") as file:
        file.write(json.dumps({"kind": "listening", "address": f"127.0.0.1:{port}"}) + "\\n")
    time.sleep(600)
"""


class Run:
    """A supervisor over scripts in a directory of the test's own, and what its children said."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events = directory / "events"
        self.lines: list[tuple[str, str]] = []
        self.heard = asyncio.Event()

    def script(self, name: str, text: str) -> list[str]:
        path = self.directory / name
        path.write_text(textwrap.dedent(text))
        return [sys.executable, str(path)]

    def supervisor(self, worker: str, *, coordinator: str = COORDINATOR, **options: object) -> Supervisor:
        settings: dict[str, object] = {"workers": 2, "events": self.events, "backoff": 0.0, "grace": 5.0}
        return Supervisor(
            self.script("worker.py", worker),
            coordinator=self.script("coordinator.py", coordinator),
            output=self.hear,
            **{**settings, **options},
        )

    def hear(self, node: str, line: str) -> None:
        self.lines.append((node, line))
        self.heard.set()

    def said(self, node: str) -> list[str]:
        return [line for who, line in self.lines if who == node]

    def end(self, node: str, status: int) -> None:
        """Let a worker that waits for it end."""
        unfinished = self.events / f"ending-{node}"
        unfinished.write_text(str(status))
        unfinished.rename(self.events / f"end-{node}")

    async def until_said(self, node: str, line: str) -> None:
        while line not in self.said(node):
            self.heard.clear()
            await self.heard.wait()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(pid: int) -> None:
    while alive(pid):
        os.sched_yield()


async def test_workers_are_told_who_they_are(run: Run) -> None:
    outcome = await run.supervisor(
        """
        import json, os
        first = ("QUICOLL_COORDINATOR", "QUICOLL_JOB", "QUICOLL_NODE", "QUICOLL_WORLD_SIZE", "QUICOLL_LOST_AFTER")
        second = ("QUICOLL_QLOG", "QUICOLL_SEED", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        third = ("QUICOLL_RESTARTS", "EXTRA")
        print(json.dumps({name: os.environ[name] for name in first + second + third}))
        """,
        job="alpha",
        lost_after=1.5,
        seed=7,
        qlog=run.directory / "qlog",
        environment={"EXTRA": "yes", "RANK": "7"},
    ).run()
    assert (outcome.exit_status, outcome.reason) == (0, "")
    assert json.loads(run.said("worker-1")[0]) == {
        "QUICOLL_COORDINATOR": "127.0.0.1:40404",
        "QUICOLL_JOB": "alpha",
        "QUICOLL_NODE": "worker-1",
        "QUICOLL_WORLD_SIZE": "2",
        "QUICOLL_LOST_AFTER": "1.5",
        "QUICOLL_QLOG": str(run.directory / "qlog"),
        "QUICOLL_SEED": "7",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "QUICOLL_RESTARTS": "0",
        "EXTRA": "yes",
    }


async def test_workers_are_started_as_asked_for_and_who_is_told_to_leave_is_not_started_again(
    run: Run,
) -> None:
    supervisor = run.supervisor(
        """
        import os, pathlib, sys, time
        node, events = os.environ["QUICOLL_NODE"], pathlib.Path(os.environ["QUICOLL_EVENTS"])
        print("up as one of", os.environ["WORLD_SIZE"])
        while not (end := events / f"end-{node}").exists():
            time.sleep(0.01)
        sys.exit(int(end.read_text()))
        """,
        most=3,
    )

    def tell(**event: object) -> None:
        with open(run.events / "coordinator.jsonl", "a") as file:
            file.write(json.dumps(event) + "\n")

    running = asyncio.create_task(supervisor.run())
    await run.until_said("worker-1", "up as one of 2")
    tell(kind="scale_asked", world_size=4, leave=[])
    await run.until_said("worker-2", "up as one of 4")
    await run.until_said("coordinator", "1 workers more are wanted, but there is no certificate for worker-3")
    tell(kind="scale_asked", world_size=2, leave=["worker-1"])
    tell(kind="node_dismissed", peer="worker-1", cause="fewer")
    await run.until_said("worker-1", "is told to leave the job")
    run.end("worker-1", 5)
    await run.until_said("worker-1", "ended with exit status 5 and is not started again")
    (run.events / "end-worker-1").unlink()
    tell(kind="scale_asked", world_size=3, leave=[])
    await run.until_said("worker-1", "up as one of 3")
    for node in ("worker-0", "worker-1", "worker-2"):
        run.end(node, 0)
    outcome = await running
    assert (outcome.exit_status, dict(outcome.restarts)["worker-0"]) == (0, 0)


async def test_throw_away_certificates_are_private_and_gone_afterwards(run: Run) -> None:
    await run.supervisor(
        """
        import os, pathlib, stat
        certs = pathlib.Path(os.environ["QUICOLL_CERTS"])
        print(certs.parent)
        print(oct(stat.S_IMODE(certs.parent.stat().st_mode)), sorted(path.name for path in certs.iterdir()))
        """,
        workers=1,
    ).run()
    where, listing = run.said("worker-0")
    assert listing == (
        "0o700 ['ca.pem', 'coordinator-coordinator.key', 'coordinator-coordinator.pem', "
        "'operator-operator.key', 'operator-operator.pem', 'reader-reader.key', 'reader-reader.pem', "
        "'worker-worker-0.key', 'worker-worker-0.pem']"
    )
    assert not await asyncio.to_thread(os.path.exists, where)


async def test_certificates_of_ones_own_must_be_there_for_every_node(run: Run) -> None:
    certs = run.directory / "mine"
    create_authority(certs, job="local")
    issue(certs, role="coordinator", node="coordinator")
    issue(certs, role="worker", node="worker-0")
    with pytest.raises(LocalError, match=r"worker-1 has no .*: quicoll certs issue .* --role worker --node worker-1"):
        await run.supervisor("print('never')", certs=certs).run()
    issue(certs, role="worker", node="worker-1")
    await run.supervisor("import os; print(os.environ['QUICOLL_CERTS'])", certs=certs).run()
    assert run.said("worker-1") == [str(certs)]


@pytest.mark.parametrize(
    ("job", "days_ago", "mode", "match"),
    [
        ("local", 30, 0o600, r"worker-worker-1\.pem: .*: the certificate expired at "),
        ("other", 0, 0o600, r"coordinator-coordinator\.pem: is for job 'other', not 'local'"),
        ("local", 0, 0o644, r"worker-worker-1\.key: others than its owner may use this key"),
    ],
)
async def test_certificates_that_cannot_be_used_are_named_before_anything_starts(
    job: str, days_ago: int, mode: int, match: str, run: Run
) -> None:
    certs = run.directory / "mine"
    then = datetime.now(UTC) - timedelta(days=days_ago)
    create_authority(certs, job=job, now=then)
    issue(certs, role="coordinator", node="coordinator")
    issue(certs, role="worker", node="worker-0")
    certificate, key = Authority.load(certs).sign(role="worker", node="worker-1", days=10, now=then)
    pem, key_file = node_files(certs, role="worker", node="worker-1")
    pem.write_text(certificate_pem(certificate))
    key_file.write_text(key_pem(key))
    key_file.chmod(mode)
    with pytest.raises(LocalError, match=match):
        await run.supervisor("print('never')", certs=certs).run()
    assert run.said("worker-0") == []


async def test_more_workers_than_a_view_may_have_are_refused(run: Run) -> None:
    for workers, spares in ((1025, 0), (4, 1021)):
        with pytest.raises(LocalError, match="a run has 1024 workers and spares at most, not 1025"):
            run.supervisor("print('never')", workers=workers, spares=spares)


async def test_a_worker_that_dies_is_started_again(run: Run) -> None:
    outcome = await run.supervisor(
        """
        import os, signal
        if os.environ["QUICOLL_NODE"] == "worker-1" and os.environ["QUICOLL_RESTARTS"] != "2":
            os.kill(os.getpid(), signal.SIGKILL)
        print("done")
        """
    ).run()
    assert outcome.exit_status == 0
    assert outcome.restarts == {"coordinator": 0, "worker-0": 0, "worker-1": 2}
    assert run.said("worker-1") == [
        "died with SIGKILL; start 2 in 0 s",
        "died with SIGKILL; start 3 in 0 s",
        "done",
    ]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit(143)", "exit status 143 (SIGTERM)"),
        ("sys.exit(200)", "exit status 200"),
        ("os.kill(0, 9)", "SIGKILL"),
    ],
)
async def test_the_end_of_a_worker_is_told_in_words(run: Run, end: str, said: str) -> None:
    outcome = await run.supervisor(f"import os, sys; {end}", workers=1, max_restarts=0).run()
    assert outcome.reason == f"worker-0 died with {said}; giving up"


async def test_a_worker_that_keeps_dying_ends_the_run_and_says_why(run: Run) -> None:
    supervisor = run.supervisor(
        """
        import os, sys, time
        if os.environ["QUICOLL_NODE"] == "worker-0":
            sys.exit("no such data set" if os.environ["QUICOLL_RESTARTS"] == "1" else "no such host")
        print(os.getpid())
        time.sleep(600)
        """,
        max_restarts=1,
    )
    outcome = await supervisor.run()
    assert outcome.exit_status == 1
    assert outcome.reason == (
        "worker-0 died 2 times within 600 s, the last time with exit status 1; giving up; "
        "its last line: no such data set"
    )
    assert [supervisor.pid(node) for node in supervisor.nodes] == [None, None]
    assert not any(alive(int(line)) for line in run.said("worker-1"))


COMMITS = """
    def commit():
        with open(os.path.join(os.environ["QUICOLL_EVENTS"], os.environ["QUICOLL_NODE"] + ".jsonl"), "a") as file:
            file.write(json.dumps({"kind": "step_committed", "step": 1, "view": 1}) + "\\n")
"""


async def test_a_worker_that_fails_in_the_same_way_again_before_its_first_step_is_given_up(run: Run) -> None:
    outcome = await run.supervisor("train(batchsize=64)", workers=1).run()
    assert outcome.restarts["worker-0"] == 1
    assert outcome.reason == (
        "worker-0 died with exit status 1; giving up: the second time in the same way, before its first step; "
        "its last line: NameError: name 'train' is not defined"
    )


async def test_a_worker_that_has_committed_steps_is_started_again_whatever_it_says(run: Run) -> None:
    outcome = await run.supervisor(
        f"import json, os\n{textwrap.dedent(COMMITS)}\ncommit()\nif os.environ['QUICOLL_RESTARTS'] != '3': train()",
        workers=1,
    ).run()
    assert (outcome.exit_status, outcome.restarts["worker-0"]) == (0, 3)


async def test_a_commit_of_the_process_before_does_not_count_for_the_next(run: Run) -> None:
    outcome = await run.supervisor(
        f"import json, os\n{textwrap.dedent(COMMITS)}\nif os.environ['QUICOLL_RESTARTS'] == '0': commit()\ntrain()",
        workers=1,
        max_restarts=9,
    ).run()
    assert outcome.restarts["worker-0"] == 2, "the first had a step, the second and the third had none"


async def test_a_supervisor_that_narrates_says_what_workers_have_told(run: Run) -> None:
    worker = """
        import json, os
        with open(os.path.join(os.environ["QUICOLL_EVENTS"], os.environ["QUICOLL_NODE"] + ".jsonl"), "a") as file:
            told = {"t": 1.0, "node": os.environ["QUICOLL_NODE"], "kind": "step_aborted", "step": 7, "view": 1}
            file.write(json.dumps({**told, "cause": "worker-2 was lost"}) + "\\n")
    """
    assert (await run.supervisor(worker, narrate=True).run()).joined
    assert run.lines == [
        ("coordinator", f"to look at this run: quicoll top --run {os.getpid()}"),
        ("coordinator", "step 7 aborted in view 1: worker-2 was lost"),
    ]
    run.lines.clear()
    await run.supervisor(worker).run()
    assert run.lines == []


async def test_a_run_of_which_nobody_tells_anything_has_joined_nothing(run: Run) -> None:
    outcome = await run.supervisor("print('alone')").run()
    assert (outcome.exit_status, outcome.joined) == (0, False)


async def test_a_broken_rule_before_the_first_step_is_no_reason_for_a_restart(run: Run) -> None:
    outcome = await run.supervisor(
        "from quicoll.errors import LocalError; raise LocalError('shards is 1 or more')", workers=1
    ).run()
    assert outcome.restarts["worker-0"] == 0
    assert outcome.reason == (
        "worker-0 died with exit status 1; giving up: a restart mends no LocalError that comes before the first step; "
        "its last line: quicoll.errors.LocalError: shards is 1 or more"
    )


async def test_restarts_count_within_their_window_only(run: Run) -> None:
    outcome = await run.supervisor(
        """
        import os, sys, time
        time.sleep(0.3)
        sys.exit(os.environ["QUICOLL_RESTARTS"] != "4")
        """,
        workers=1,
        max_restarts=1,
        restart_window=0.3,
    ).run()
    assert (outcome.exit_status, outcome.restarts["worker-0"]) == (0, 4)


async def test_a_coordinator_that_dies_comes_back_at_the_same_address(run: Run) -> None:
    supervisor = run.supervisor(
        """
        import os, pathlib, time
        starts = pathlib.Path(os.environ["QUICOLL_EVENTS"], "starts")
        print("up", flush=True)
        while len(starts.read_text().split()) < 2:
            time.sleep(0.01)
        """,
        workers=1,
    )
    running = asyncio.create_task(supervisor.run())
    await run.until_said("worker-0", "up")
    pid = supervisor.pid("coordinator")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    outcome = await running
    assert (outcome.exit_status, outcome.restarts["coordinator"]) == (0, 1)
    assert (run.events / "starts").read_text().split() == ["127.0.0.1:0", "127.0.0.1:40404"]


async def test_an_address_of_an_earlier_run_is_not_taken_for_this_ones(run: Run) -> None:
    run.events.mkdir()
    old = {"kind": "listening", "address": "127.0.0.1:1"}
    (run.events / "coordinator.jsonl").write_text(json.dumps(old) + "\n")
    await run.supervisor("import os; print(os.environ['QUICOLL_COORDINATOR'])", workers=1).run()
    assert run.said("worker-0") == ["127.0.0.1:40404"]


async def test_a_coordinator_that_cannot_start_is_an_error_in_its_own_words(run: Run) -> None:
    supervisor = run.supervisor(
        "print('never')", coordinator="raise SystemExit('address already in use')", listen="127.0.0.1:4433"
    )
    with pytest.raises(LocalError, match=r"could not start on 127\.0\.0\.1:4433: address already in use"):
        await supervisor.run()
    assert run.said("worker-0") == []


async def test_output_that_cannot_be_passed_on_ends_the_run_and_blames_no_worker(run: Run) -> None:
    def closed(node: str, line: str) -> None:
        raise BrokenPipeError("nobody reads any more")

    run.hear = closed
    supervisor = run.supervisor("for _ in range(100_000): print('x' * 80)", workers=1)
    outcome = await supervisor.run()
    assert outcome.exit_status == 1
    assert "what worker-0 wrote cannot be passed on: BrokenPipeError: nobody reads any more" in outcome.reason
    assert not outcome.restarts["worker-0"]


async def test_a_program_that_is_not_there_is_an_error(run: Run) -> None:
    supervisor = Supervisor(
        [str(run.directory / "absent")], workers=1, coordinator=run.script("coordinator.py", COORDINATOR)
    )
    with pytest.raises(LocalError, match=r"cannot start .*absent: No such file"):
        await supervisor.run()


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(LocalError, match="1 worker or more"):
        Supervisor(["true"], workers=0)
    with pytest.raises(LocalError, match="max_restarts"):
        Supervisor(["true"], workers=1, max_restarts=-1)
    with pytest.raises(LocalError, match="grace is from 0"):
        Supervisor(["true"], workers=1, grace=float("nan"))
    with pytest.raises(LocalError, match="restart_window must be above 0"):
        Supervisor(["true"], workers=1, restart_window=0.0)
    misspelt = "_".join(["QUICOLL", "SEEED"])
    with pytest.raises(LocalError, match=rf"{misspelt} is none of quicoll's; did you mean QUICOLL_SEED\?"):
        Supervisor(["true"], workers=1, environment={misspelt: "1"})
    with pytest.raises(LocalError, match="no command"):
        Supervisor([], workers=1)
    with pytest.raises(LocalError, match="no directory of certificates"):
        Supervisor(["true"], workers=1, certs=Path("/nowhere"))
    with pytest.raises(LocalError, match="no node is called"):
        Supervisor(["true"], workers=1).pid("worker-1")


async def test_a_signal_is_passed_on_and_the_workers_last_words_are_heard(run: Run) -> None:
    supervisor = run.supervisor(
        """
        import signal, sys, time
        def leave(number, frame):
            print("leaving", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("up", flush=True)
        time.sleep(600)
        """
    )
    running = asyncio.create_task(supervisor.run())
    for node in supervisor.nodes:
        await run.until_said(node, "up")
    os.kill(os.getpid(), signal.SIGTERM)
    outcome = await running
    assert (outcome.exit_status, outcome.reason) == (128 + signal.SIGTERM, "ended by SIGTERM")
    assert [run.said(node) for node in supervisor.nodes] == [["up", "leaving"]] * 2


async def test_a_signal_before_the_coordinator_listens_ends_the_run_as_any_other(run: Run) -> None:
    silent = 'import time\nprint("up", flush=True)\ntime.sleep(600)'
    supervisor = run.supervisor("print('never')", coordinator=silent)
    running = asyncio.create_task(supervisor.run())
    await run.until_said("coordinator", "up")
    supervisor.stop()
    outcome = await running
    assert (outcome.exit_status, outcome.reason) == (128 + signal.SIGTERM, "ended by SIGTERM")
    assert run.said("worker-0") == []


async def test_what_a_worker_started_is_not_asked_but_ended_with_it(run: Run) -> None:
    """A worker that ends in order may need its own children for that."""
    supervisor = run.supervisor(
        """
        import signal, subprocess, sys
        child = "import os; print('child up', os.getpid(), flush=True); os.read(0, 1); print('child asked', flush=True)"
        child = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE)
        def leave(number, frame):
            child.stdin.write(b"x")
            child.stdin.flush()
            sys.exit(child.wait())
        signal.signal(signal.SIGTERM, leave)
        print("up", flush=True)
        while True:
            signal.pause()
        """,
        workers=1,
    )
    running = asyncio.create_task(supervisor.run())
    await run.until_said("worker-0", "up")
    while not (up := [line for line in run.said("worker-0") if line.startswith("child up")]):
        run.heard.clear()
        await run.heard.wait()
    supervisor.stop()
    assert (await running).exit_status == 128 + signal.SIGTERM
    assert run.said("worker-0")[-1] == "child asked"
    wait_until_gone(int(up[0].split()[-1]))


async def test_who_ignores_the_signal_is_killed_after_the_grace_or_at_the_second_signal(run: Run) -> None:
    deaf = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        time.sleep(600)
    """
    for grace in (0.0, 600.0):
        run.lines.clear()
        supervisor = run.supervisor(deaf, workers=1, grace=grace)
        running = asyncio.create_task(supervisor.run())
        await run.until_said("worker-0", "up")
        pid = supervisor.pid("worker-0")
        assert pid is not None
        supervisor.stop()
        if grace:
            supervisor.stop()
        assert (await running).exit_status == 128 + signal.SIGTERM
        assert not alive(pid)


async def test_what_a_worker_started_ends_with_it(run: Run) -> None:
    outcome = await run.supervisor(
        """
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
        """,
        workers=1,
    ).run()
    assert outcome.exit_status == 0
    wait_until_gone(int(run.said("worker-0")[0]))


def test_nobody_outlives_a_supervisor_that_is_killed(run: Run) -> None:
    """Neither workers, nor coordinator, nor the watcher: SIGKILL leaves the supervisor no chance to tidy up."""
    worker = run.script("worker.py", "import os, time\nprint(os.getpid(), os.getppid(), flush=True)\ntime.sleep(600)")
    coordinator = run.script("coordinator.py", COORDINATOR)
    main = f"""
        import asyncio
        from quicoll.launch.supervisor import Supervisor
        asyncio.run(Supervisor({worker!r}, workers=2, coordinator={coordinator!r}).run())
    """
    with subprocess.Popen(run.script("main.py", main), stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = []
        for _ in range(2):
            pid, parent = supervisor.stdout.readline().split()[1:]
            assert int(parent) == supervisor.pid
            pids.append(int(pid))
        children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
        assert len(children) == 4
        supervisor.kill()
    for child in children:
        wait_until_gone(int(child))
    assert set(pids) < {int(child) for child in children}


async def test_output_of_any_form_is_passed_on_line_by_line(run: Run) -> None:
    await run.supervisor(
        r"""
        import os, sys
        os.write(1, b"one\ntwo\r\n\n")
        os.write(2, b"bad \xff byte\n")
        os.write(1, b"x" * 200_000 + b"\nno end of line")
        """,
        workers=1,
    ).run()
    said = run.said("worker-0")
    assert said[:4] == ["one", "two", "", "bad \ufffd byte"]
    assert "".join(said[4:-1]) == "x" * 200_000
    assert said[-1] == "no end of line"


def test_the_watchers_list_ignores_what_would_reach_too_far() -> None:
    lines = ["+12\n", "+13\n", "-12\n", "+0\n", "+1\n", "+-5\n", "+\n", "junk\n", "-99\n", "+14"]
    assert reaper.watch(lines) == [13, 14]


def test_the_watcher_needs_nothing_of_quicoll() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", reaper.__file__], input="", check=True, text=True)
    assert done.returncode == 0
    assert stat.S_ISREG(os.stat(reaper.__file__).st_mode)
