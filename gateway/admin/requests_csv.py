"""GET /requests as CSV: a line for each Record, for a spreadsheet.

Text that a spreadsheet would take for a formula is quoted by an apostrophe: request ids are named by callers.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from io import StringIO
from typing import Any

COLUMNS = (
    *("request_id", "route", "tenant", "endpoint", "end", "status", "cause"),
    *("ttft_ms", "ttft_budget_ms", "ttft_predicted_p50_ms", "tpot_ms", "total_ms", "longest_gap_ms"),
    *("prompt_tokens_reported", "cached_tokens_reported", "output_tokens", "cost_usd"),
)
OF_CAUSE = ("over_ms", "evidence", "mend")  # members of `why`
FORMULA = ("=", "+", "-", "@", "\t", "\r")


def requests_csv(records: Iterable[Mapping[str, Any]]) -> bytes:
    text = StringIO()
    writer = csv.writer(text)
    writer.writerow(("arrived", *COLUMNS, *OF_CAUSE))
    for record in records:
        arrived = datetime.fromtimestamp(record["wall"], UTC).isoformat(timespec="milliseconds")
        why = record.get("why") or {}
        cells = (*(record[name] for name in COLUMNS), *(why.get(name) for name in OF_CAUSE))
        writer.writerow((arrived, *map(_cell, cells)))
    return text.getvalue().encode("utf-8", "replace")


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) and value != "-" else value
