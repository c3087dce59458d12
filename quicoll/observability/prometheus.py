"""Figures for Prometheus, in its text format, at an address of this process; by prometheus_client.

Whoever reaches the port may read them, without a certificate; so it is the loopback address unless another is named.
They are of this process alone and have a registry of their own: a program that uses prometheus_client too has its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quicoll.errors import LocalError
from quicoll.observability.figures import FIGURES
from quicoll_transport.net.addresses import format_address, parse_address

__all__ = ["PrometheusInstruments", "demand_prometheus"]


def demand_prometheus(address: str) -> Any:
    """Return the client's module.

    Args:
        address: Where figures are to be served, for the error.
    Raises:
        LocalError: The package is not there.
    """
    try:
        return import_module("prometheus_client")
    except ImportError:
        raise LocalError(
            f"metrics = {address!r}, and prometheus_client is not installed: pip install 'quicoll[metrics]'"
        ) from None


class PrometheusInstruments:
    """Figures as Prometheus reads them, served until `close`. address: where, "host:port"."""

    def __init__(self, address: str, *, job: str, node: str) -> None:
        """Begin to serve them.

        Args:
            address: "host:port"; port 0 takes a free one.
            job: The job's name, for `quicoll_node_info`.
            node: This rank's, likewise.
        Raises:
            LocalError: The package is not there, or nothing can be served there.
        """
        client = demand_prometheus(address)
        registry = client.CollectorRegistry()
        self._made: dict[str, Any] = {}
        for figure in FIGURES.values():
            name = figure.name.replace(".", "_") + {"s": "_seconds", "By": "_bytes"}.get(figure.unit, "")
            if figure.kind == "histogram":
                made: Any = client.Histogram(
                    name, figure.text, figure.labels, registry=registry, buckets=figure.buckets
                )
            elif figure.kind == "counter":
                made = client.Counter(name, figure.text, figure.labels, registry=registry)
            else:
                made = client.Gauge(name, figure.text, figure.labels, registry=registry)
            self._made[figure.name] = made
        client.Info("quicoll_node", "Whose figures these are", registry=registry).info(
            {"quicoll_job": job, "node": node}
        )
        host, port, *_ = parse_address(address)
        try:
            self._server, self._thread = client.start_http_server(int(port), str(host), registry)
        except OSError as error:
            raise LocalError(f"metrics = {address!r} cannot be served: {error.strerror or error}") from error
        self.address = format_address((str(host), int(self._server.server_port)))

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add to a counter."""
        self._child(name, labels).inc(value)

    def spread(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        self._child(name, labels).observe(value)

    def put(self, name: str, value: float, *labels: str) -> None:
        """Say how a gauge is now."""
        self._child(name, labels).set(value)

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        made = self._made[name]
        return made.labels(*labels) if labels else made
