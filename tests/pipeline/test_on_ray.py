"""The main job on a real Ray: pools of actors that grow and share, and models that actors load."""

import json
import os
import re
import time
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest
import ray
from transformers import AutoModelForCausalLM

from exspec.actors.engine import shared_code
from exspec.actors.ledger import Signs
from exspec.pipeline import progress, run
from exspec.pipeline.cluster import ray_ledger
from exspec.pipeline.cluster.ray_ledger import RayLedger
from exspec.pipeline.errors import JobError
from exspec.pipeline.prepare import prepare
from exspec.pipeline.progress import Progress
from exspec.pipeline.run import execute
from tests import tiny
from tests.pipeline import jobs

pytestmark = pytest.mark.usefixtures("ray_session")


def test_rows_in_are_rows_out(pair: jobs.Pair, tmp_path: Path) -> None:
    assert jobs.run(pair, tmp_path, rows=60) == 0
    jobs.assert_complete(tmp_path / "out", 60)
    report = jobs.report(tmp_path / "out")
    assert (report["rows"], report["errors"], report["missing"]) == (60, 0, [])
    page = (tmp_path / "out" / "_report.html").read_text()
    assert page.count("<svg") == 2
    assert "Tokens by time" in page
    assert "Lengths of completions" in page
    assert not re.search("http://(?!www.w3.org|purl.org|creativecommons.org)", page)
    schemas = [pq.read_schema(path) for path in (tmp_path / "out").glob("part-*")]
    assert len({str(schema.remove_metadata()) for schema in schemas}) == 1
    assert schemas[0].field("acceptance_rate").metadata[b"description"] == b"accepted / drafted"


@pytest.mark.slow
def test_an_elastic_pool_grows_and_loses_nothing(pair: jobs.Pair, tmp_path: Path) -> None:
    assert jobs.run(pair, tmp_path, 60, jobs.ArithmeticLoader(0.2), actors="1:2", rows_per_chunk=2) == 0
    jobs.assert_complete(tmp_path / "out", 60)
    assert len(jobs.report(tmp_path / "out")["rows_by_actor"]) == 2


@pytest.mark.slow
def test_an_idle_actor_leaves_at_the_end(pair: jobs.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Data ends it while the other actor decodes the last chunk. It used to count as missing."""
    seen: list[Signs] = []

    class Watched(RayLedger):
        def signs(self) -> Signs:
            seen.append(super().signs())
            return seen[-1]

    class Together(jobs.ArithmeticLoader):
        """Both actors are ready at the same time."""

        def __call__(self, window: int) -> Any:
            (ready / str(os.getpid())).touch()
            while len(list(ready.iterdir())) < 2:
                time.sleep(0.05)
            return super().__call__(window)

    monkeypatch.setattr(run, "RayLedger", Watched)
    monkeypatch.setattr(progress, "EVERY", 0.1)
    (ready := tmp_path / "ready").mkdir()
    jobs.write_shards(tmp_path / "in", rows=8, shards=2)  # the first chunk takes 40 steps, the second 7
    job = jobs.job(pair, tmp_path / "in", tmp_path / "out", actors="2", rows_per_chunk=4)
    assert execute(prepare(job), load=Together(0.3), progress=Progress(quiet=False)) == 0
    assert (0, 2) in {(signs.left, signs.actors) for signs in seen}
    assert (1, 1) in {(signs.left, signs.actors) for signs in seen}


def test_a_real_pair_gives_what_generate_gives(pair: jobs.Pair, source: Path, tmp_path: Path) -> None:
    """With speculation, Ray and chunks, greedy tokens in float32 equal those of transformers."""
    job = jobs.job(pair, source, tmp_path / "out", actors="2", limit=30)
    assert execute(prepare(job)) == 0
    target = AutoModelForCausalLM.from_pretrained(pair[0])
    rows = jobs.read_output(tmp_path / "out")
    assert len(rows) == 30
    for n in range(30):
        tokens = tiny.generate(target, jobs.prompt(n), jobs.budget(n))
        ended = tokens[-1] in tiny.ENDS
        row = rows[str(n)]
        assert row["completion"] == jobs.generated(pair[0], n)
        assert row["completion_tokens"] == len(tokens)
        assert row["finish_reason"] == ("stop" if ended else "length")
        assert row["prompt_tokens"] == len(jobs.prompt(n))
        assert row["accepted"] == sum(row["accepted_by_position"])


@pytest.mark.slow
def test_what_is_auto_is_measured_once_and_kept(
    pair: jobs.Pair, source: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job stores its shape: a resumed run uses it, does not calibrate, and gives the same rows. What calibration
    compiles goes to the ledger."""
    shared: list[Any] = []
    monkeypatch.setattr(RayLedger, "share", lambda _, machine, files: shared.append((machine, *sorted(files))))
    auto = dict.fromkeys(("method", "drafter", "batch_size", "window", "draft_tokens", "draft_from", "bucket"), "auto")
    out = tmp_path / "out"
    job = jobs.job(pair, source, out, tune_from=60, tune_seconds=1.5, **auto)
    assert set(prepare(job).shape.free) == {*auto, "kernels", "prefill"}
    assert execute(prepare(job)) == 0
    assert "(measured in " in capsys.readouterr().out
    [(machine, *files)] = shared
    assert machine == shared_code.machine()
    assert any(name.startswith("kernels/kernels-") for name in files) == tiny.in_place()
    stored = json.loads((out / "_job.json").read_text())
    assert {row["method"] for row in stored["calibration"]} == {"plain", "exspec"}
    first = jobs.read_output(out)
    for path in list(out.glob("part-*"))[::2]:
        path.unlink()
    resumed = prepare(job)
    assert resumed.shape.free == ()
    assert stored["shape"].items() <= vars(resumed.shape.config).items()
    assert execute(resumed) == 0
    assert len(shared) == 1
    again = jobs.read_output(out)
    assert {n: row["completion"] for n, row in again.items()} == {n: row["completion"] for n, row in first.items()}
    for n in range(0, 60, 7):
        assert again[str(n)]["completion"] == jobs.generated(pair[0], n)


def test_code_goes_through_the_ledger_to_machines_of_the_same_kind() -> None:
    ledger = RayLedger()
    ledger.share("one", {"a": b"code"})
    assert ledger.claim("one", {"a", "b"}) == {"b"}
    assert ledger.claim("one", {"b"}) == set(), "the first actor gives it"
    assert (ledger.known("one"), ledger.known("other")) == ({"a"}, set())
    assert ledger.code("one", {"a"}) == {"a": b"code"}


def test_a_broken_connection_to_the_ledger_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead ledger ends the job."""
    ledger = RayLedger()
    monkeypatch.setattr(ray_ledger, "RETRY", 0.0)
    ledger.begin("part")
    with monkeypatch.context() as patch:
        broken = [ray.exceptions.ActorUnavailableError("the connection broke", None)] * 2
        patch.setattr(ray, "get", Mock(side_effect=[*broken, ray.get(ledger._actor.begun.remote("part"))]))
        assert ledger.begun("part") is True
    ray.kill(ledger._actor)
    with pytest.raises(JobError, match="the process of the ledger, which counts the attempts at each chunk, has died"):
        all(ledger.begun("part") for _ in count())  # until Ray has ended it


def test_a_device_that_the_cluster_lacks_is_refused(pair: jobs.Pair, tmp_path: Path) -> None:
    """Ray itself would wait for a GPU for ever."""
    with pytest.raises(JobError, match="an actor needs 1 GPU, but the cluster has 0"):
        jobs.run(pair, tmp_path, rows=60, device="cuda")


@pytest.mark.slow
def test_few_chunks_are_shared_out_among_the_actors(pair: jobs.Pair, tmp_path: Path) -> None:
    """The first actor that is ready would have room for all of them."""
    (tmp_path / "loaded").mkdir()
    load = jobs.TogetherLoader(tmp_path / "loaded", actors=2)
    assert jobs.run(pair, tmp_path, 32, load, actors="2", chunks_in_flight=8) == 0
    jobs.assert_complete(tmp_path / "out", 32)
    assert len(jobs.report(tmp_path / "out")["rows_by_actor"]) == 2
