"""`generate`: a table in, a table of the same kind out, its rows those of a job."""

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from transformers import AutoModelForCausalLM

from exspec.jobs import generate
from exspec.pipeline.errors import JobError
from tests import tiny
from tests.pipeline import jobs

SHAPE: dict[str, Any] = {"batch_size": 4, "window": 4, "draft_tokens": 3, "bucket": 64, "method": "exspec"}
ROWS = 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    target, draft = jobs.save_pair(tmp_path_factory.mktemp("pair"))
    return {"target": target, "draft": draft}


def table() -> pa.Table:
    texts = [" ".join(jobs.WORDS[t] for t in jobs.prompt(n)) for n in range(ROWS)]
    return pa.table({"key": list(range(ROWS)), "prompt": texts})


def expected(pair: dict[str, str]) -> list[str]:
    target, words = AutoModelForCausalLM.from_pretrained(pair["target"]), jobs.tokenizer()
    made = [tiny.generate(target, jobs.prompt(n), 6) for n in range(ROWS)]
    return [words.decode(tokens[:-1] if tokens[-1] in tiny.ENDS else tokens) for tokens in made]


@pytest.mark.usefixtures("ray_session")
def test_a_table_keeps_its_rows_and_their_order(pair: dict[str, str]) -> None:
    made = generate(table(), max_new_tokens=6, rows_per_chunk=7, **pair, **SHAPE)
    assert made["key"].to_pylist() == list(range(ROWS))
    assert made["completion"].to_pylist() == expected(pair)


@pytest.mark.usefixtures("ray_session")
def test_a_frame_comes_back_as_a_frame(pair: dict[str, str]) -> None:
    made = generate(table().to_pandas(), max_new_tokens=6, **pair, **SHAPE)
    assert isinstance(made, pd.DataFrame)
    assert list(made["completion"]) == expected(pair)


@pytest.mark.usefixtures("ray_session")
def test_a_dataset_comes_back_as_a_dataset(pair: dict[str, str], tmp_path: Path) -> None:
    import ray

    made = generate(ray.data.from_arrow(table()), str(tmp_path / "work"), max_new_tokens=6, **pair, **SHAPE)
    rows = {row["key"]: row["completion"] for row in made.take_all()}
    assert rows == dict(enumerate(expected(pair)))


@pytest.mark.usefixtures("ray_session")
def test_a_folder_that_holds_other_rows_is_refused(pair: dict[str, str], tmp_path: Path) -> None:
    first = generate(table(), str(tmp_path), max_new_tokens=6, **pair, **SHAPE)
    assert generate(table(), str(tmp_path), max_new_tokens=6, **pair, **SHAPE).equals(first), "nothing ran again"
    with pytest.raises(JobError, match="input holds other rows; give another folder"):
        generate(table().slice(1), str(tmp_path), max_new_tokens=6, **pair, **SHAPE)


def test_what_is_no_table_is_refused(pair: dict[str, str]) -> None:
    with pytest.raises(TypeError, match=r"expected a pyarrow table, .* or a Ray Dataset, not builtins"):
        generate(["text"], **pair)
    with pytest.raises(JobError, match="unknown setting"):
        generate(table(), colour="red", **pair)
