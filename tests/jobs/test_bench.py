"""`exspec bench`: what it prints can be read by a program, compares all methods alike, and names what is wrong."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from exspec.actors.engine.drafters.registry import DRAFTERS
from exspec.actors.engine.learners.clover import CloverLearner
from exspec.actors.engine.learners.learner import Growth
from exspec.actors.models import load_pair
from exspec.jobs import cli
from exspec.jobs.benchmarks.bench import read_column
from exspec.jobs.commands.tables import bench_tables
from exspec.jobs.demo import DRAFT, TARGET

SPEC_BENCH = Path(__file__).parents[3] / "shared" / "data" / "spec_bench.jsonl"
SMALL = ["--kernels", "eager", "--limit", "6", "--repeats", "1", "--batch-size", "4", "--window", "6",
         "--max-new-tokens", "12", "--threads", "1"]  # fmt: skip


def run(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, ["bench", *SMALL, *options], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.slow
def test_the_last_line_holds_every_method_and_its_figures() -> None:
    printed = run("--tune-seconds", "2")
    assert printed["settings"]["batch_size"] == 4
    assert "CPU" in printed["hardware"]
    by_name = {row["method"]: row for row in printed["methods"]}
    assert list(by_name) == ["plain", "eqspec", "exspec", "auto", "generate", "assisted"]
    for row in by_name.values():
        assert row["tokens_per_second"] > 0
        assert row["exact_vs_generate"] == row["exact_vs_float32"] == row["exact_vs_plain"] == 1.0
        assert row["tokens"] == by_name["generate"]["tokens"], "tokens are counted in the same way for all"
    assert by_name["generate"]["ratio_to_generate"] == by_name["plain"]["ratio_to_plain"] == 1.0
    for name in ("eqspec", "exspec"):
        assert 0 < by_name[name]["acceptance_rate"] <= 1
        assert 1 < by_name[name]["tokens_per_round"] <= 6
    for name in ("plain", "eqspec", "exspec"):
        assert 0 < by_name[name]["occupancy"] <= 1
        assert by_name[name]["rounds"] > 0
        assert set(by_name[name]["seconds"]) == {"admit", "group", "draft", "verify", "wait", "commit"}
    assert by_name["generate"]["occupancy"] is None


@pytest.mark.slow
def test_of_several_drafts_each_drafter_takes_the_first_that_it_can_use(tmp_path: Path) -> None:
    for heads in (1, 3):
        CloverLearner.grow(load_pair(str(TARGET), None).target, Growth(heads)).save_pretrained(tmp_path / f"{heads}")
    drafts = [word for name in (DRAFT, tmp_path / "1", tmp_path / "3") for word in ("--draft", str(name))]
    methods = "plain,exspec,exspec@model:2,exspec@clover:3"
    printed = run("--target", str(TARGET), *drafts, "--methods", methods)
    assert printed["settings"]["draft"] == drafts[1::2]
    assert [row["drafter"] for row in printed["methods"]] == ["none", "model", "model", "clover"]
    assert all(row["exact_vs_generate"] == row["exact_vs_plain"] == 1.0 for row in printed["methods"])
    assert printed["methods"][1]["acceptance_rate"] > 0.5
    drafted, rounds = printed["methods"][3]["drafted"], printed["methods"][3]["tokens"]
    assert 0 < drafted <= rounds, "the head that can draft one token"
    tuned = ("--methods", "plain,exspec:3,auto", "--drafter", "clover", "--tune-seconds", "2")
    printed = run("--target", str(TARGET), *drafts, *tuned)
    assert [row["drafter"] for row in printed["methods"]][:2] == ["none", "clover"]


@pytest.mark.slow
def test_policies_and_lengths_are_methods_of_their_own() -> None:
    """Explicit and implicit drafts, and a K by method: other drafts, the same tokens."""
    long = ("--limit", "48", "--max-new-tokens", "64", "--draft-tokens", "8", "--threshold", "0.9")
    printed = run("--methods", "exspec,exspec:2,exspec+explicit,exspec+both:4", *long)
    fixed, two, explicit, both = printed["methods"]
    assert all(row["exact_vs_generate"] == row["exact_vs_plain"] == 1.0 for row in printed["methods"])
    assert two["tokens_per_round"] <= 3
    assert explicit["wasted"] < fixed["wasted"]
    assert explicit["drafted"] < fixed["drafted"]
    assert both["tokens_per_round"] <= 5


@pytest.mark.slow
def test_bfloat16_is_exact_against_plain_in_its_own_shape() -> None:
    printed = run("--dtype", "bfloat16", "--methods", "plain,exspec", "--max-new-tokens", "40")
    assert [row["exact_vs_plain"] for row in printed["methods"]] == [1.0, 1.0]
    assert printed["methods"][0]["ratio_to_generate"] is None


@pytest.mark.slow
@pytest.mark.skipif(not SPEC_BENCH.exists(), reason="the SpecBench prompts are not at hand")
def test_bfloat16_is_exact_on_spec_bench() -> None:
    printed = run(
        "--prompts", str(SPEC_BENCH), "--prompt-column", "turns[0]", "--limit", "48",
        "--batch-size", "8", "--window", "24", "--bucket", "128", "--dtype", "bfloat16", "--methods", "exspec",
    )  # fmt: skip
    assert printed["prompts"] > 40
    assert printed["methods"][0]["exact_vs_plain"] == 1.0


def test_prompts_from_a_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["Where is my lamp?", "No rush."]}), tmp_path / "p.parquet")
    printed = run("--prompts", str(tmp_path / "p.parquet"), "--prompt-column", "question", "--methods", "plain")
    assert printed["prompts"] == 2


def test_a_columns_item_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"turns": ["a", "b"]}\n{"turns": ["c"]}\n{"turns": [3]}\n{"other": 1}\nnot json\n')
    rows = read_column(file, "turns[0]")
    assert [next(rows), next(rows)] == ["a", "c"]
    with pytest.raises(ValueError, match=r"p.jsonl, row 2, column 'turns\[0\]': expected text, not int"):
        next(rows)
    with pytest.raises(ValueError, match=r"p.jsonl, row 1: no column 'turns\[1\]', found turns"):
        list(read_column(file, "turns[1]"))
    file.write_text("not json\n")
    with pytest.raises(ValueError, match=r"p.jsonl, line 1: expected a JSON object"):
        list(read_column(file, "turns"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--methods", "plain,magic"],
            "--methods: 'magic' is unknown, expected some of plain, eqspec, exspec, auto, generate, assisted",
        ),
        (["--methods", "exspec:x"], "--methods: 'exspec:x' is unknown, expected some of plain, eqspec"),
        (["--draft", "somewhere"], "--draft: expected --target too, or neither (the demo pair)"),
        (["--target", "somewhere"], "--methods: assisted needs --draft; name the others"),
        (["--drafter", "oracle"], f"--drafter: expected one of auto, {', '.join(DRAFTERS)}, not 'oracle'"),
        (["--prompts", "missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["--max-new-tokens", "1024"], "no prompt is left that fits the model's context with 1024 new tokens"),
    ],
)
def test_bad_options_are_one_sentence_and_exit_code_2(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["exspec", "bench", *SMALL, *options])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    *stages, line = capsys.readouterr().err.strip().splitlines()
    assert message in line
    assert all(re.match(r"\d+ s: ", stage) for stage in stages)


def test_the_tables_fit_a_terminal() -> None:
    row = {
        "method": "exspec+implicit:8", "drafter": "early_exit",
        "tokens_per_second": 12586.0, "tokens_per_second_range": (12000.0, 13455.0),
        "ratio_to_generate": 11.26, "ratio_to_plain": 1.0, "exact_vs_float32": 1.0, "exact_vs_plain": 1.0,
        "acceptance_rate": 0.964, "drafted": 2566, "wasted": 119, "tokens_per_round": 5.58, "occupancy": 0.92,
        "dead_columns": 0.1,
    }  # fmt: skip
    console = Console(width=80, file=io.StringIO())
    for table in bench_tables([row], "48 prompts"):
        console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert shown.count("exspec+implicit:8") == 2
