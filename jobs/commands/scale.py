"""`exspec scale`: fits scaling laws to small drafters for a job, and says which one pays."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from exspec.jobs.commands.tables import choices_table, drafters_table, times_table
from exspec.jobs.training.choice import Choice, Choices
from exspec.jobs.training.law import CONFIDENCE, Fit
from exspec.jobs.training.laws_page import render
from exspec.jobs.training.run import MADE
from exspec.jobs.training.scale import Scale, fits
from exspec.jobs.training.settings import ScaleSettings
from exspec.jobs.training.unfinished import WORK, asked_of, check_folder, held, note, write
from exspec.pipeline.progress import Progress
from exspec.pipeline.secrets import anonymous

FIGURES = "scale.json"
SIZES = (1_000, 10_000, 100_000, 1_000_000)  # rows of jobs to choose for
SHOWN = ("fits", "choice", "r2")


def scale(output: str, options: dict[str, Any], folder: Path, settings: ScaleSettings) -> None:
    """Train, measure, time, fit and choose. Prints tables, and one JSON object at last."""
    work, asked = folder / WORK, asked_of(output, settings)
    check_folder(folder, asked)
    disable_progress_bar()
    with Progress(quiet=False) as progress:
        if not (folder / FIGURES).exists():
            progress.stage("reading rows")
            run = Scale(output, options, settings, work)
            if left_out := run.rows.left_out:
                progress.say(left_out)
            note(folder, asked, run.rows.digest)
            with held(folder):
                _make(run, folder, asked, progress)
        with held(folder):
            for made in sorted(work.glob(f"*/{MADE}")):
                made.replace(folder / made.parent.name)
        shutil.rmtree(work)
        figures = json.loads((folder / FIGURES).read_text())
        progress.stop()
        progress.tell(json.dumps({name: figures[name] for name in SHOWN}))


def _make(run: Scale, folder: Path, asked: dict[str, Any], progress: Progress) -> None:
    """Write the figures and the page."""
    measured = list(run.measured(progress.stage))
    timed = list(run.timed(progress.stage))
    laws = fits(measured)
    choices, rows = Choices(laws, measured, timed, run.row_tokens), run.settings.job_rows or run.planned
    chosen = [choices.of(size) for size in sorted({*SIZES, rows})]
    pays_from = choices.pays_from
    figures = _figures(laws, choices.of(rows), pays_from)
    progress.stop()
    console = Console()
    console.print(drafters_table(measured, laws))
    for line in _formulas(laws):
        progress.tell(line)
    console.print(times_table(timed))
    console.print(choices_table(chosen))
    progress.tell(f"a training pays in {'no job' if pays_from is None else f'jobs of {pays_from:,} rows or more'}")
    page = render(measured, laws, timed, figures, asked, anonymous(run.output))
    (folder / "scale.html").write_text(page, encoding="utf-8")
    lists = {"drafters": measured, "times": timed, "choices": chosen}
    figures |= {name: [asdict(one) for one in found] for name, found in lists.items()}  # type: ignore[attr-defined]
    write(folder / FIGURES, figures | {"asked": asked})


def _figures(laws: Mapping[tuple[str, int], Fit], choice: Choice, pays_from: int | None) -> dict[str, Any]:
    """What the command prints at last."""
    found = [
        {
            "drafter": drafter,
            "draft_tokens": drafts,
            **{name: round(value, 4) for name, value in zip("abc", law.values, strict=True)},
            "r2": round(law.r2, 4),
            "confidence": CONFIDENCE,
            "points": [
                point._asdict() | {"residual": round(float(residual), 4), "left_out_error": round(error, 4)}
                for point, residual, error in zip(law.points, law.residuals, law.errors, strict=True)
            ],
        }
        for (drafter, drafts), law in laws.items()
    ]
    return {
        "fits": found,
        "choice": asdict(choice) | {"pays_from": pays_from},
        "r2": min(law.r2 for law in laws.values()),
    }


def _formulas(laws: Mapping[tuple[str, int], Fit]) -> list[str]:
    return [
        f"{drafter}, K={drafts}: accept length = {law.values[0]:.2f} + {law.values[1]:.2f} log10(tokens) "
        f"+ {law.values[2]:.2f} log10(layers), R2 {law.r2:.3f}"
        for (drafter, drafts), law in laws.items()
    ]
