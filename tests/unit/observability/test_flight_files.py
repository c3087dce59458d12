"""Files of flight recorders: whole or not there, few for each node, and no disk holds the job up."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quicoll import LocalError
from quicoll.observability import flight_files
from quicoll.observability.flight import FlightRecorder
from quicoll.observability.flight_files import (
    FlightWriter,
    flight_file,
    monotonic_clock,
    read_flights,
    write_flight,
)
from quicoll.observability.recording import record_flight

if TYPE_CHECKING:
    from quicoll.observability.flight_record import FlightFile


def recorder() -> FlightRecorder:
    return FlightRecorder(job="job", node="a", process="1", clock="c", host="h", now_ns=lambda: 1, wall_ns=lambda: 2)


def test_what_is_asked_for_is_written_and_can_be_read(tmp_path: Path) -> None:
    flight = record_flight(tmp_path / "deep", job="job", node="worker/0", chance=0xABCDEF)
    try:
        flight.asked("a test wants it")
        assert flight.flush()
        read = read_flights(tmp_path / "deep")
        (name,) = read.files
        assert name == f"worker_0.{os.getpid()}-abcdef.flight"
        assert read.files[name].header.why == "a test wants it"
        assert read.files[name].header.node == "worker/0"
        assert read.files[name].header.clock == monotonic_clock()
        assert [path.name for path in (tmp_path / "deep").iterdir()] == [name], "nothing unfinished is left"
        assert (tmp_path / "deep" / name).stat().st_mode & 0o777 == 0o600
    finally:
        flight.close()
    assert all(thread.name != "quicoll-flight" for thread in threading.enumerate())


def test_what_is_wanted_just_before_the_end_is_written(tmp_path: Path) -> None:
    flight = record_flight(tmp_path, job="job", node="a")
    flight.asked("first")
    flight.left("ValueError")
    flight.close()
    (file,) = read_flights(tmp_path).files.values()
    assert file.header.left == "ValueError"
    flight.asked("after the end")  # is nobody's any more, and no error
    flight.close()


def test_a_disk_that_is_full_is_told_once_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    full = True

    def write(path: Path, file: FlightFile) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_flight(path, file)

    monkeypatch.setattr(flight_files, "write_flight", write)
    flight = recorder()
    flight.unwritten = told.append
    writer = FlightWriter(flight, tmp_path / "a.1.flight")
    for _ in range(3):
        assert writer.flush()
    assert told == [f"No space left on device ({tmp_path / 'a.1.flight'})"]
    full = False
    assert writer.flush()
    writer.close()
    assert len(read_flights(tmp_path).files) == 1
    assert len(told) == 1


def test_a_disk_that_does_not_answer_holds_nobody_up_who_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(flight_files, "write_flight", lambda path, file: answers.wait())
    monkeypatch.setattr(flight_files, "END_S", 0.01)
    flight = recorder()
    writer = FlightWriter(flight, tmp_path / "a.1.flight")
    for _ in range(1000):
        flight.asked("now")
    assert not writer.flush(0.01)
    writer.close()  # waits for as long as it may, and goes
    answers.set()


def test_of_a_node_the_files_of_the_last_processes_are_kept(tmp_path: Path) -> None:
    for life in range(7):
        path = flight_file(tmp_path, "a", str(life))
        writer = FlightWriter(recorder(), path)
        assert writer.flush()
        writer.close()
        os.utime(path, ns=(life, life))
    other = flight_file(tmp_path, "a.b", "1")
    write_flight(other, recorder().snapshot())
    FlightWriter(recorder(), flight_file(tmp_path, "a", "7")).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.4.flight",
        "a.5.flight",
        "a.6.flight",
        "a.b.1.flight",
    ]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.1.flight"
    write_flight(path, recorder().snapshot())
    before = path.read_bytes()

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no"):
        write_flight(path, recorder().snapshot())
    assert [each.name for each in tmp_path.iterdir()] == ["a.1.flight"]
    assert path.read_bytes() == before


def test_what_stands_in_a_directory_of_files_may_be_anything(tmp_path: Path) -> None:
    write_flight(tmp_path / "good.1.flight", recorder().snapshot())
    (tmp_path / "text.1.flight").write_text("hello\x1b[2J")
    (tmp_path / "dir.1.flight").mkdir()
    os.mkfifo(tmp_path / "pipe.1.flight")
    (tmp_path / "link.1.flight").symlink_to(tmp_path / "good.1.flight")
    (tmp_path / "other.txt").write_text("x")
    read = read_flights(tmp_path)
    assert list(read.files) == ["good.1.flight"]
    assert sorted(read.unread) == ["dir.1.flight", "link.1.flight", "pipe.1.flight", "text.1.flight"]
    assert read.unread["text.1.flight"] == "it does not begin as the file of a flight recorder does"


def test_a_directory_without_files_is_an_error_that_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="QUICOLL_FLIGHT_DIR"):
        read_flights(tmp_path)
    with pytest.raises(LocalError, match="No such file"):
        read_flights(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="cannot write flight files"):
        record_flight(tmp_path / "file" / "x", job="job", node="a")
