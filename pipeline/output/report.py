"""The report of a job: figures derived from the parts' summaries, as JSON and as a page."""

import bisect
import heapq
import json
from collections import Counter
from functools import partial
from itertools import islice, zip_longest
from typing import Any

from exspec.actors.engine import EngineStatistics
from exspec.actors.ledger import Signs
from exspec.pipeline.output.contents import samples, tables
from exspec.pipeline.output.owner import AUDIT, REPORT, REPORT_PAGE, Output, settings
from exspec.pipeline.output.page import render
from exspec.pipeline.output.reasons import Reasons
from exspec.pipeline.output.state import State, Summary
from exspec.pipeline.secrets import anonymous, redacted

SUMMED = ("rows", "errors", "prompt_tokens", "prefill_tokens", "found_tokens", "completion_tokens", "rounds", "forced")
SHOWN_MISSING = 1000  # chunks that a report names
SAMPLES = 3  # completions on the page
REASONS = 5  # of row errors that are printed
MOST_BINS = 400  # of the plot of tokens by time


class Report:
    """Summaries folded together: those of this run as they come, those of all files at the end."""

    def __init__(self, description: dict[str, Any], planned: int) -> None:
        self.description, self.planned = description, planned
        self.now: Counter[str] = Counter()  # this run's sums
        self.engines: dict[str, EngineStatistics] = {}
        self.set_aside: list[str] = []
        self.totals = Totals()
        self.missing: list[str] = []
        self.answers: dict[str, Any] = {}
        self.audit: dict[str, Any] | None = None
        self.occupancy: float | None = None  # as an earlier report has it, where no engine runs now

    def fold(self, result: dict[str, Any]) -> None:
        """Take in what became of one chunk."""
        self.engines[result["actor"]] = result["engine"]
        if result["set_aside"]:
            self.set_aside.append(result["set_aside"])
        else:
            (summary,) = result["file"]["chunks"]
            counts = {name: summary[name] for name in ("rows", "errors", "completion_tokens")}
            counts |= {name: sum(summary[f"{name}_by_position"]) for name in ("drafted", "accepted")}
            self.now.update(counts)

    def complete(self, state: State, answers: dict[str, Any]) -> None:
        """Take in what the job's files hold in the end, which chunks they do not, and figures of the answers."""
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
        """Of this run's actors together."""
        return sum(list(self.engines.values()), start=EngineStatistics())

    def line(self, signs: Signs) -> str:
        """How the job goes; the time is that in which any chunk is at work, as in the figures."""
        now, tokens = self.now, max(signs.tokens, self.now["completion_tokens"])
        parts = [f"{tokens / signs.seconds:.0f} tokens/s"] if signs.seconds else []
        parts += [f"acceptance {now['accepted'] / now['drafted']:.2f}"] if now["drafted"] else []
        parts += [f"occupancy {self.engine.occupancy:.2f}"] if self.engines else []
        return ", ".join([*parts, f"{now['errors']} errors"])

    def figures(self) -> dict[str, Any]:
        """The numbers, all derived from the job's files, but for those of this run's engines."""
        totals, sums = self.totals, self.totals.sums
        drafted, accepted = totals.drafted, totals.accepted
        tokens, spans = sums["completion_tokens"], sum(end - start for start, end in totals.spans)
        prefilled = sums["prefill_tokens"] + sums["found_tokens"]  # 0: by a version that did not tell
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
            "tokens_per_second": round(tokens / spans, 1) if spans else None,
            "acceptance_rate": round(sum(accepted) / sum(drafted), 4) if sum(drafted) else None,
            "mean_accepted_length": round(tokens / sums["rounds"], 3) if sums["rounds"] else None,
            "acceptance_by_position": [
                round(a / d, 4) if d else None for a, d in zip_longest(accepted, drafted, fillvalue=0)
            ],
            "forced_share": round(sums["forced"] / tokens, 4) if tokens else None,
            "occupancy": round(self.engine.occupancy, 4) if self.engine.rounds else self.occupancy,
            "completion_length": _length_figures(totals.lengths),
            "rows_by_actor": dict(totals.actors),
            "rows_by_hardware": {", ".join(kind): rows for kind, rows in totals.hardware.items()},
            "repeated_chunks": sums["repeated"],
            "slowest_chunks": [
                {"chunk": chunk, "seconds": round(seconds, 2), "tokens": count}
                for seconds, chunk, count in sorted(totals.slowest, reverse=True)
            ],
            "answers": self.answers,
            "set_aside": [redacted(text) for text in self.set_aside],
            "missing": self.missing,
        }

    def closing_lines(self, f: dict[str, Any], url: str) -> list[str]:
        """What is printed at the end, from the figures `f`."""
        lines = [f"{f['rows']} of {f['planned_rows']} rows in {url}, {f['errors']} of them with an error"]
        told = self.totals.reasons.lines()
        lines += [f"  {line}" for line in told[:REASONS]]
        if len(told) > REASONS:
            lines.append(f"  and {len(told) - REASONS} more reasons: see the report")
        if f["tokens_per_second"]:
            speed = [f"{f['completion_tokens']} tokens in {f['seconds']:.0f} s of decoding"]
            speed.append(f"{f['tokens_per_second']} tokens/s")
            shown = ("acceptance_rate", "occupancy")
            speed += [f"{name.replace('_', ' ')} {f[name]}" for name in shown if f[name] is not None]
            lines.append(", ".join(speed))
        if found := f["prompt_tokens_found"]:
            share = found / (found + f["prompt_tokens_computed"])
            lines.append(f"{share:.0%} of the prompt tokens were found: another prompt of the actor began with them")
        lines += [
            f"{field}: accuracy {a['accuracy']} over {a['rows_with_gold']} rows whose label is known"
            for field, a in self.answers.items()
            if "accuracy" in a
        ]
        if len(f["rows_by_hardware"]) > 1:
            lines.append(f"mixed hardware or versions: {f['rows_by_hardware']}; see rows_by_hardware in the report")
        lines += [f"set aside: {chunk}" for chunk in f["set_aside"] or f["missing"]]
        return [*lines, f"report: {url}/_report.html"]


class Totals:
    """What the summaries of a job's chunks come to, however many there are.

    spans: times in which any chunk was at work, as seconds from start to end. bins: tokens by time, of `width` seconds.
    """

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()
        self.actors: Counter[str] = Counter()
        self.hardware: Counter[tuple[str, ...]] = Counter()
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.slowest: list[tuple[float, str, int]] = []
        self.spans: list[tuple[float, float]] = []
        self.bins: Counter[int] = Counter()
        self.width = 1 / 16
        self.reasons = Reasons()

    def add(self, s: Summary, shard: str) -> None:
        self.sums.update({name: getattr(s, name) for name in SUMMED})
        self.sums["repeated"] += s.attempt > 1
        self.reasons.merge(s.reasons)
        self.lengths.update({int(n): count for n, count in s.lengths.items()})
        self.actors[s.actor] += s.rows
        self.hardware[tuple(sorted(s.hardware.values()))] += s.rows
        self.drafted = _added(self.drafted, s.drafted_by_position)
        self.accepted = _added(self.accepted, s.accepted_by_position)
        chunk = f"{shard}, rows {s.first} to {s.first + s.rows - 1}"
        self.slowest = heapq.nlargest(5, [*self.slowest, (s.ended - s.started, chunk, s.completion_tokens)])
        _cover(self.spans, s.started, s.ended)
        self._spread(s)

    def _spread(self, s: Summary) -> None:
        """A chunk's tokens, over the time in which they came."""
        pieces = s.produced or [s.completion_tokens]
        each = (s.ended - s.started) / len(pieces)
        for n, tokens in enumerate(pieces):
            first, last = (int((s.started + (n + k) * each) / self.width) for k in (0, 1))
            for i in range(first, last + 1):
                self.bins[i] += tokens / (last - first + 1)  # type: ignore[assignment]
        while len(self.bins) > MOST_BINS:
            wider: Counter[int] = Counter()
            for i, tokens in self.bins.items():
                wider[i // 2] += tokens
            self.bins, self.width = wider, 2 * self.width


def _added(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


def _cover(spans: list[tuple[float, float]], start: float, end: float) -> None:
    """Add a span to disjoint ones in order: a job that rested between two runs was not slow."""
    low = bisect.bisect_left(spans, start, key=lambda span: span[1])
    high = bisect.bisect_right(spans, end, key=lambda span: span[0])
    if low < high:
        start, end = min(start, spans[low][0]), max(end, spans[high - 1][1])
    spans[low:high] = [(start, end)]


def rebuild(output: Output) -> Report:
    """The report of a job from its files. Only the occupancy is not in them: it stays as an earlier report has it."""
    folder, state = output.folder, output.state
    report = Report(state.description, state.plan.rows)
    job = settings(state.description, folder.options)
    report.complete(state, job.evaluate(partial(tables, output)))
    report.occupancy = stored_occupancy(output)
    return report


def stored_occupancy(output: Output) -> float | None:
    """As an earlier report has it: what engines did that run no more."""
    if not output.folder.exists(REPORT):
        return None
    found: float | None = json.loads(output.folder.read(REPORT))["occupancy"]
    return found


def price(figures: dict[str, Any], gpus: float, per_gpu_hour: float) -> float | None:
    """What a million completion tokens cost, of actors that hold `gpus` each while the job is at work."""
    tokens, hours = figures["completion_tokens"], figures["seconds"] / 3600
    return len(figures["rows_by_actor"]) * gpus * hours * per_gpu_hour / tokens * 1e6 if tokens else None


def _length_figures(lengths: Counter[int]) -> dict[str, int] | None:
    return {"median": _median(lengths), "longest": max(lengths)} if lengths else None


def _median(counts: Counter[int]) -> int:
    """The lower median of the values counted."""
    passed, half = 0, sum(counts.values()) / 2
    for value in sorted(counts):
        passed += counts[value]
        if passed >= half:
            return value
    raise ValueError("the median of nothing")


def rewrite(output: Output) -> tuple[Report, dict[str, Any]]:
    """Write the report of a job anew from its files; returns it with its figures."""
    report = rebuild(output)
    figures = report.figures()
    write_report(report, figures, output)
    return report, figures


def write_report(report: Report, figures: dict[str, Any], output: Output) -> None:
    """Write both forms of the report, with the audit that lies in the folder."""
    folder = output.folder
    if folder.exists(AUDIT):
        report.audit = json.loads(folder.read(AUDIT))
    folder.write(REPORT, json.dumps(figures | {"job": report.description, "audit": report.audit}, indent=1).encode())
    page = render(report, figures, anonymous(folder.url), samples(output, SAMPLES))
    folder.write(REPORT_PAGE, page.encode())
