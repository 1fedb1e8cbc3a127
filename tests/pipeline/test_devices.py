"""Jobs whose target is split over several devices of an actor. Several CPU devices stand for GPUs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from exspec.actors.engine.kv.split import layer_counts
from exspec.actors.models import load_pair
from exspec.jobs.commands.plan import plan
from exspec.pipeline.cluster import connect
from exspec.pipeline.errors import JobError
from exspec.pipeline.prepare import prepare
from exspec.pipeline.run import execute
from exspec.pipeline.shape import CPU_DEVICES, devices_of, memory_budget, stored_shape
from tests.actors.engine.drafters.test_heads import save
from tests.pipeline import jobs


@pytest.mark.parametrize("settings", [{}, {"method": "plain", "draft": None, "logprobs": 2}], ids=["exspec", "plain"])
def test_rows_are_those_of_one_device(
    settings: dict[str, Any], pair: jobs.Pair, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a job may go on with another number of devices."""
    one, two, both = (jobs.job(pair, source, tmp_path / name, **settings) for name in ("one", "two", "both"))
    assert execute(prepare(one)) == 0
    assert execute(prepare(both.model_copy(update={"limit": 30}))) == 0
    monkeypatch.setenv(CPU_DEVICES, "2")
    prepared = prepare(two)
    assert layer_counts(prepared.models.configs[0]) == (1, 1)
    assert len(prepared.memory(prepared.shape.config)) == 2
    assert execute(prepared) == 0
    assert execute(prepare(both)) == 0
    kept = ("completion", "error", "logprobs", "finish_reason")
    rows = [
        {name: [row.get(column) for column in kept] for name, row in jobs.read_output(tmp_path / place).items()}
        for place in ("one", "two", "both")
    ]
    assert len(rows[0]) == 60
    assert rows[0] == rows[1] == rows[2]


def test_a_calibrated_job_keeps_its_rows(
    pair: jobs.Pair, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_DEVICES, "2")
    measured = {"method": "auto", "drafter": "auto", "batch_size": "auto", "window": "auto", "draft_tokens": "auto"}
    made = jobs.job(pair, source, tmp_path / "out", tune_from=1, tune_seconds=3, **measured)
    assert execute(prepare(made)) == 0
    found = jobs.read_output(tmp_path / "out")
    assert all(found[str(n)]["completion"] == jobs.generated(pair[0], n) for n in range(0, 60, 7))


def test_a_window_leaves_room_for_all_rounds(pair: jobs.Pair, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shape(**settings: Any) -> tuple[int, int]:
        made = jobs.job(pair, source, source.parent / "out", **{"batch_size": "auto", "window": "auto"} | settings)
        config = prepare(made).shape.config
        return config.batch_size, config.window

    one = [shape(), shape(batch_size=16), shape(window=4)]
    monkeypatch.setenv(CPU_DEVICES, "2")
    assert one == [(8, 24), (16, 48), (4, 4)]
    assert [shape(), shape(batch_size=16), shape(window=4)] == [(8, 32), (16, 64), (4, 4)]


def test_a_job_that_began_with_other_kernels_stays_on_one_device(
    pair: jobs.Pair, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers would run eagerly, which may change the last bits."""
    made = jobs.job(pair, source, tmp_path / "out")
    prepared = prepare(made)
    eager = stored_shape(prepared.shape.config)
    assert "devices" not in eager
    packed = eager | {"kernels": "packed"}
    assert prepared.shape_of(made, prepared.plan, packed).config.kernels == "packed"
    monkeypatch.setenv(CPU_DEVICES, "2")
    assert prepared.shape_of(made, prepared.plan, eager).config.kernels == "eager"
    with pytest.raises(JobError, match=r"began with packed kernels on one device.*start over with --restart"):
        prepared.shape_of(made, prepared.plan, packed)


def test_plan_shows_each_device(
    pair: jobs.Pair, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv(CPU_DEVICES, "2")
    assert plan(jobs.job(pair, source, tmp_path / "out"), False, False, None) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "per actor: device 0: " in shown
    assert "; device 1: " in shown


def test_what_does_not_work_on_several_devices_is_refused(
    pair: jobs.Pair, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = jobs.save_deep(tmp_path / "target")[0]
    head = save("eagle3", load_pair(target, None).target, tmp_path / "head")
    with pytest.raises(ValidationError, match=r"num_gpus is 1\.5, expected a whole number, or a share of one GPU"):
        jobs.job(pair, source, tmp_path / "out", num_gpus=1.5)
    with pytest.raises(ValidationError, match="learn does not work with num_gpus 2"):
        jobs.job(pair, source, tmp_path / "out", num_gpus=2, learn="auto")
    with pytest.raises(ValidationError, match="method eqspec does not work with num_gpus 2"):
        jobs.job(pair, source, tmp_path / "out", num_gpus=2, method="eqspec")
    with pytest.raises(JobError, match="its 2 layers cannot be split over 3 devices; expected at most 2"):
        prepare(jobs.job(pair, source, tmp_path / "out", num_gpus=3))
    monkeypatch.setenv(CPU_DEVICES, "2")
    with pytest.raises(JobError, match="a head reads the target's layers, which lie on several devices"):
        prepare(jobs.job((target, str(head)), source, tmp_path / "out", method="auto"))
    with pytest.raises(JobError, match="it reads the target's layers, which lie on several devices"):
        prepare(jobs.job((pair[0], None), source, tmp_path / "out", drafter="sparse"))
    with pytest.raises(JobError, match=r"on each device \(device 0: .* device 1: "):
        prepare(jobs.job(pair, source, tmp_path / "out", memory_gib=1e-5))


def test_an_actor_has_all_its_gpus_on_one_node(pair: jobs.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes(*gpus: float) -> None:
        found = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": count}} for count in gpus]
        found.append({"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}})
        monkeypatch.setattr("ray.nodes", lambda: found)

    job = jobs.job(pair, "in", "out", device="cuda", num_gpus=4)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0, "GPU": 10.0})
    nodes(3.0, 7.0)
    assert connect.actors_that_fit(job, 1) == 1, "the third node's GPUs and those of two nodes do not add up"
    assert connect._short(job) == ""
    nodes(3.0, 3.0)
    assert connect._short(job) == "an actor needs 4 GPU on one node, but the nodes of the cluster have at most 3"
    nodes(0.0)
    assert connect._short(job) == "an actor needs 4 GPU, but the cluster has 0"
    nodes(8.0, 4.0, 2.0)
    assert connect.actors_that_fit(job, 1) == 3


def test_an_actor_uses_the_gpus_that_it_has(pair: jobs.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.job(pair, "in", "out", num_gpus=2)
    cards = tuple(torch.device("cuda", number) for number in range(2))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(JobError, match="the job splits its target over 2 GPUs, and this process has 1"):
        devices_of(job, "cuda")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert devices_of(job, "cuda") == cards
    assert devices_of(job.model_copy(update={"num_gpus": 0.5}), "cuda") == (torch.device("cuda"),)
    monkeypatch.setattr("exspec.pipeline.shape.free_memory", {cards[0]: 1000, cards[1]: 800}.__getitem__)
    assert memory_budget(job, torch.device("cuda")) == 720
