"""Counters for Prometheus: vLLM's names for speculation, for its dashboards, and our own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outrider.core.trace import Round, Trace

__all__ = ["Metrics"]

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """All counters of one server, in a registry of their own.

    Parameters
    ----------
    model_name
        A label of the counters that have vLLM's names.

    Example
    -------
    >>> metrics = Metrics("toy")
    >>> metrics.round(Round(4, 2, 1, 0, True, 0.001, 0.02, 0.022))
    >>> 'accepted_tokens_per_pos_total{model_name="toy",position="1"} 1.0' in metrics.text()
    True
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()

        def spec(name: str, help: str, *labels: str) -> Counter:
            full = f"vllm:spec_decode_num_{name}"
            return Counter(full, help, ["model_name", *labels], registry=self.registry)

        def count(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"outrider_{name}", help, labels, registry=self.registry)

        def seconds(name: str, help: str) -> Histogram:
            return Histogram(
                f"outrider_{name}_seconds", help, registry=self.registry, buckets=_SECONDS
            )

        self._model = model_name
        self._drafts = spec("drafts", "Rounds in which something was drafted.")
        self._drafted = spec("draft_tokens", "Drafted tokens.")
        self._accepted = spec("accepted_tokens", "Drafted tokens that were emitted.")
        self._per_position = spec(
            "accepted_tokens_per_pos", "The same, by place in the draft.", "position"
        )
        for counter in (self._drafts, self._drafted, self._accepted):
            counter.labels(model_name)  # told from the start
        self.requests = count("requests", "Answered requests.", "path", "status")
        self.outputs = count("outputs", "Finished outputs.", "finish_reason")
        self._emitted = count("emitted_tokens", "Emitted tokens, by where they came from.", "kind")
        self._prompt = count("prompt_tokens", "Tokens of prompts that were fed.")
        self._calls = count("target_calls", "Rounds, each a target call for one output.")
        self._rejected = count("rejected_rounds", "Rounds in which a draft was rejected.")
        self.passes = count("steps", "Steps of the batch.")
        self.drafter_failures = count("drafter_failures", "Outputs whose drafter failed.")
        self.numerical_errors = count("numerical_errors", "Outputs with logits that are no number.")
        self.failures = count("failed_outputs", "Outputs that ended in an error.")
        self.queue_full = count("queue_full", "Requests refused since the queue was full.")
        self.disconnects = count("disconnects", "Requests whose client went away.")
        self.request_seconds = seconds("request", "From a request's arrival to its end.")
        self.ttft_seconds = seconds(
            "time_to_first_token", "From an output's turn to its first token."
        )

    def watch(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A gauge that is read when asked for."""
        Gauge(f"outrider_{name}", help, registry=self.registry).set_function(read)

    def round(self, round: Round) -> None:
        """Count one round of one output."""
        self._calls.inc()
        for kind, tokens in (
            ("accepted", round.accepted),
            ("correction", round.corrections),
            ("bonus" if round.drafted else "plain", round.bonuses),
        ):
            self._emitted.labels(kind).inc(tokens)
        self._rejected.inc(round.rejected)
        if not round.drafted:
            return
        self._drafts.labels(self._model).inc()
        self._drafted.labels(self._model).inc(round.drafted)
        self._accepted.labels(self._model).inc(round.accepted)
        for position in range(round.accepted):
            self._per_position.labels(self._model, str(position)).inc()

    def finished(self, trace: Trace, finish_reason: str) -> None:
        """Count one whole output."""
        self.outputs.labels(finish_reason).inc()
        self._prompt.inc(trace.prompt_tokens)
        if trace.ttft_s is not None:
            self.ttft_seconds.observe(trace.ttft_s)

    def text(self) -> str:
        """All of them, in Prometheus' format."""
        return generate_latest(self.registry).decode()
