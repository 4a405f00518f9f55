"""One row for each generation, for spreadsheets and data frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outrider.lab.configuration import PLAIN
from outrider.lab.metrics import all_metrics
from outrider.lab.record import Record, Run
from outrider.lab.wording import prompt_name

__all__ = ["columns", "table_rows"]

_RECORD = (
    "adapter", "configuration", "drafter", "rule", "temperature", "batch", "kind", "prompt",
    "repeat", "order", "seed", "prompt_tokens", "finish_reason", "cache_bytes", "peak_bytes",
    "peer", "counted", "failure", "worker",
)  # fmt: skip
_SUMMARY = (
    "emitted_tokens", "target_calls", "drafted_tokens", "accepted_tokens", "correction_tokens",
    "bonus_tokens", "rejected_rounds", "prefill_time_ms", "draft_time_ms", "verify_time_ms",
    "total_time_ms",
)  # fmt: skip


def columns() -> list[str]:
    """The names of the columns: the record's own, counts and times, then the metrics."""
    own = ["target", *_RECORD, "prompt_id", "same_tokens_as_plain", *_SUMMARY]
    return [*own, *all_metrics()]


def table_rows(run: Run) -> Iterator[dict[str, Any]]:
    """A row for each record; what is unknown is ``None``."""
    metrics = all_metrics()
    plain = {r.key[1:]: r.token_ids for r in run.records if r.configuration == PLAIN}
    for record in run.records:
        told = _told_of_peer(record) if record.peer else record.trace.summary()
        row = {"target": run.conditions.get("target")}
        row |= {name: getattr(record, name) for name in _RECORD}
        row["prompt_id"] = prompt_name(run.conditions, record.prompt)
        base = plain.get(record.key[1:])
        known = base is not None and (record.token_ids or not record.peer)
        row["same_tokens_as_plain"] = record.token_ids == base if known else None
        row |= {name: told.get(name) for name in _SUMMARY}
        row |= {name: metric.of(record) for name, metric in metrics.items()}
        yield row


def _told_of_peer(record: Record) -> dict[str, Any]:
    """All that is known of what another program did: it tells no rounds."""
    if record.failure:
        return {}
    return {"emitted_tokens": record.emitted, "total_time_ms": 1e3 * record.total_s}
