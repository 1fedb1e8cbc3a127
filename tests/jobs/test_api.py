"""`generate` returns a table of the same type as its input, with the completions of a job."""

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

ROWS = 20
SHAPE: dict[str, Any] = {"batch_size": 4, "window": 4, "draft_tokens": 3, "bucket": 64, "method": "exspec"}
Settings = dict[str, Any]


@pytest.fixture
def settings(pair: jobs.Pair) -> Settings:
    return {"target": pair[0], "draft": pair[1], "max_new_tokens": 6, **SHAPE}


def table() -> pa.Table:
    texts = [" ".join(jobs.WORDS[t] for t in jobs.prompt(n)) for n in range(ROWS)]
    return pa.table({"key": list(range(ROWS)), "prompt": texts})


@pytest.fixture
def expected(settings: Settings) -> list[str]:
    target, words = AutoModelForCausalLM.from_pretrained(settings["target"]), jobs.tokenizer()
    made = [tiny.generate(target, jobs.prompt(n), 6) for n in range(ROWS)]
    return [words.decode(tokens[:-1] if tokens[-1] in tiny.ENDS else tokens) for tokens in made]


def test_a_table_gives_a_table_with_the_same_rows_in_order(settings: Settings, expected: list[str]) -> None:
    made = generate(table(), rows_per_chunk=7, **settings)
    assert made["key"].to_pylist() == list(range(ROWS))
    assert made["completion"].to_pylist() == expected


def test_a_frame_gives_a_frame(settings: Settings, expected: list[str]) -> None:
    made = generate(table().to_pandas(), **settings)
    assert isinstance(made, pd.DataFrame)
    assert list(made["completion"]) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_dataset_that_was_only_partly_written_is_refused(settings: Settings, tmp_path: Path) -> None:
    """A later run took the first blocks for the whole dataset."""
    import ray

    whole = ray.data.from_arrow([table().slice(i, 7) for i in (0, 7, 14)])
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    with pytest.raises(Exception, match="no room is left"):
        generate(whole.map_batches(jobs.BreaksOff(ROWS - 1), batch_format="pyarrow"), str(tmp_path), **settings)
    # The block that failed may have been the first to be written. Here, another block was written.
    if not list(tmp_path.glob("input/*.parquet")):
        table().slice(0, 7).to_pandas().to_parquet(tmp_path / "input" / "0.parquet")
    with pytest.raises(JobError, match="does not hold all rows of a dataset; choose another folder") as error:
        generate(whole, str(tmp_path), **settings)
    assert "exspec run" not in str(error.value)
    assert not (tmp_path / "output").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_dataset_gives_a_dataset_and_resumes(settings: Settings, expected: list[str], tmp_path: Path) -> None:
    import ray

    dataset, settings = ray.data.from_arrow(table()), settings | {"rows_per_chunk": 4}

    def completions() -> dict[int, str]:
        made = generate(dataset, str(tmp_path), **settings)
        return {row["key"]: row["completion"] for row in made.take_all()}

    assert completions() == dict(enumerate(expected))
    lost, *kept = sorted((tmp_path / "output").glob("part-*"))
    times = [path.stat().st_mtime_ns for path in kept]
    lost.unlink()
    (tmp_path / "output" / "_SUCCESS").unlink()
    assert completions() == dict(enumerate(expected))
    assert [path.stat().st_mtime_ns for path in kept] == times, "finished parts are not written again"
    for other in (table().slice(1), table().drop_columns("key")):
        with pytest.raises(JobError, match="holds other rows; choose another folder"):
            generate(ray.data.from_arrow(other), str(tmp_path), **settings)
    with pytest.raises(JobError, match="holds other files; choose another folder"):
        generate(table(), str(tmp_path), **settings)


def test_a_folder_that_holds_other_rows_is_refused(settings: Settings, tmp_path: Path) -> None:
    first = generate(table(), str(tmp_path), **settings)
    assert generate(table(), str(tmp_path), **settings).equals(first), "nothing runs again"
    with pytest.raises(JobError, match="input holds other rows; choose another folder"):
        generate(table().slice(1), str(tmp_path), **settings)


def test_wrong_arguments_are_refused(settings: Settings) -> None:
    with pytest.raises(TypeError, match=r"expected a pyarrow table, .* or a Ray Dataset, not builtins"):
        generate(["text"], **settings)
    with pytest.raises(JobError, match="unknown setting"):
        generate(table(), colour="red", **settings)


def test_messages_do_not_name_a_temporary_folder(settings: Settings, capfd: Any) -> None:
    generate(table(), **settings)
    printed = capfd.readouterr()
    assert "/tmp" not in printed.out + printed.err
    nothing = pa.table({"prompt": pa.array([None, None], pa.string())})
    with pytest.raises(JobError, match=r"failed; 2 rows: column 'prompt' is null \(rows\.parquet:0") as failed:
        generate(nothing, **settings)
    assert "/tmp" not in str(failed.value)
