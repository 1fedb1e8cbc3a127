"""`exspec report`: rebuilds a job's report from its parts, and compares several jobs side by side."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from exspec.pipeline.output.owner import read_output
from exspec.pipeline.output.report import price, rewrite
from exspec.pipeline.storage import Folder

COMPARED = ("rows", "errors", "prompt_tokens_computed", "prompt_tokens_found", "completion_tokens", "seconds",
            "tokens_per_second", "acceptance_rate", "mean_accepted_length", "repeated_chunks")  # fmt: skip


def report(outputs: list[str], options: dict[str, Any], price_per_gpu_hour: float | None) -> None:
    """Rebuild the report of every output and print one table of all. The last line is a JSON list."""
    jobs = []
    for output in outputs:
        rebuilt, figures = rewrite(read_output(Folder(output, options)))
        jobs.append(_figures(output, rebuilt.description, figures, price_per_gpu_hour))
    table = Table(title="jobs")
    table.add_column("")
    for job in jobs:
        table.add_column(job["output"], overflow="fold")
    for name in jobs[0]:
        if name != "output":
            table.add_row(name.replace("_", " "), *("-" if job[name] is None else str(job[name]) for job in jobs))
    Console().print(table)
    print(json.dumps(jobs))


def _figures(
    output: str, description: dict[str, Any], figures: dict[str, Any], price_per_gpu_hour: float | None
) -> dict[str, Any]:
    job, shape = description["job"], description["shape"]
    row = {"output": output, "target": job["target"], "draft": job["draft"], "method": shape["method"],
           "drafter": shape["drafter"], "batch_size": shape["batch_size"], "draft_tokens": shape["draft_tokens"],
           "device": description["device"], "actors": len(figures["rows_by_actor"])}  # fmt: skip
    row |= {name: figures[name] for name in COMPARED}
    if price_per_gpu_hour is not None:
        gpus = 1.0 if job["num_gpus"] is None else job["num_gpus"]
        cost = price(figures, gpus, price_per_gpu_hour)
        row["cost_per_million_tokens"] = None if cost is None else round(cost, 4)
    return row
