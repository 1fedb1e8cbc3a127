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


def test_a_table_keeps_its_rows_and_their_order(pair: dict[str, str]) -> None:
    made = generate(table(), max_new_tokens=6, rows_per_chunk=7, **pair, **SHAPE)
    assert made["key"].to_pylist() == list(range(ROWS))
    assert made["completion"].to_pylist() == expected(pair)


def test_a_frame_comes_back_as_a_frame(pair: dict[str, str]) -> None:
    made = generate(table().to_pandas(), max_new_tokens=6, **pair, **SHAPE)
    assert isinstance(made, pd.DataFrame)
    assert list(made["completion"]) == expected(pair)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_dataset_comes_back_as_a_dataset(pair: dict[str, str], tmp_path: Path) -> None:
    import ray

    made = generate(ray.data.from_arrow(table()), str(tmp_path / "work"), max_new_tokens=6, **pair, **SHAPE)
    rows = {row["key"]: row["completion"] for row in made.take_all()}
    assert rows == dict(enumerate(expected(pair)))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_dataset_of_which_some_rows_were_never_written_is_no_input(pair: dict[str, str], tmp_path: Path) -> None:
    """Its first blocks were there once, and a later run took them for the whole."""
    import ray

    whole = ray.data.from_arrow([table().slice(i, 7) for i in (0, 7, 14)])
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    with pytest.raises(Exception, match="no room is left"):
        generate(whole.map_batches(jobs.BreaksOff(ROWS - 1), batch_format="pyarrow"), str(tmp_path), **pair, **SHAPE)
    # The block that failed may have been the first to be written; here another one was.
    if not list(tmp_path.glob("input/*.parquet")):
        table().slice(0, 7).to_pandas().to_parquet(tmp_path / "input" / "0.parquet")
    with pytest.raises(JobError, match="does not hold all rows of a dataset; choose another folder") as error:
        generate(whole, str(tmp_path), max_new_tokens=6, **pair, **SHAPE)
    assert "exspec run" not in str(error.value)
    assert not (tmp_path / "output").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_dataset_that_was_written_whole_resumes(pair: dict[str, str], tmp_path: Path) -> None:
    import ray

    dataset, settings = ray.data.from_arrow(table()), {"max_new_tokens": 6, "rows_per_chunk": 4, **pair, **SHAPE}
    generate(dataset, str(tmp_path), **settings)
    lost, *kept = sorted((tmp_path / "output").glob("part-*"))
    times = [path.stat().st_mtime_ns for path in kept]
    lost.unlink()
    (tmp_path / "output" / "_SUCCESS").unlink()
    made = generate(dataset, str(tmp_path), **settings)
    assert {row["key"]: row["completion"] for row in made.take_all()} == dict(enumerate(expected(pair)))
    assert [path.stat().st_mtime_ns for path in kept] == times, "what was there did not run again"
    for other in (table().slice(1), table().drop_columns("key")):
        with pytest.raises(JobError, match="holds other rows; choose another folder"):
            generate(ray.data.from_arrow(other), str(tmp_path), **settings)
    with pytest.raises(JobError, match="holds other files; choose another folder"):
        generate(table(), str(tmp_path), **settings)


def test_a_folder_that_holds_other_rows_is_refused(pair: dict[str, str], tmp_path: Path) -> None:
    first = generate(table(), str(tmp_path), max_new_tokens=6, **pair, **SHAPE)
    assert generate(table(), str(tmp_path), max_new_tokens=6, **pair, **SHAPE).equals(first), "nothing ran again"
    with pytest.raises(JobError, match="input holds other rows; choose another folder"):
        generate(table().slice(1), str(tmp_path), max_new_tokens=6, **pair, **SHAPE)


def test_what_is_no_table_is_refused(pair: dict[str, str]) -> None:
    with pytest.raises(TypeError, match=r"expected a pyarrow table, .* or a Ray Dataset, not builtins"):
        generate(["text"], **pair)
    with pytest.raises(JobError, match="unknown setting"):
        generate(table(), colour="red", **pair)


def test_without_a_folder_nothing_is_said_of_one(pair: dict[str, str], capfd: Any) -> None:
    generate(table(), max_new_tokens=6, **pair, **SHAPE)
    printed = capfd.readouterr()
    assert "/tmp" not in printed.out + printed.err
    nothing = pa.table({"prompt": pa.array([None, None], pa.string())})
    with pytest.raises(JobError, match=r"failed; 2 rows: column 'prompt' is null \(rows\.parquet:0") as failed:
        generate(nothing, max_new_tokens=6, **pair, **SHAPE)
    assert "/tmp" not in str(failed.value)
