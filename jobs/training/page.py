"""The page of a training: its curves, figures and settings."""

from collections.abc import Sequence
from typing import Any

from exspec.jobs.training.trainer import Record
from exspec.pipeline.output.page import plot, template


def render(records: Sequence[Record], figures: dict[str, Any], settings: dict[str, Any], output: str) -> str:
    """The page. figures: what the command prints. output: whose rows were learned."""
    seconds = [record.seconds for record in records]

    def right(axes: Any) -> None:
        for i, share in enumerate(zip(*(record.right for record in records), strict=True), 1):
            axes.plot(seconds, share, label=str(i), alpha=1 / i**0.5)
        axes.set_ylim(0, 1)
        axes.legend(title="position", fontsize=7, title_fontsize=7)

    plots = [
        plot("Loss", "seconds", "loss", lambda axes: axes.plot(seconds, [r.loss for r in records])),
        plot("Right tokens by position in the draft", "seconds", "share", right),
        plot("Accept length", "seconds", "tokens", lambda axes: axes.plot(seconds, [r.accept_length for r in records])),
    ]
    return template("base.html").render(
        title=f"Training of {figures['drafter']}",
        subtitle=f"on rows of {output}",
        verdict="Curves are of rows that are learned. The figures are of rows that were held out.",
        tiles=[
            (figures["accept_length"], "tokens per round"),
            (f"{figures['acceptance_rate']:.0%}", "of drafted tokens accepted"),
            (f"{figures['rows']:,}", "rows learned"),
            (f"{figures['seconds']:,.0f} s", "training"),
        ],
        plots=plots,
        numbers=sorted(figures.items()),
        changed=sorted((name, value) for name, value in settings.items() if value not in (None, False)),
        others=[],
    )
