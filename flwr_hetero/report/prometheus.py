"""A Prometheus endpoint with the figures of a run, and warnings of nodes that keep failing."""

import logging
import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

ADDRESS = "FLWR_HETERO_METRICS"
"""Environment variable with host and port of the endpoint."""
DEFAULT_ADDRESS = "127.0.0.1:9464"
FAILURES = 3
"""Rounds in a row in which a node has failed when the log has a warning."""
REPEAT_ROUNDS = 20
"""Rounds after which the warning is repeated if the node still fails."""

logger = logging.getLogger("flwr")


class Endpoint:
    """Serve the figures of the rounds of this process at ``http://ADDRESS/metrics``."""

    def __init__(self, folder: Path) -> None:
        import prometheus_client as prometheus

        # With a registry of its own, another run in this process counts from zero.
        registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, namespace="flwr_hetero", registry=registry)
        gauge = partial(prometheus.Gauge, namespace="flwr_hetero", registry=registry)
        self._rounds = counter("rounds", "Complete rounds, or server updates")
        self._wall_s = gauge("run_seconds", "Time of the run on the server's clock")
        self._bytes = counter("bytes", "Bytes of messages, by direction", ["direction"])
        self._replies = counter("replies", "Replies that counted in training", ["node"])
        self._failures = counter("failures", "Replies that are missing or bad", ["node"])
        self._seconds = gauge("message_seconds", "Seconds of the last message", ["node"])
        host, _, port = os.environ.get(ADDRESS, DEFAULT_ADDRESS).rpartition(":")
        self._server, _ = prometheus.start_http_server(int(port), host, registry)
        text = "Metrics of %s for Prometheus: http://%s:%d/metrics"
        logger.info(text, folder, host, self._server.server_port)

    def log(self, record: dict[str, Any]) -> None:
        """Add the figures of a round."""
        self._rounds.inc(bool(record["round"]))
        self._wall_s.set(record["wall_s"])
        for direction in ("down", "up"):
            self._bytes.labels(direction).inc(record[f"bytes_{direction}"])
        for node in record["weights"]:
            self._replies.labels(node).inc()
        for failure in record["failures"]:
            self._failures.labels(failure["node"]).inc()
        for node, seconds in record["latency"].items():
            self._seconds.labels(node).set(seconds)

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()


class FailingNodes:
    """Warn of nodes that fail in one round after another, without a good reply in between."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()
        self._warned: dict[str, int] = {}

    def look(self, record: dict[str, Any]) -> None:
        """Count the failures of a round, and warn where it is time."""
        for node in record["weights"]:
            self._failures.pop(node, None)
            self._warned.pop(node, None)
        # A node that fails to train and to evaluate has failed once in this round.
        reasons = {failure["node"]: failure["reason"] for failure in record["failures"]}
        for node, reason in reasons.items():
            self._failures[node] += 1
            is_due = record["round"] >= self._warned.get(node, -REPEAT_ROUNDS) + REPEAT_ROUNDS
            if self._failures[node] >= FAILURES and is_due:
                self._warned[node] = record["round"]
                text = "%s has failed in %d rounds in a row, most recently because: %s"
                logger.warning(text, node, self._failures[node], reason)
