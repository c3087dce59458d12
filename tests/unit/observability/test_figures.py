"""Figures and spans: what a rank does is counted as it was, by OpenTelemetry's own SDK and as Prometheus reads it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quicoll import Config, Event, LocalError
from quicoll.observability.figures import FIGURES, Figures
from quicoll.observability.flight_record import FlightOperation, FlightStep, FlightView
from quicoll.observability.prometheus import PrometheusInstruments
from quicoll.observability.recording import record_rank

S = 10**9


class Kept:
    """Instruments that keep what they were told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def add(self, name: str, value: float, *labels: str) -> None:
        assert (FIGURES[name].kind, len(labels)) == ("counter", len(FIGURES[name].labels))
        self.told.append((name, value, *labels))

    def spread(self, name: str, value: float, *labels: str) -> None:
        assert (FIGURES[name].kind, len(labels)) == ("histogram", len(FIGURES[name].labels))
        self.told.append((name, value, *labels))

    def put(self, name: str, value: float, *labels: str) -> None:
        assert (FIGURES[name].kind, len(labels)) == ("gauge", len(FIGURES[name].labels))
        self.told.append((name, value, *labels))

    def close(self) -> None:
        self.told.append(("closed",))


def operation(**fields: Any) -> FlightOperation:
    told = {"view": 1, "name": "all_reduce#3@0:1", "what": "all_reduce/auto", "step": 1, "carrier": "quic", "given": 40}
    return FlightOperation(**{**told, "called": 2 * S, "ended": 5 * S, "outcome": "finished", **fields})


STEP = FlightStep(step=7, view=1, began=1 * S, ended=6 * S, outcome="committed")


def test_an_operation_is_counted_by_kind_way_and_outcome_with_its_time_bytes_and_wait() -> None:
    kept = Kept()
    Figures(kept).take([operation(settled=4 * S, heard={"b": 4 * S}), operation(outcome="")])
    assert kept.told == [
        ("quicoll.operations", 1, "all_reduce", "quic", "finished"),
        ("quicoll.operation.duration", 3.0, "all_reduce", "quic"),
        ("quicoll.operation.given", 40, "all_reduce"),
        ("quicoll.operation.wait", 2.0, "all_reduce"),
        ("quicoll.operations", 1, "all_reduce", "quic", "aborted"),
    ]


def test_steps_views_losses_and_lateness_are_counted() -> None:
    kept = Kept()
    figures = Figures(kept)
    figures.take([FlightView(t=1, view=4, mark="m", nodes=("a", "b")), STEP])
    figures.take([FlightStep(step=8, view=4, began=7 * S, ended=8 * S, outcome="aborted")])
    for kind, fields in (
        ("view_installed", {"rank": 1}),
        ("peer_lost", {"peer": "b"}),
        ("straggler", {"peer": "b", "seconds": 0.5}),
        ("view_ended", {"view": 4}),
        ("progress", {}),
    ):
        figures.take([Event(1, "a", kind, fields)])
    figures.close(3)
    assert kept.told == [
        ("quicoll.view", 4),
        ("quicoll.members", 2),
        ("quicoll.steps", 1, "committed"),
        ("quicoll.step.duration", 5.0),
        ("quicoll.step.number", 7),
        ("quicoll.steps", 1, "aborted"),
        ("quicoll.rank", 1),
        ("quicoll.peers.lost", 1, "b"),
        ("quicoll.late", 0.5, "b"),
        ("quicoll.views.ended", 1),
        ("quicoll.members", 0),
        ("quicoll.dropped", 3),
        ("quicoll.members", 0),
        ("closed",),
    ]


def test_what_went_over_links_is_counted_once_and_a_new_link_begins_at_nothing() -> None:
    kept = Kept()
    figures = Figures(kept)

    def look(link: int, sent: int) -> list[tuple[object, ...]]:
        kept.told.clear()
        told: Any = SimpleNamespace(
            peer="worker/b", link=link, rtt_ns=2_000_000, bytes_sent=sent, bytes_received=0, resends=1, corrupt=0
        )
        figures.take_links([told])
        return [each for each in kept.told if each[0] in ("quicoll.link.sent", "quicoll.link.round_trip")]

    assert look(1, 100) == [("quicoll.link.round_trip", 0.002, "b"), ("quicoll.link.sent", 100, "b")]
    assert look(1, 130)[1] == ("quicoll.link.sent", 30, "b")
    assert look(2, 10)[1] == ("quicoll.link.sent", 10, "b")


def test_each_rank_of_a_host_serves_at_a_port_of_its_own() -> None:
    def metrics(**environ: str) -> str | None:
        return Config.resolve(environ=environ, listen="127.0.0.1:0").metrics

    assert metrics() is None
    assert metrics(QUICOLL_METRICS="9464") == "127.0.0.1:9464"
    assert metrics(QUICOLL_METRICS="[::]:9464", LOCAL_RANK="3") == "[::]:9467"
    assert metrics(QUICOLL_METRICS="0", LOCAL_RANK="3") == "127.0.0.1:0"
    with pytest.raises(LocalError, match="LOCAL_RANK=9 makes it 65544"):
        metrics(QUICOLL_METRICS="65535", LOCAL_RANK="9")


def recorded(**how: Any) -> Any:
    """A rank that did one step of two operations, and has left."""
    kept = record_rank(job="j", node="a", chance=1, **how)
    assert kept is not None
    return kept


def work(kept: Any) -> None:
    recorder = kept.recorder
    view = recorder.in_view(1, ("a", "b"), "m")
    recorder.began(1, 1)
    for name, at in (("all_reduce#0", 2.0), ("barrier#1", 3.0)):
        entry = view.called(name, f"{name} what", 1, "quic", at, 40)
        view.ended(entry, at + 0.5, finished=True, algorithm="ring", heard_ns={1: round((at + 0.2) * S)})
    recorder(Event(time.monotonic_ns(), "a", "step_committed", {"step": 1, "view": 1}))


@pytest.mark.loopback
def test_prometheus_reads_what_a_rank_serves() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    kept = recorded(metrics="127.0.0.1:0")
    try:
        work(kept)
        with urllib.request.urlopen(f"http://{kept.served}/metrics", timeout=30) as answer:
            first = answer.read().decode()
        assert "quicoll_node_info" in first
        deadline = time.monotonic() + 60
        while (
            'quicoll_operation_wait_seconds_count{operation="barrier"}' not in first
        ):  # the thread has not come by yet
            assert time.monotonic() < deadline
            time.sleep(0.02)
            with urllib.request.urlopen(f"http://{kept.served}/metrics", timeout=30) as answer:
                first = answer.read().decode()
    finally:
        kept.recorder.close()
    found = {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in parser.text_string_to_metric_families(first)
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert found["quicoll_steps_total", "committed"] == 1
    assert found["quicoll_operations_total", "quic", "all_reduce", "finished"] == 1
    assert found["quicoll_operation_given_bytes_total", "all_reduce"] == 40
    assert found["quicoll_operation_duration_seconds_sum", "quic", "barrier"] == pytest.approx(0.5)
    assert found["quicoll_operation_wait_seconds_count", "all_reduce"] == 1
    assert found["quicoll_members",] == 2
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{kept.served}/metrics", timeout=30)


@pytest.mark.loopback
def test_its_parser_reads_each_figure_with_whatever_a_label_says() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    odd = ['a"b', "a\\b", "a\nb", "{}=,#", "\N{SNOWMAN}", ""]
    kept = PrometheusInstruments("127.0.0.1:0", job='the "job"', node="a\\n")
    try:
        for figure in FIGURES.values():
            tell = {"counter": kept.add, "histogram": kept.spread, "gauge": kept.put}[figure.kind]
            for number, value in enumerate(odd if figure.labels else [""]):
                tell(figure.name, number + 0.5, *(value for _ in figure.labels))
        with urllib.request.urlopen(f"http://{kept.address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    finally:
        kept.close()
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    for figure in FIGURES.values():
        name = figure.name.replace(".", "_") + {"s": "_seconds", "By": "_bytes", "": ""}[figure.unit]
        family = families.pop(name)
        assert (family.type, family.documentation) == (figure.kind, figure.text)
        ending = {"counter": "_total", "histogram": "_sum", "gauge": ""}[figure.kind]
        values = {tuple(each.labels.values()): each.value for each in family.samples if each.name == name + ending}
        labels = [(value,) * len(figure.labels) for value in (odd if figure.labels else [""])]
        assert values == {label: number + 0.5 for number, label in enumerate(labels)}
    (info,) = (sample for name, family in families.items() if name == "quicoll_node_info" for sample in family.samples)
    assert info.labels == {"quicoll_job": 'the "job"', "node": "a\\n"}
    made = {name for name in families if name.endswith("_created")}  # when each began, which the client adds
    assert {*families} - made == {"quicoll_node_info"}


@pytest.mark.loopback
def test_prometheus_own_tool_finds_nothing_wrong_with_what_is_served() -> None:
    pytest.importorskip("prometheus_client")
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on the PATH (Debian: prometheus)")
    kept = recorded(metrics="127.0.0.1:0")
    try:
        with urllib.request.urlopen(f"http://{kept.served}/metrics", timeout=30) as answer:
            text = answer.read()
    finally:
        kept.recorder.close()
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, b"")


@pytest.mark.loopback
def test_a_port_that_is_taken_is_an_error_that_names_the_setting_and_nothing_is_left_open(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    kept = recorded(metrics="127.0.0.1:0")
    try:
        with pytest.raises(LocalError, match=r"metrics = '127\.0\.0\.1:.* cannot be served"):
            recorded(metrics=kept.served, trace_dir=tmp_path)
        (trace,) = tmp_path.iterdir()
        assert b'"kind":"end"' in trace.read_bytes()
    finally:
        kept.recorder.close()


def test_the_sdk_gets_a_span_for_each_step_with_those_of_its_operations_below_and_the_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider(metric_readers=[reader]), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(metrics, "get_meter", meters.get_meter)
    monkeypatch.setattr(trace, "get_tracer", tracers.get_tracer)
    kept = recorded(telemetry=True)
    work(kept)
    kept.recorder.close()
    found = {span.name: span for span in spans.get_finished_spans()}
    assert sorted(found) == ["quicoll.all_reduce", "quicoll.barrier", "quicoll.step"]
    step, reduced = found["quicoll.step"], found["quicoll.all_reduce"]
    assert reduced.parent is not None
    assert reduced.parent.span_id == step.context.span_id
    assert reduced.end_time - reduced.start_time == S // 2
    told = dict(reduced.attributes or {})
    assert (told["quicoll.bytes"], told["quicoll.algorithm"], told["quicoll.last_to_call"]) == (40, "ring", "b")
    assert told["quicoll.wait_s"] == pytest.approx(0.2)
    data: Any = reader.get_metrics_data()
    (scope,) = data.resource_metrics[0].scope_metrics
    points = {metric.name: metric.data.data_points for metric in scope.metrics}
    assert [point.value for point in points["quicoll.steps"]] == [1]
    assert dict(points["quicoll.steps"][0].attributes) == {
        "quicoll.job": "j",
        "quicoll.node": "a",
        "quicoll.outcome": "committed",
    }
    assert points["quicoll.operation.duration"][0].explicit_bounds == FIGURES["quicoll.operation.duration"].buckets
    meters.shutdown()
    tracers.shutdown()


@pytest.mark.parametrize(("how", "module", "extra"), [
    ({"telemetry": True}, "opentelemetry.metrics", "otel"),
    ({"metrics": "127.0.0.1:0"}, "prometheus_client", "metrics"),
])  # fmt: skip
def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(LocalError, match=rf"pip install 'quicoll\[{extra}\]'"):
        recorded(**how)


def test_the_dashboard_asks_for_figures_that_there_are() -> None:
    text = (Path(__file__).parents[3] / "examples" / "grafana.json").read_text()
    names = {figure.name.replace(".", "_") for figure in FIGURES.values()}
    asked = set(re.findall(r"quicoll_[a-z_]+", " ".join(panel["expr"] for panel in _targets(json.loads(text)))))
    ends = re.compile(r"(_seconds|_bytes)?(_total|_bucket|_sum|_count)?$")
    assert asked
    assert {name for name in asked if ends.sub("", name) not in names} == set()


def _targets(dashboard: Any) -> list[Any]:
    return [target for panel in dashboard["panels"] for target in panel["targets"]]
