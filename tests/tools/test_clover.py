"""Clover without its parts."""

from pathlib import Path

import pytest

from exspec.actors.engine.drafters.clover_head import CloverHead
from tests.jobs.test_learning import run
from tests.pipeline import jobs
from tests.tools import clover


@pytest.mark.slow
def test_every_variant_is_trained_and_decoded(tmp_path: Path) -> None:
    jobs.save_deep(tmp_path / "target")
    jobs.write_shards(tmp_path / "in", rows=160, shards=8)
    run(tmp_path, tmp_path / "out")
    parts = CloverHead.step, CloverHead.forward
    found = [clover.measured(str(tmp_path / "out"), name, 160, 4) for name in clover.VARIANTS]
    assert [figures["variant"] for figures in found] == list(clover.VARIANTS)
    assert all(1 <= figures["accept_length"] <= 4 for figures in found)
    assert (CloverHead.step, CloverHead.forward) == parts, "the head is as before"
