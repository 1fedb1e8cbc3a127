"""The report of a job: figures from the summaries of its chunks, as JSON and as a page."""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, zip_longest
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from exspec.actors.engine import EngineStatistics
from exspec.actors.ledger import Signs
from exspec.pipeline.errors import JobError, counted
from exspec.pipeline.job.kinds import stored_job
from exspec.pipeline.output.contents import samples, tables
from exspec.pipeline.output.owner import AUDIT, REPORT, REPORT_PAGE, Output
from exspec.pipeline.output.page import render
from exspec.pipeline.output.state import State
from exspec.pipeline.output.totals import Totals
from exspec.pipeline.secrets import anonymous, redacted
from exspec.pipeline.storage import Folder

SHOWN_MISSING = 1000  # missing chunks that a report names
SAMPLES = 3  # completions on the page
REASONS = 5  # of row errors that are printed


@dataclass(frozen=True)
class Difference:
    """A row that differs from the reference. token: the first that differs. margin: lead of its logit."""

    shard: str
    row: int
    id: str
    stored: str | None
    expected: str | None
    token: int
    margin: float | None


@dataclass(frozen=True)
class Comparison:
    """against: the reference. equal: rows that have the same text and number of tokens as the reference."""

    against: str
    rows: int
    equal: int
    differences: list[Difference]


@dataclass(frozen=True)
class Audit:
    """What `exspec audit` found. sample: number of rows."""

    sample: int
    seed: int
    comparisons: list[Comparison]


@dataclass(frozen=True)
class _Earlier:
    """What a new report takes from an earlier one."""

    occupancy: Annotated[float, Field(ge=0, le=1)] | None


class Report:
    """Collects the summaries of this run's chunks as they come, and those of all files at the end."""

    def __init__(self, description: dict[str, Any], planned: int) -> None:
        self.description, self.planned = description, planned
        self.now: Counter[str] = Counter()  # this run's sums
        self.earlier: Counter[str] = Counter()  # those of its earlier phases
        self.engines: dict[str, EngineStatistics] = {}
        self.set_aside: list[str] = []
        self.totals = Totals()
        self.missing: list[str] = []
        self.answers: dict[str, Any] = {}
        self.audit: dict[str, Any] | None = None
        self.occupancy: float | None = None  # from an earlier report, if no engine ran now

    def add(self, result: dict[str, Any]) -> None:
        """Add the result of a chunk of this run."""
        self.engines[result["actor"]] = result["engine"]
        if result["set_aside"]:
            self.set_aside.append(result["set_aside"])
        else:
            (summary,) = result["file"]["chunks"]
            counts = {name: summary[name] for name in ("rows", "errors", "completion_tokens", "rounds")}
            counts |= {name: sum(summary[f"{name}_by_position"]) for name in ("drafted", "accepted")}
            self.now.update(counts)

    def begin_phase(self) -> None:
        """A phase of the job begins: progress shows its own speed."""
        self.earlier = self.now.copy()

    @property
    def phase(self) -> Counter[str]:
        """The sums of this phase."""
        return self.now - self.earlier

    def complete(self, state: State, answers: dict[str, Any]) -> None:
        """Add the chunks in files, the missing chunks, and figures of the answers."""
        self.totals = Totals()
        for summary in state.summaries():
            self.totals.add(summary, state.plan.shards[summary.shard].name)
        self.missing = [str(chunk) for chunk in islice(state.missing(), SHOWN_MISSING)]
        self.answers = answers

    @property
    def rows_now(self) -> int:
        return self.now["rows"]

    @property
    def engine(self) -> EngineStatistics:
        """The sum over this run's actors."""
        return sum(list(self.engines.values()), start=EngineStatistics())

    def line(self, signs: Signs) -> str:
        """A line of progress. As in the figures, only time during which a chunk is decoded counts."""
        now = self.phase
        tokens = max(signs.tokens, now["completion_tokens"])
        parts = [f"{tokens / signs.seconds:.0f} tokens/s"] if signs.seconds else []
        parts += [f"acceptance {now['accepted'] / now['drafted']:.2f}"] if now["drafted"] else []
        parts += [f"occupancy {self.engine.occupancy:.2f}"] if self.engines else []
        return ", ".join([*parts, f"{self.now['errors']} errors"])

    @property
    def counted(self) -> str:
        """The figure of the tokens that the job's speed counts."""
        return "prompt_tokens" if self.description.get("kind") == "embed" else "completion_tokens"

    def figures(self) -> dict[str, Any]:
        """The numbers, all from the job's files, except the occupancy of this run's engines."""
        totals, sums = self.totals, self.totals.sums
        drafted, accepted = totals.drafted, totals.accepted
        tokens, spans = sums["completion_tokens"], sum(end - start for start, end in totals.spans)
        prefilled = sums["prefill_tokens"] + sums["found_tokens"]  # 0: an older version did not count
        return {
            "planned_rows": self.planned,
            "rows": sums["rows"],
            "errors": sums["errors"],
            "errors_by_reason": totals.reasons.to_json(),
            "prompt_tokens": sums["prompt_tokens"],
            "prompt_tokens_computed": sums["prefill_tokens"] if prefilled else None,
            "prompt_tokens_found": sums["found_tokens"] if prefilled else None,
            "completion_tokens": tokens,
            "seconds": round(spans, 3),
            "began": min((start for start, _ in totals.spans), default=None),
            "tokens_per_second": round(sums[self.counted] / spans, 1) if spans else None,
            "acceptance_rate": round(sum(accepted) / sum(drafted), 4) if sum(drafted) else None,
            "mean_accepted_length": round(tokens / sums["rounds"], 3) if sums["rounds"] and tokens else None,
            "acceptance_by_position": [
                round(a / d, 4) if d else None for a, d in zip_longest(accepted, drafted, fillvalue=0)
            ],
            "forced_share": round(sums["forced"] / tokens, 4) if tokens else None,
            "occupancy": round(self.engine.occupancy, 4) if self.engine.rounds else self.occupancy,
            "tail_occupancy": None if (tail := totals.tail_occupancy()) is None else round(tail, 4),
            "completion_length": totals.length_figures(),
            "rows_by_actor": dict(totals.actors),
            "rows_by_hardware": {", ".join(kind): rows for kind, rows in totals.hardware.items()},
            "hosts": self._hosts(),
            "repeated_chunks": sums["repeated"],
            "drafters": self.description.get("drafters", []),
            "learning": self._learning(),
            "slowest_chunks": [
                {"chunk": chunk, "seconds": round(seconds, 2), "tokens": count}
                for seconds, chunk, count in sorted(totals.slowest, reverse=True)
            ],
            "answers": self.answers,
            "set_aside": [redacted(text) for text in self.set_aside],
            "missing": self.missing,
        }

    def _hosts(self) -> dict[str, dict[str, Any]]:
        """What each host decoded, by name. Older versions did not write the name."""
        return {
            name or "unknown": {
                "hardware": "; ".join(", ".join(kind) for kind in sorted(host.hardware)),
                "actors": len(host.actors),
                "rows": host.sums["rows"],
                "tokens": host.sums[self.counted],
                "seconds": round(sum(end - start for start, end in host.spans), 3),
            }
            for name, host in sorted(self.totals.hosts.items())
        }

    def _learning(self) -> dict[str, float] | None:
        """Seconds that the job spent on learning, and of decoding that this saved, by the speeds that trials measured.
        None if it has trained no drafter."""
        trained, end = self.description.get("drafters", []), self.totals.spans[-1][1] if self.totals.spans else 0.0
        if not trained:
            return None
        spent, saved, ratio = sum(made["seconds"] for made in trained), 0.0, 1.0
        for made, until in zip(trained, [*(made["at"] for made in trained[1:]), end], strict=True):
            ratio *= made["speedup"]
            saved += (ratio - 1) * self.totals.decoding(made["at"], min(until, made.get("until", until)))
        return {"seconds_spent": round(spent, 1), "seconds_saved": round(saved, 1)}

    def closing_lines(self, f: dict[str, Any], url: str) -> list[str]:
        """The lines to print at the end. f: the figures."""
        lines = [f"{f['rows']} of {f['planned_rows']} rows in {url}, {f['errors']} of them with an error"]
        reasons = self.totals.reasons.lines()
        lines += [f"  {line}" for line in reasons[:REASONS]]
        if len(reasons) > REASONS:
            lines.append(f"  and {counted(len(reasons) - REASONS, 'more reason')}: see the report")
        if f["tokens_per_second"]:
            speed = [f"{f[self.counted]} tokens in {f['seconds']:.0f} s of decoding"]
            speed.append(f"{f['tokens_per_second']} tokens/s")
            shown = ("acceptance_rate", "occupancy")
            speed += [f"{name.replace('_', ' ')} {f[name]}" for name in shown if f[name] is not None]
            lines.append(", ".join(speed))
        if learning := f["learning"]:
            took, saved = learning["seconds_spent"], learning["seconds_saved"]
            lines.append(f"learning took {took:.0f} s and saved {saved:.0f} s of decoding")
        if cached := f["prompt_tokens_found"]:
            share = cached / (cached + f["prompt_tokens_computed"])
            lines.append(f"{share:.0%} of the prompt tokens were cached: another prompt began with the same tokens")
        lines += [
            f"{field}: accuracy {a['accuracy']} over {a['rows_with_gold']} rows with a known label"
            for field, a in self.answers.items()
            if "accuracy" in a
        ]
        if len(f["rows_by_hardware"]) > 1:
            lines.append(f"mixed hardware or versions: {f['rows_by_hardware']}; see rows_by_hardware in the report")
        lines += [f"set aside: {chunk}" for chunk in f["set_aside"] or f["missing"]]
        return [*lines, f"report: {url}/_report.html"]


def rebuild(output: Output) -> Report:
    """The report of a job from its files. The occupancy, which is not in files, is from an earlier report."""
    folder, state = output.folder, output.state
    report = Report(state.description, state.plan.rows)
    job = stored_job(state.description, folder.options)
    report.complete(state, job.evaluate(partial(tables, output, intact=False)))
    report.occupancy = stored_occupancy(output)
    return report


def stored_occupancy(output: Output) -> float | None:
    """The occupancy in an earlier report; None if there is no report or it is damaged: a new one replaces it."""
    if not output.folder.exists(REPORT):
        return None
    try:
        return TypeAdapter(_Earlier).validate_json(output.folder.read(REPORT)).occupancy
    except ValidationError:
        return None


def stored_audit(folder: Folder) -> dict[str, Any] | None:
    """The audit in the folder if there is one. Raises JobError if it is damaged."""
    if not folder.exists(AUDIT):
        return None
    try:
        return asdict(TypeAdapter(Audit).validate_json(folder.read(AUDIT)))
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise JobError(f"{folder.url}/{AUDIT}: cannot be read ({reason}); remove it, or audit the job again") from error


def price(figures: dict[str, Any], gpus: float, per_gpu_hour: float) -> float | None:
    """The price of a million completion tokens, for actors with `gpus` each."""
    tokens, hours = figures["completion_tokens"], figures["seconds"] / 3600
    return len(figures["rows_by_actor"]) * gpus * hours * per_gpu_hour / tokens * 1e6 if tokens else None


def rewrite(output: Output) -> tuple[Report, dict[str, Any]]:
    """Write the report of a job again from its files. Returns it with its figures."""
    report = rebuild(output)
    figures = report.figures()
    write_report(report, figures, output)
    return report, figures


def write_report(report: Report, figures: dict[str, Any], output: Output) -> None:
    """Write both forms of the report, with the audit in the folder if there is one."""
    folder, report.audit = output.folder, stored_audit(output.folder)
    folder.write(REPORT, json.dumps(figures | {"job": report.description, "audit": report.audit}, indent=1).encode())
    shown = samples(output, SAMPLES)
    page = render(report.description, figures, report.totals, report.audit, anonymous(folder.url), shown)
    folder.write(REPORT_PAGE, page.encode())
