"""Chunks become smaller at the end of a job: four real actors."""

from pathlib import Path

import pytest

from exspec.pipeline.output.owner import read_output
from exspec.pipeline.output.totals import Totals
from exspec.pipeline.storage import Folder
from tests.pipeline import jobs


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_four_actors_take_ever_smaller_chunks(pair: jobs.Pair, tmp_path: Path) -> None:
    """Prints how idle they were after all had begun."""
    load = jobs.ArithmeticLoader(0.05)
    assert jobs.run(pair, tmp_path, 1600, load, actors="4", rows_per_chunk="auto") == 0
    jobs.assert_complete(tmp_path / "out", 1600)
    chunks = list(read_output(Folder(str(tmp_path / "out"))).state.summaries())
    assert len({s.actor for s in chunks}) == 4
    assert min(s.rows for s in chunks) <= 8 < max(s.rows for s in chunks)
    totals = Totals()
    for s in chunks:
        totals.add(s, "")
    work = totals.work.values()
    begun, end = max(spans[0][0] for spans in work), max(spans[-1][1] for spans in work)
    idle = 1 - sum(min(b, end) - max(a, begun) for spans in work for a, b in spans if b > begun) / (4 * (end - begun))
    share = totals.tail_occupancy()
    print(f"{len(chunks)} chunks, {totals.decoding(0, end):.0f} s, idle {idle:.2%}, tail occupancy {share:.2f}")
