"""A replay as one HTML file: attainment with its intervals, plots of the first tokens, and the tables of the report.

No script, and no reference to another file. Text is escaped: names come from a trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path

from gateway.config.config_errors import ConfigError
from lab.replay.from_log import LoggedAttainment
from lab.replay.line_plots import Panel, PlotLine, svg
from lab.replay.player import ReplayResult, mean_rows
from lab.replay.replay_report import label

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Replay</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem }}
pre {{ overflow-x: auto; font-size: 12px }} svg {{ max-width: 100%; height: auto }}
td, th {{ padding: .1rem .8rem .1rem 0; text-align: left; font-variant-numeric: tabular-nums }}
.bar {{ width: 20rem; height: .8rem; position: relative; background: #8884 }}
.bar i {{ position: absolute; inset: 0 auto 0 0; background: #0969da }}
.bar b {{ position: absolute; inset: .25rem auto; background: #bc4c00; min-width: 2px }}
</style></head><body>
<h1>Replay</h1>
<h2>Requests within the TTFT budget</h2>
<p>The thin mark is the interval of 95%.</p>
<table><tr><th>load</th><th></th><th></th><th>met</th><th>95%</th></tr>
{bars}
</table>
{notes}
<h2>First tokens</h2>
{plots}
<h2>All figures</h2>
<pre>{report}</pre>
</body></html>
"""


def write_html(
    path: Path, results: Sequence[ReplayResult], happened: Iterable[LoggedAttainment], notes: Iterable[str], report: str
) -> None:
    """`notes`: how engines were fitted. Raises ConfigError where the file cannot be written."""
    loads = sorted({result.load for result in results})
    page = PAGE.format(
        bars="\n".join([*map(_happened, happened), *chain.from_iterable(_bars(load, results) for load in loads)]),
        notes="\n".join(f"<p>{escape(note)}</p>" for note in notes),
        plots="\n".join(_plot(load, _at(results, load)) for load in loads),
        report=escape(report),
    )
    try:
        path.write_text(page, "utf-8")
    except OSError as error:
        raise ConfigError([f"firsttoken: --html {path}: cannot be written: {error.strerror}"]) from None


def _at(results: Sequence[ReplayResult], load: float) -> dict[str, list[ReplayResult]]:
    """By name."""
    found: dict[str, list[ReplayResult]] = {}
    for result in results:
        if result.load == load:
            found.setdefault(result.name, []).append(result)
    return found


def _happened(found: LoggedAttainment) -> str:
    return _bar("as logged", f"route {found.route}", found.share, found.interval)


def _bars(load: float, results: Sequence[ReplayResult]) -> Iterator[str]:
    for name, found in _at(results, load).items():
        row = mean_rows(found)[-1]
        yield _bar(f"{load:g}", label(name), row.attainment, row.interval)


def _bar(load: str, name: str, share: float, interval: tuple[float, float]) -> str:
    low, high = interval
    drawn = f'<i style="width:{share:.1%}"></i><b style="left:{low:.1%};width:{high - low:.1%}"></b>'
    cells = (escape(load), escape(name), f'<div class="bar">{drawn}</div>', f"{share:.1%}", f"{low:.1%} to {high:.1%}")
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _plot(load: float, by_name: Mapping[str, Sequence[ReplayResult]]) -> str:
    """The share of requests with a first token, by time, of the first seed."""
    lines = [PlotLine(label(name), found[0].first_tokens, i) for i, (name, found) in enumerate(by_name.items())]
    return svg(f"first tokens at load {load:g}", Panel(f"load {load:g}", "time to first token", lines, _time))


def _time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"
