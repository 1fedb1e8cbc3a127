"""How an actor loads its pair: with the job's earlier completions, and with fewer pages for a smaller window."""

from pathlib import Path

import pytest

from exspec.actors.engine import EngineConfig
from exspec.actors.engine.config import AttentionName
from exspec.actors.engine.drafters.suffix import Suffix
from exspec.pipeline.cluster.graph import PairLoader
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from tests.pipeline import jobs


def test_an_actor_begins_with_the_latest_completions(pair: jobs.Pair, tmp_path: Path) -> None:
    jobs.write_shards(tmp_path / "in", rows=40)
    job = jobs.job(pair, tmp_path / "in", tmp_path / "out")
    assert execute(prepare(job)) == 0
    parts = [*sorted(path.name for path in (tmp_path / "out").glob("part-*")), "part-that-was-merged.parquet"]
    written = {row["completion"] for row in jobs.read_output(tmp_path / "out").values() if row["completion"]}
    config = EngineConfig(drafter="suffix", batch_size=4, window=4, bucket=64, capacity=64, prefill_columns=8)
    engine, tokenizer = PairLoader(job, config, "cpu", parts)(4)
    assert isinstance(engine.drafter, Suffix)
    for text in written:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        node, depth = engine.drafter.tree.find(tokens[:8])
        assert depth == len(tokens[:8])
        assert len(tokens) <= 8 or engine.drafter.tree.guess(node)[1] > 0
    assert PairLoader(job, config, "cpu")(4)[0].drafter.tree.children == {}, "a new job has no completions"


@pytest.mark.parametrize("attention", ["gathered", "auto"])
def test_a_smaller_window_has_fewer_pages(pair: jobs.Pair, tmp_path: Path, attention: AttentionName) -> None:
    """With either kind of attention. One row of the capacity always fits."""
    jobs.write_shards(tmp_path / "in", rows=20)
    job = jobs.job(pair, tmp_path / "in", tmp_path / "out")
    config = EngineConfig(batch_size=4, window=16, bucket=32, capacity=64, prefill_columns=8, attention=attention)
    load = PairLoader(job, config, "cpu")
    pages = {window: load(window)[0].config.page_count for window in (32, 16, 8, 2, 1)}
    assert pages == {32: 128, 16: 128, 8: 64, 2: 16, 1: 8}
    assert config.fewest_pages == 8
