"""The figure of the README: drawn from what `exspec bench` prints; what is not there is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools import figure

DOCS = Path(__file__).parents[2] / "jobs" / "docs"


def printed(**changes: Any) -> dict[str, Any]:
    methods = [
        {"method": name, "ratio_to_generate": 1.5, "ratio_to_plain": 1.25, "exact_vs_float32": share}
        for name, share in (("plain", 1.0), ("exspec+both:3", 0.9583), ("generate", 1.0))
    ]
    settings = {"batch_size": 4, "draft_tokens": 3, "dtype": "float32"}
    return {"settings": settings, "hardware": "a CPU", "prompts": 6, "methods": methods} | changes


def test_it_is_drawn_from_the_last_line(tmp_path: Path) -> None:
    bench, svg = tmp_path / "bench.txt", tmp_path / "speed.svg"
    bench.write_text(f"a table\nof figures\n{json.dumps(printed())}\n", encoding="utf-8")
    assert figure.main([str(bench), str(svg)]) == 0
    first = svg.read_bytes()
    assert b"<svg" in first
    bench.write_text(json.dumps(printed(), indent=1), encoding="utf-8")
    assert figure.main([str(bench), str(svg)]) == 0
    assert svg.read_bytes() == first, "the same figures give the same file"


def test_the_figure_of_the_readme_is_that_of_the_figures_beside_it(tmp_path: Path) -> None:
    """Where this fails: python -m tests.tools.figure jobs/docs/speed.json jobs/docs/speed.svg"""
    figure.draw(figure.read(DOCS / "speed.json"), tmp_path / "speed.svg")
    words = [line for line in (DOCS / "speed.svg").read_text().splitlines() if line.lstrip().startswith("<!--")]
    assert words, "the texts of the figure are in it as comments"
    assert [line for line in (tmp_path / "speed.svg").read_text().splitlines() if line.lstrip().startswith("<!--")] == (
        words
    )


def without(name: str) -> dict[str, Any]:
    bench = printed()
    for values in (bench, bench["settings"], bench["methods"][1]):
        values.pop(name, None)
    return bench


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected what exspec bench prints, whose last line is a JSON object"),
        ("no JSON", "expected what exspec bench prints, whose last line is a JSON object"),
        ("[1]", "bench.json: no field 'prompts', which exspec bench writes"),
        (json.dumps(without("hardware")), "bench.json: no field 'hardware', which exspec bench writes"),
        (json.dumps(without("dtype")), "bench.json: settings: no field 'dtype', which exspec bench writes"),
        (json.dumps(without("method")), "bench.json: methods[1]: no field 'method', which exspec bench writes"),
        (json.dumps(without("exact_vs_float32")), "method exspec+both:3: no field 'exact_vs_float32', which exspec"),
        (json.dumps(printed(methods=[])), "methods is empty, expected one object for each method"),
        (
            json.dumps(printed(methods=[printed()["methods"][0] | {"ratio_to_generate": None}])),
            "method plain: ratio_to_generate is null, expected a number; run exspec bench with generate among",
        ),
    ],
)
def test_what_is_missing_is_named(content: str, message: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "bench.json").write_text(content, encoding="utf-8")
    assert figure.main([str(tmp_path / "bench.json"), str(tmp_path / "speed.svg")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "speed.svg").exists()


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: Any) -> None:
    assert figure.main([str(tmp_path / "none.json"), "speed.svg"]) == 2
    assert "none.json" in capsys.readouterr().err
    assert figure.main([]) == 2
    assert "usage" in capsys.readouterr().err
