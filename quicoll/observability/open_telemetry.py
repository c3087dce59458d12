"""Figures and spans for OpenTelemetry, by its API alone: where they go is decided by the SDK that the program sets up.

A span for each attempt at a step, "quicoll.step", with those of its operations below it, "quicoll.all_reduce" and so
on; operations outside of steps stand by themselves. Spans are made when they are over, with their times, on the thread
of `quicoll.observability.streaming`: an operation waits until its step is decided, so that it has a parent.

Spans are of the rank's own trace. They are not put below a span that the program has open, since they are made on
another thread, and later.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError
from quicoll.observability.figures import FIGURES, operation_kind
from quicoll.observability.flight_record import FlightOperation, FlightStep

if TYPE_CHECKING:
    from quicoll.observability.flight import Streamed
    from quicoll_transport.events import LinkSnapshot

__all__ = ["OpenTelemetryInstruments", "Spans", "demand_open_telemetry"]

_WAITING = 1 << 16
"""Operations that wait for the end of their step; with more they get no parent."""


def demand_open_telemetry() -> tuple[Any, Any]:
    """Return the API's modules for metrics and for traces. Raises LocalError where the package is not there."""
    try:
        return import_module("opentelemetry.metrics"), import_module("opentelemetry.trace")
    except ImportError:
        raise LocalError(
            "telemetry is on, and opentelemetry-api is not installed: pip install 'quicoll[otel]'"
        ) from None


class OpenTelemetryInstruments:
    """Figures as the API's instruments, each with the attributes job and node."""

    def __init__(self, *, job: str, node: str) -> None:
        """Make them, by the meter "quicoll" of the global provider.

        Args:
            job: The job's name.
            node: This rank's.
        Raises:
            LocalError: The package is not there.
        """
        metrics, _ = demand_open_telemetry()
        meter = metrics.get_meter("quicoll")
        self._own = {"quicoll.job": job, "quicoll.node": node}
        self._made: dict[str, Any] = {}
        for figure in FIGURES.values():
            told = {"unit": figure.unit or "1", "description": figure.text}
            if figure.kind == "histogram":
                self._made[figure.name] = meter.create_histogram(
                    figure.name, explicit_bucket_boundaries_advisory=figure.buckets, **told
                )
            elif figure.kind == "counter":
                self._made[figure.name] = meter.create_counter(figure.name, **told)
            else:
                self._made[figure.name] = meter.create_gauge(figure.name, **told)

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add to a counter."""
        self._made[name].add(value, self._attributes(name, labels))

    def spread(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        self._made[name].record(value, self._attributes(name, labels))

    def put(self, name: str, value: float, *labels: str) -> None:
        """Say how a gauge is now."""
        self._made[name].set(value, self._attributes(name, labels))

    def close(self) -> None:
        """Nothing: the SDK is the program's."""

    def _attributes(self, name: str, labels: tuple[str, ...]) -> dict[str, str]:
        told = {f"quicoll.{label}": value for label, value in zip(FIGURES[name].labels, labels, strict=True)}
        return {**self._own, **told}


class Spans:
    """A sink (`quicoll.observability.streaming`) that makes spans."""

    def __init__(self, *, job: str, node: str, wall_less_clock_ns: int) -> None:
        """Take the tracer "quicoll" of the global provider.

        Args:
            job: The job's name.
            node: This rank's.
            wall_less_clock_ns: What makes a time since 1970 of one of the loop's clock.
        Raises:
            LocalError: The package is not there.
        """
        _, self._trace = demand_open_telemetry()
        self._tracer = self._trace.get_tracer("quicoll")
        self._own = {"quicoll.job": job, "quicoll.node": node}
        self._shift = wall_less_clock_ns
        self._waiting: list[FlightOperation] = []

    def take(self, told: Sequence[Streamed]) -> None:
        """Make the spans of what is over."""
        for each in told:
            if isinstance(each, FlightOperation):
                if each.step is None or len(self._waiting) >= _WAITING:
                    self._operation(each, None)
                else:
                    self._waiting.append(each)
        for each in told:
            if isinstance(each, FlightStep):
                self._step(each)

    def take_links(self, links: Sequence[LinkSnapshot]) -> None:
        """Nothing: a link has figures and no span."""

    def close(self, dropped: int) -> None:
        """Make those of operations whose step has no end."""
        for each in self._waiting:
            self._operation(each, None)
        self._waiting.clear()

    def _step(self, step: FlightStep) -> None:
        attributes = {
            **self._own,
            "quicoll.step": step.step,
            "quicoll.view": step.view,
            "quicoll.outcome": step.outcome,
        }
        span = self._tracer.start_span("quicoll.step", start_time=step.began + self._shift, attributes=attributes)
        mine = [each for each in self._waiting if (each.view, each.step) == (step.view, step.step)]
        self._waiting = [each for each in self._waiting if (each.view, each.step) != (step.view, step.step)]
        context = self._trace.set_span_in_context(span)
        for each in mine:
            self._operation(each, context)
        if step.outcome == "aborted":
            span.set_status(self._trace.StatusCode.ERROR, "aborted")
        last = max((each.ended for each in mine), default=step.began)
        span.end(end_time=(step.ended or last) + self._shift)

    def _operation(self, each: FlightOperation, context: Any) -> None:
        attributes = {
            **self._own,
            "quicoll.operation": each.name,
            "quicoll.called": each.what,
            "quicoll.view": each.view,
            "quicoll.carrier": each.carrier,
            "quicoll.algorithm": each.algorithm,
            "quicoll.bytes": each.given,
            "quicoll.outcome": each.outcome or "aborted",
        }
        if each.settled:
            attributes["quicoll.wait_s"] = max(each.settled - each.called, 0) / 1e9
            attributes["quicoll.last_to_call"] = max(each.heard, key=lambda node: (each.heard[node], node))
        span = self._tracer.start_span(
            f"quicoll.{operation_kind(each.name)}",
            context=context,
            start_time=each.called + self._shift,
            attributes=attributes,
        )
        if each.outcome != "finished":
            span.set_status(self._trace.StatusCode.ERROR, "aborted")
        span.end(end_time=max(each.ended, each.called) + self._shift)
