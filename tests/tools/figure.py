"""The figure of the README: `python -m tests.tools.figure BENCH.json FIGURE.svg`, from what `exspec bench` printed."""

import json
import sys
from pathlib import Path
from typing import Any

from exspec.pipeline.errors import JobError

TEXT, OURS, THEIRS = "#777c84", "#4c78a8", "#9aa0a8"  # mid-tones: they can be read on a light and on a dark page
THEIR_NAMES = {"generate": "transformers, generate", "assisted": "transformers, assisted"}
PANELS = {"ratio_to_generate": "tokens/s, x generate", "ratio_to_plain": "tokens/s, x plain decoding"}
EQUAL = "exact_vs_float32"
HEADER = ("prompts", "hardware", "settings")
SETTINGS = ("batch_size", "draft_tokens", "dtype")


def read(file: Path) -> dict[str, Any]:
    """The last JSON object of a file: all of it, or its last line. Raises JobError naming the field that is missing."""
    text = file.read_text(encoding="utf-8").strip()
    try:
        bench = json.loads(text if text.startswith("{") else text.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise JobError(f"{file}: expected what exspec bench prints, whose last line is a JSON object") from error
    place = str(file)
    for name in (*HEADER, "methods"):
        _field(bench, name, place)
    for name in SETTINGS:
        _field(bench["settings"], name, f"{place}: settings")
    if not bench["methods"]:
        raise JobError(f"{place}: methods is empty, expected one object for each method")
    for number, method in enumerate(bench["methods"]):
        of = f"{place}: method {_field(method, 'method', f'{place}: methods[{number}]')}"
        for name in (*PANELS, EQUAL):
            if _field(method, name, of) is None:
                base = name.removeprefix("ratio_to_")
                raise JobError(f"{of}: {name} is null, expected a number; run exspec bench with {base} among --methods")
    return dict(bench)


def _field(values: Any, name: str, place: str) -> Any:
    if not isinstance(values, dict) or name not in values:
        raise JobError(f"{place}: no field {name!r}, which exspec bench writes")
    return values[name]


def draw(bench: dict[str, Any], file: Path) -> None:
    """Write the figure: for each method its speed over that of `generate` and of plain decoding, and its exactness."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = bench["methods"]
    names = [THEIR_NAMES.get(m["method"], f"exspec, {m['method']}") for m in methods]
    colours = [THEIRS if m["method"] in THEIR_NAMES else OURS for m in methods]
    style: Any = {"font.size": 9, "text.color": TEXT, "ytick.color": TEXT, "svg.hashsalt": "exspec"}
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(1, 2, sharey=True, figsize=(8.2, 0.95 + 0.3 * len(methods)))
        for axes, (field, title) in zip(panels, PANELS.items(), strict=True):
            _panel(axes, title, names, [m[field] for m in methods], colours)
        _beside(panels[-1], [f"{m[EQUAL]:.1%}" for m in methods])
        figure.text(0.5, 0.02, _told(bench), ha="center", va="bottom", fontsize=8)
        figure.subplots_adjust(left=0.205, right=0.85, top=0.82, bottom=0.13, wspace=0.16)
        figure.savefig(file, transparent=True, metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)


def _panel(axes: Any, title: str, names: list[str], values: list[float], colours: list[str]) -> None:
    bars = axes.barh(range(len(names)), values, color=colours, height=0.62)
    axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3)
    axes.axvline(1, color=TEXT, linewidth=0.7, linestyle=":", zorder=0)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first on top
    axes.set_xlim(0, 1.18 * max(values))
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _beside(axes: Any, texts: list[str]) -> None:
    """A column right of the bars."""
    axes.text(1.04, 1.03, "equal to float32\ngenerate", transform=axes.transAxes, va="bottom", fontsize=9)
    for row, text in enumerate(texts):
        axes.text(1.04, row, text, transform=axes.get_yaxis_transform(), va="center")


def _told(bench: dict[str, Any]) -> str:
    s = bench["settings"]
    shape = f"B = {s['batch_size']}, K = {s['draft_tokens']}, {s['dtype']}"
    return f"{bench['prompts']} prompts, {shape}, {bench['hardware']}; medians of the ratios within each turn"


def main(words: list[str]) -> int:
    if len(words) != 2:
        print("usage: python -m tests.tools.figure BENCH.json FIGURE.svg", file=sys.stderr)
        return 2
    try:
        draw(read(Path(words[0])), Path(words[1]))
    except (JobError, OSError) as error:
        print(f"exspec: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
