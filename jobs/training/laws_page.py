"""The page of a scaling experiment."""

from collections.abc import Callable, Mapping, Sequence
from math import log2, log10
from statistics import median
from typing import Any

from exspec.jobs.training.law import Fit
from exspec.jobs.training.scale import Measured, Timed
from exspec.pipeline.errors import counted
from exspec.pipeline.output.page import plot, template


def render(
    measured: Sequence[Measured], laws: Mapping[tuple[str, int], Fit], timed: Sequence[Timed], figures: dict[str, Any],
    settings: dict[str, Any], output: str,
) -> str:  # fmt: skip
    """The page. figures: what the command prints. output: whose rows were learned."""
    choice, plots = figures["choice"], []
    for drafter in dict.fromkeys(m.drafter for m in measured):
        own = [m for m in measured if m.drafter == drafter]
        law, shapes = laws[drafter, own[0].drafts], [t for t in timed if t.drafter == drafter]
        title = f"Accept length of {drafter}, measured and by the law (R2 {law.r2:.3f})"
        plots.append(plot(title, "log10 of training tokens", "tokens per round", _lengths(own, law)))
        title = f"Speed with the fastest {drafter} (dashed: plain)"
        plots.append(plot(title, "log2 of B", "tokens/s", _speeds(own, shapes)))
    trained = f"with {choice['drafter']} of {counted(choice['layers'], 'layer')}"
    verdict = f"A job of {choice['rows']:,} rows should decode {trained if choice['layers'] else choice['drafter']}."
    if choice["outside"]:
        verdict += f" Outside the measured range: {'; '.join(choice['outside'])}."
    return template("base.html").render(
        title="Scaling laws of drafters",
        subtitle=f"on rows of {output}",
        verdict=verdict,
        tiles=[
            (f"{choice['accept_length']:.2f}", "tokens per round, expected"),
            (f"{choice['tokens_per_second']:,.0f}", "tokens/s"),
            (f"{choice['plain_seconds'] / choice['seconds']:.2f}", "x plain, training included"),
            (f"{figures['r2']:.3f}", "R2"),
        ],
        plots=plots,
        numbers=sorted((name.replace("_", " "), _shown(value)) for name, value in choice.items() if name != "outside"),
        changed=sorted((name, value) for name, value in settings.items() if value not in (None, False)),
        others=[],
    )


def _shown(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _length(made: Measured) -> float:
    return made.length(made.drafts)


def _lengths(own: Sequence[Measured], law: Fit) -> Callable[[Any], None]:
    """Paints points, and the law as lines, by number of layers: the more, the darker."""

    def paint(axes: Any) -> None:
        most = max(m.layers for m in own)
        for layers in sorted({m.layers for m in own}):
            found = sorted((m.tokens, _length(m)) for m in own if m.layers == layers)
            at, dark = [log10(tokens) for tokens, _ in found], 0.3 + 0.7 * layers / most
            axes.plot(at, [law.at(tokens, layers)[0] for tokens, _ in found], alpha=dark)
            axes.scatter(at, [length for _, length in found], alpha=dark, label=str(layers))
        axes.legend(title="layers", fontsize=7, title_fontsize=7)

    return paint


def _speeds(own: Sequence[Measured], shapes: Sequence[Timed]) -> Callable[[Any], None]:
    """Paints tokens/s by B with the drafters that have learned most, and without (dashed)."""
    most = {m.layers: m for m in sorted(own, key=lambda m: m.tokens)}

    def paint(axes: Any) -> None:
        rows = sorted({t.batch_size for t in shapes})
        those = [[t for t in shapes if t.batch_size == b] for b in rows]
        fastest = [max(t.drafting.at(most[t.layers].length(t.draft_tokens)) for t in group) for group in those]
        at = [log2(b) for b in rows]
        axes.plot(at, fastest, marker="o")
        axes.plot(at, [median(t.plain.speed for t in group) for group in those], marker="o", linestyle="--")

    return paint
