"""Tables for the terminal."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from exspec.pipeline.output.page import duration

if TYPE_CHECKING:
    from exspec.jobs.training.choice import Choice
    from exspec.jobs.training.law import Fit
    from exspec.jobs.training.scale import Measured, Timed

SHOWN = 8  # candidates of a calibration
KEPT = 0.95  # of the speed, by a budget that is large enough


def bench_tables(rows: list[dict[str, Any]], title: str) -> tuple[Table, Table]:
    """Two tables of what `bench.compare` returns, by method: speed and exactness, and statistics of rounds."""
    speed = _grid(title, "method", "tokens/s", "min-max", "x generate", "x plain", "= float32", "= plain")
    rounds = _grid("rounds", "method", "drafter", "acceptance", "wasted", "tokens/round", "occupancy", "dead cols")
    for row in rows:
        low, high = row["tokens_per_second_range"]
        speed.add_row(
            row["method"],
            f"{row['tokens_per_second']:.0f}",
            f"{low:.0f}-{high:.0f}",
            _cell(row["ratio_to_generate"], ".2f"),
            _cell(row["ratio_to_plain"], ".2f"),
            f"{row['exact_vs_float32']:.1%}",
            f"{row['exact_vs_plain']:.1%}",
        )
        rounds.add_row(
            row["method"],
            row["drafter"] or "-",
            _cell(row["acceptance_rate"], ".3f"),
            str(row["wasted"]) if row["drafted"] else "-",
            _cell(row["tokens_per_round"], ".2f"),
            _cell(row["occupancy"], ".2f"),
            _cell(row["dead_columns"], ".1%"),
        )
    return speed, rounds


def _grid(title: str, *headings: str) -> Table:
    grid = Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left")
    for heading in headings:
        grid.add_column(heading, justify="left" if heading in ("method", "drafter") else "right", no_wrap=True)
    return grid


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def budgets(candidates: list[dict[str, Any]]) -> tuple[str, Table] | None:
    """The least memory that keeps the speed, as a line, and the fastest shape for each budget, by prediction. None if
    nothing was predicted."""
    best: dict[float, dict[str, Any]] = {}  # by GiB; each is faster than all that need less
    for row in sorted(candidates, key=lambda row: row["memory_mib"]):
        if row["predicted"] > max((other["predicted"] for other in best.values()), default=0):
            best[math.ceil(row["memory_mib"] / 102.4) / 10] = row
    if not best:
        return None
    most = max(row["predicted"] for row in best.values())
    enough = next(size for size, row in best.items() if row["predicted"] >= KEPT * most)
    grid = _grid("tokens/s by memory of an actor, predicted", "memory_gib", "drafter", "B", "W", "K", "tokens/s")
    for size, row in best.items():
        names = ("drafter", "batch_size", "window", "draft_tokens")
        grid.add_row(f"{size:.1f}", *(str(row[name]) for name in names), f"{row['predicted']:.0f}")
    return f"memory_gib: {enough:.1f} keeps {KEPT:.0%} of the speed", grid


def candidates_table(candidates: list[dict[str, Any]], seconds: float) -> Table:
    """The best candidates of a calibration, with their predicted and measured speed."""
    grid = Table(title=f"calibration in {seconds:.0f} s: tokens/s by shape")
    speeds = "predicted", "measured", "min-max", ""
    for heading in ("method", "drafter", "B", "W", "K", "from", "bucket", "kernels", *speeds):
        grid.add_column(heading, justify="left" if heading in ("method", "drafter", "kernels", "") else "right")
    for row in candidates[:SHOWN]:
        names = ("method", "drafter", "batch_size", "window", "draft_tokens", "draft_from", "bucket", "kernels")
        measured, turns = _cell(row["measured"], ".0f"), row["turns"]
        spread = f"{min(turns):.0f}-{max(turns):.0f}" if turns else "-"
        values = *(str(row[name]) for name in names), f"{row['predicted']:.0f}", measured, spread
        grid.add_row(*values, "chosen" * row["chosen"])
    return grid


def drafters_table(measured: "Sequence[Measured]", laws: "Mapping[tuple[str, int], Fit]") -> Table:
    """Every drafter of a scaling experiment: its accept length, that of the law, and how far the law of all others is
    off."""
    headings = "drafter", "layers", "tokens", "training", "length", "law", "left out", "% right so far, by position"
    grid = _grid("drafters, on rows held out", *headings)
    errors = {
        (drafter, drafts, point.tokens, point.layers): error
        for (drafter, drafts), law in laws.items()
        for point, error in zip(law.points, law.errors, strict=True)
    }
    for m in sorted(measured, key=lambda m: (m.drafter, m.layers, m.tokens)):
        grid.add_row(
            m.drafter,
            str(m.layers),
            f"{m.tokens:,}",
            duration(m.seconds),
            f"{m.length(m.drafts):.2f}",
            f"{laws[m.drafter, m.drafts].at(m.tokens, m.layers)[0]:.2f}",
            f"{errors[m.drafter, m.drafts, m.tokens, m.layers]:+.1%}",
            " ".join(f"{100 * share:.0f}" for share in m.survival),
        )
    return grid


def times_table(timed: "Sequence[Timed]") -> Table:
    """Milliseconds of rounds, by drafter, B and K."""
    grid = _grid("milliseconds of a round", "drafter", "layers", "B", "K", "plain", "draft", "verify", "rest")
    for t in timed:
        seconds = t.plain.seconds, t.drafting.draft, t.drafting.verify, t.drafting.rest
        shape = str(t.layers), str(t.batch_size), str(t.draft_tokens)
        grid.add_row(t.drafter, *shape, *(f"{1000 * value:.2f}" for value in seconds))
    return grid


def choices_table(choices: "Sequence[Choice]") -> Table:
    """What jobs of several sizes should train."""
    headings = "rows", "drafter", "layers", "tokens", "B", "K", "length", "ratio", "tokens/s", "x plain"
    grid = _grid("what pays, on one device (ratio: T_SD / T_AR; *: outside)", *headings)
    for c in choices:
        drafting = bool(c.draft_tokens)
        grid.add_row(
            f"{c.rows:,}",
            c.drafter,
            str(c.layers or "-"),
            f"{c.training_tokens:,}{'*' if c.outside else ''}" if drafting else "-",
            str(c.batch_size),
            str(c.draft_tokens or "-"),
            f"{c.accept_length:.2f}±{c.within:.2f}" if drafting else "-",
            f"{c.ratio:.2f}" if drafting else "-",
            f"{c.tokens_per_second:,.0f}",
            f"{c.plain_seconds / c.seconds:.2f}",
        )
    return grid
