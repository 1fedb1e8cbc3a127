"""The report as an HTML page without external resources."""

import io
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2

from exspec.pipeline.job.kinds import DEFAULTS, SETTINGS
from exspec.pipeline.output.reasons import Reasons
from exspec.pipeline.output.totals import Totals

INK = "#010203"  # of lines and text in plots; the page replaces it by its own colour
BARS = "#4c78a8"
SHOWN = 30  # classes of a confusion matrix
LENGTHS = 40  # bars of the plot of lengths
TITLES = {"label": "Labels", "score": "Scores", "embed": "Embeddings"}  # by kind of job
LONG = 300  # characters shown of a completion


def template(name: str) -> jinja2.Template:
    """A page of this folder."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent, encoding="utf-8")
    return jinja2.Environment(autoescape=True, loader=loader).get_template(name)


def render(
    written: dict[str, Any],
    figures: dict[str, Any],
    totals: Totals,
    audit: dict[str, Any] | None,
    url: str,
    samples: list[dict[str, Any]],
) -> str:
    """The page. written: the description of the job. url: without secrets. samples: `id` and `completion` of rows."""
    reasons = Reasons()
    reasons.merge(figures["errors_by_reason"])
    changed, others = _settings(written)
    return template("page.html").render(
        title=f"{TITLES.get(written['kind'], 'Completions')} in {url.rstrip('/').rpartition('/')[2]}",
        subtitle=_subtitle(written, figures, url),
        verdict=_verdict(figures),
        tiles=_tiles(written, figures),
        figures=figures,
        samples=[{"id": row["id"], "text": _cut(row["completion"])} for row in samples],
        reasons=reasons.most_first,
        matrices=[(field, _confusion(field, a)) for field, a in figures["answers"].items() if "matrix" in a],
        audit=audit,
        plots=_plots(totals, figures) if figures["completion_tokens"] else [],
        numbers=_numbers(figures),
        changed=changed,
        others=others,
    )  # fmt: skip


def _subtitle(written: dict[str, Any], figures: dict[str, Any], url: str) -> str:
    from exspec.actors.engine.drafters.lookup import drafter_class

    job, shape = written["job"], written["shape"]
    models, method = job["target"], shape["method"]
    if method != "plain":
        method += f" by {shape['drafter']}"
        models += f" with {job['draft']}" if drafter_class(shape["drafter"]).needs_draft else ""
    date = f", {time.strftime('%Y-%m-%d %H:%M', time.localtime(figures['began']))}" if figures["began"] else ""
    return f"{url}{date}; {models}; {method} on {written['device']}"


def _verdict(figures: dict[str, Any]) -> str:
    rows, planned, errors = figures["rows"], figures["planned_rows"], figures["errors"]
    if rows < planned:
        return f'<span class="bad">{planned - rows:,} of {planned:,} rows are missing.</span>'
    if errors:
        return f'All {planned:,} rows are done, <span class="bad">{errors:,} of them with an error.</span>'
    return f'<span class="good">All {planned:,} rows are done, none with an error.</span>'


def _tiles(written: dict[str, Any], figures: dict[str, Any]) -> list[tuple[str, str]]:
    tiles = [(f"{figures['rows']:,}", "rows"), (duration(figures["seconds"]), "decoding")]
    read = written["kind"] == "embed"
    tokens = figures["prompt_tokens" if read else "completion_tokens"]
    tiles.append((f"{tokens:,}", "prompt tokens" if read else "tokens"))
    if figures["tokens_per_second"]:
        tiles.append((f"{figures['tokens_per_second']:,.0f}", "tokens/s"))
    if gain := gain_of(written):
        tiles.append((f"{gain:.2f} x", "plain decoding, in calibration"))
    if figures["acceptance_rate"] is not None:
        tiles.append((f"{figures['acceptance_rate']:.0%}", "of drafted tokens accepted"))
    return tiles


def gain_of(written: dict[str, Any]) -> float | None:
    """Speedup of the chosen shape over plain decoding, as measured in calibration."""
    measured = [c for c in written["calibration"] if c["measured"]]
    chosen = next((c["measured"] for c in measured if c["chosen"]), None)
    plain = max((c["measured"] for c in measured if c["method"] == "plain"), default=None)
    return chosen / plain if chosen and plain else None


def duration(seconds: float) -> str:
    """Seconds as text, in a suitable unit."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"


def _numbers(figures: dict[str, Any]) -> list[tuple[str, Any]]:
    shown = ("planned_rows", "rows", "errors", "prompt_tokens", "prompt_tokens_computed", "prompt_tokens_found",
             "completion_tokens", "seconds", "tokens_per_second", "acceptance_rate", "mean_accepted_length",
             "forced_share", "occupancy", "tail_occupancy", "repeated_chunks")  # fmt: skip
    return [(name.replace("_", " "), figures[name]) for name in shown if figures[name] is not None]


def _settings(written: dict[str, Any]) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """The settings that are not at their defaults; and the other settings, shape and versions.

    Settings that this version does not know are among the others.
    """
    given = {n: v for n, v in written["job"].items() if n in SETTINGS and (n not in DEFAULTS or DEFAULTS[n] != v)}
    rest = {n: v for n, v in written["job"].items() if n not in given}
    rest |= written["shape"] | written["versions"] | {"device": written["device"]}
    return _listed(given), _listed(rest)


def _listed(values: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(n, "-" if v is None or v == [] else v) for n, v in sorted(values.items())]


def _cut(text: str) -> str:
    return text if len(text) <= LONG else f"{text[:LONG]}..."


def _plots(totals: Totals, figures: dict[str, Any]) -> list[tuple[str, str]]:
    start, end = min(totals.bins, default=0), max(totals.bins, default=0)
    seconds = [(i - start) * totals.width for i in range(start, end + 2)]
    speeds = [totals.bins[i] / totals.width for i in range(start, end + 1)]
    values, counts = list(totals.lengths), list(totals.lengths.values())
    longest = max(values, default=1)
    edges = range(0, longest + 2 + longest // LENGTHS, 1 + longest // LENGTHS)
    rows: dict[str, int] = defaultdict(int, figures["rows_by_actor"])
    names = [f"actor {i}" for i in range(1, len(rows) + 1)]
    rounds = [totals.rounds[i] for i in range(start, end + 1)]
    accepted = [totals.bins[start + i] / n if n else 0 for i, n in enumerate(rounds)]
    swaps = [made["at"] - start * totals.width for made in figures["drafters"]]

    def by_time(values: list[float]) -> Callable[[Any], Any]:
        def paint(axes: Any) -> None:
            axes.stairs(values, seconds, fill=True)
            for at in swaps:
                axes.axvline(at, color=INK, linestyle="--")

        return paint

    marked = " (dashed: a new drafter)" if swaps else ""
    plots = [
        plot(f"Tokens by time{marked}", "seconds", "tokens/s", by_time(speeds)),
        plot("Lengths of completions", "tokens", "rows", lambda a: a.hist(values, bins=edges, weights=counts)),
    ]
    plots += [_histogram(name, found) for name, found in figures["answers"].items() if "histogram" in found]
    if len(names) > 1:
        plots.append(plot("Rows by actor", "rows", "", lambda a: a.barh(names, list(rows.values()))))
    if figures["acceptance_by_position"]:
        plots.insert(1, plot(f"Accept length by time{marked}", "seconds", "tokens/round", by_time(accepted)))
        rates = [rate or 0 for rate in figures["acceptance_by_position"]]

        def paint(axes: Any) -> None:
            axes.bar(range(1, len(rates) + 1), rates)
            axes.set_ylim(0, 1)

        plots.insert(2, plot("Accepted drafts by position", "position in the draft", "accepted / drafted", paint))
    return plots


def _histogram(name: str, found: dict[str, Any]) -> tuple[str, str]:
    counts, first, last = found["histogram"], found["from"], found["to"]
    edges = [first + i * (last - first) / len(counts) for i in range(len(counts) + 1)]
    what = name.replace("_", " ")
    return plot(f"Rows by {what}", what, "rows", lambda axes: axes.stairs(counts, edges, fill=True))


def plot(title: str, x_label: str, y_label: str, paint: Callable[[Any], Any]) -> tuple[str, str]:
    """A title and a plot of it as SVG. paint: draws on the axes of matplotlib."""
    with _drawing() as pyplot:
        from matplotlib.ticker import MaxNLocator

        figure, axes = pyplot.subplots(figsize=(8, 2.6))
        paint(axes)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return title, _svg(figure)


@contextmanager
def _drawing() -> Iterator[Any]:
    """matplotlib without a display, in the page's colours."""
    import matplotlib

    matplotlib.use("Agg")
    from cycler import cycler
    from matplotlib import pyplot

    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys(names, INK) | {"axes.prop_cycle": cycler(color=[BARS]), "font.size": 9}
    with pyplot.rc_context(style):
        yield pyplot


def _confusion(field: str, answer: dict[str, Any]) -> str:
    """The confusion matrix; colours are shares of a row. Only the first classes are shown."""
    labels = [c["label"] for c in answer["classes"]][:SHOWN]
    matrix = [row[:SHOWN] for row in answer["matrix"][:SHOWN]]
    shares = [[n / (sum(row) or 1) for n in row] for row in matrix]
    size = 2.5 + 0.45 * len(labels)
    with _drawing() as pyplot:
        figure, axes = pyplot.subplots(figsize=(size + 0.6, size))
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for y, row in enumerate(matrix):
            for x, count in enumerate(row):
                if count:
                    colour = "white" if shares[y][x] > 0.5 else "black"
                    axes.text(x, y, str(count), ha="center", va="center", color=colour)
        axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right", parse_math=False)
        axes.set_yticks(range(len(labels)), labels, parse_math=False)
        axes.set_xlabel(f"{field}, labeled", parse_math=False)
        axes.set_ylabel(f"{field}, known", parse_math=False)
        return _svg(figure)


def _svg(figure: Any) -> str:
    from matplotlib import pyplot

    figure.tight_layout()
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True)
    pyplot.close(figure)
    return buffer.getvalue()[buffer.getvalue().index("<svg") :].replace(INK, "currentColor")
