"""Tables for the terminal."""

from typing import Any

from rich.table import Table

SHOWN = 8  # candidates of a calibration


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
