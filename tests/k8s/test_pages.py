"""The README and the pages are true: manifests render, commands and links exist, figures are those of the engine."""

import itertools
import os
import re
import shlex
import textwrap
from math import floor, log10
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig

from exspec.actors.engine import EngineConfig
from exspec.actors.engine.shape.candidates import PREFILLS, ROWS
from exspec.actors.engine.shape.plan import SHARE, fit, plan_memory
from exspec.actors.engine.shape.roofline import CARDS, Roofline, Sizes, draftings
from exspec.jobs.benchmarks.shapes import SHAPES
from exspec.jobs.cli import app
from exspec.jobs.commands.plan import card_rows
from exspec.pipeline.shape import LONGEST
from tests.k8s import checks, policy, schemas
from tests.k8s.manifests import K8S, OVERLAYS, ROOT, Manifest, combinations, needs_renderer, of_kind, one, render

PAGES = [K8S / "README.md", *sorted((K8S / "docs").glob("*.md"))]
FILE = re.compile(r"^( +)# (\S+\.yaml)\n((?:\1.*\n)+)", re.MULTILINE)
TEXTS = {page: page.read_text().replace("REGISTRY", "registry.example.com") for page in PAGES}
FILES = {(page, name): textwrap.dedent(body) for page in PAGES for _, name, body in FILE.findall(TEXTS[page])}
FILES |= {(K8S / "docs" / "models.md", "fill.yaml"): (K8S / "docs" / "fill.yaml").read_text()}
FOLDERS = [(page, Path(name).parent) for page, name in FILES if Path(name).name == "kustomization.yaml"]
OBJECTS = [(page, name) for page, name in FILES if "/" not in name]


def test_the_readme_has_every_pair_of_overlays() -> None:
    assert set(map(frozenset, combinations())) == set(map(frozenset, itertools.combinations(OVERLAYS, 2)))


def rendered(page: Path, folder: Path, place: Path) -> list[Manifest]:
    """The objects of a folder on a page. If the page has no job file, the base's job file is used."""
    place = place.resolve()
    (place / "job.yaml").write_text((K8S / "base" / "job.yaml").read_text())
    for (where, name), body in FILES.items():
        if (where, Path(name).parent) == (page, folder):
            (place / Path(name).name).write_text(body.replace("../k8s", os.path.relpath(K8S, place)))
    return render(place)


@needs_renderer
@pytest.mark.parametrize(("page", "folder"), FOLDERS, ids=[f"{page.stem}-{folder}" for page, folder in FOLDERS])
def test_a_folder_of_a_page_is_accepted(page: Path, folder: Path, tmp_path: Path) -> None:
    assert checks.problems(rendered(page, folder, tmp_path)) == []


@needs_renderer
def test_the_folders_change_what_the_pages_say(tmp_path: Path) -> None:
    made = {}
    for page, folder in FOLDERS:
        place = tmp_path / f"{page.stem}-{folder}"
        place.mkdir()
        made[place.name] = rendered(page, folder, place)
    environments = {name: one(objects, "ConfigMap", f"exspec-environment{'-b' * name.endswith('-b')}")["data"]
                    for name, objects in made.items()}  # fmt: skip
    assert environments["README-mine"]["AWS_ENDPOINT_URL"] == "https://s3.example.com"
    assert environments["clouds-aks"]["AZURE_STORAGE_ACCOUNT_NAME"] == "mine"
    assert environments["models-sealed"]["HF_HUB_OFFLINE"] == "1"
    policies = {item["metadata"]["name"] for item in of_kind(made["models-sealed"], "NetworkPolicy")}
    assert "storage-and-hub" not in policies
    assert "object-store" in policies
    for name in ("clouds-eks", "clouds-gke", "clouds-aks"):
        (account,) = of_kind(made[name], "ServiceAccount")
        assert "example.com" not in str(account)
        assert "000000" not in str(account)
    cluster = one(made["models-mine"], "RayJob")["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]):
        volumes = {v.pop("name"): v for v in group["template"]["spec"]["volumes"]}
        assert volumes["models"] == {"persistentVolumeClaim": {"claimName": "exspec-models"}}
        assert {"job", "models", "home", "tmp", "shm"} == set(volumes)


@pytest.mark.parametrize(("page", "name"), OBJECTS, ids=[name for _, name in OBJECTS])
def test_an_object_of_a_page_is_valid(page: Path, name: str) -> None:
    item = yaml.safe_load(FILES[page, name])
    if item["kind"] == "Workflow":  # there is no schema for Argo; the object that it creates is KubeRay's
        (template,) = item["spec"]["templates"]
        item = yaml.safe_load(template["resource"]["manifest"])
        item["metadata"]["name"] = item["metadata"].pop("generateName")
    if "clusterSelector" in item["spec"]:
        assert schemas._ray(item) == []
        assert {"rayClusterSpec", "backoffLimit", "shutdownAfterJobFinishes"}.isdisjoint(item["spec"])
        return
    assert schemas.problems(item) == []
    template = item["spec"]["template"]
    wrong = [*policy._pod(template), *policy._container(template["spec"]["containers"][0])]
    assert wrong == ["expected a ServiceAccount and a priority class"], "it runs before the job's own exist"


COMMAND = re.compile(
    r"(?:^|(?<!-n)[ \"])exspec ((?:submit|run|plan|label|status|logs|cancel|messages|audit)\b[^#|&;)]*)"
)


def commands() -> list[tuple[Path, str]]:
    found = []
    for page, text in TEXTS.items():
        joined = re.sub(r"\\\n\s*", "", text)
        lines = [line.strip() for line in joined.splitlines() if line.startswith("    ")]
        lines += re.findall(r"`([^`\n]+)`", joined)
        lines += [" ".join(yaml.safe_load(body)["spec"]["entrypoint"].split())
                  for (where, _), body in FILES.items() if where == page and "\n  entrypoint: >-" in body]  # fmt: skip
        for line in lines:
            found += [(page, f"exspec {rest}") for rest in COMMAND.findall(line)]
    return found


def test_commands_on_the_pages_have_their_options() -> None:
    from typer.main import get_command

    known = get_command(app).commands  # type: ignore[attr-defined]
    seen = set()
    for page, line in commands():
        words = shlex.split(line.split('"')[0])[1:]
        command, allowed = "", set()
        for word in words:
            if word in known and (not command or command == "submit"):
                command = word
                allowed = {option for p in known[word].params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
            elif word.startswith("--") and word != "--":
                assert word.partition("=")[0] in allowed, f"{page.name}: {line}: {command} has no {word}"
        seen.add(command)
    assert {"run", "plan", "label"} <= seen


def test_the_benchmark_knows_the_pairs_on_the_pages() -> None:
    found = re.findall(r"python -m exspec\.jobs\.benchmarks\.synthetic (.*)$", "\n".join(TEXTS.values()), re.MULTILINE)
    assert found
    for line in found:
        pair, _ = shlex.split(line)
        assert set(pair.split(":")) <= set(SHAPES)


def test_python_on_the_pages_parses() -> None:
    found = [
        body
        for text in TEXTS.values()
        for body in re.findall(r"^    # \w+\.py\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    ]
    assert len(found) == 1
    for body in found:
        compile(textwrap.dedent(body), "page", "exec")


def test_links_work() -> None:
    for page, text in TEXTS.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            target, _, anchor = link.partition("#")
            file = (page.parent / target).resolve() if target else page
            assert file.exists(), f"{page.name}: {link}"
            if anchor:
                headings = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-")
                            for h in re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)]  # fmt: skip
                assert anchor in headings, f"{page.name}: {link}"
    for page in PAGES[1:]:
        assert f"docs/{page.name}" in TEXTS[PAGES[0]], "the README does not name the page"


def test_paths_on_the_pages_exist() -> None:
    for page, text in TEXTS.items():
        for path in re.findall(r"\bk8s/[\w./-]*\w", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_the_first_run_shows_the_columns_of_the_crd() -> None:
    if not schemas.CRDS.is_dir():
        pytest.skip(f"no KubeRay CRDs in {schemas.CRDS} (EXSPEC_K8S_CRDS)")
    text = TEXTS[K8S / "docs" / "first-run.md"]
    definition = schemas.read(schemas.CRDS / "ray.io_rayjobs.yaml")
    (version,) = (v for v in definition["spec"]["versions"] if v["name"] == "v1")
    columns = ["NAME", *(column["name"].upper() for column in version["additionalPrinterColumns"])]
    (line,) = re.findall(r"^    (NAME +JOB STATUS.*)$", text, re.MULTILINE)
    assert re.split(r"  +", line) == columns
    kinds = {schemas.read(file)["metadata"]["name"] for file in schemas.CRDS.iterdir()}
    (deleted,) = re.findall(r"kubectl delete crd ([^`]*)`", text)
    assert set(deleted.split()) == kinds
    known = set(version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"])
    assert set(re.findall(r"\.status\.(\w+)", text)) <= known


SIZING = TEXTS[K8S / "docs" / "sizing.md"]


def config(name: str) -> Any:
    settings = dict(SHAPES[name])
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def table(header: str) -> list[list[str]]:
    found = re.search(rf"^\| {re.escape(header)}.*\n\|[-|]+\n((?:\|.*\n)+)", SIZING, re.MULTILINE)
    assert found, header
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def test_the_memory_on_the_page_is_what_the_engine_plans() -> None:
    target, draft = config("Qwen/Qwen3-8B"), config("Qwen/Qwen3-0.6B")

    def fitted(free: float, asked: EngineConfig) -> EngineConfig:
        return fit(target, draft, asked, torch.bfloat16, int(free * SHARE * 2**30))

    def largest(free: float, capacity: int) -> EngineConfig:
        rows, columns = max(PREFILLS["cuda"])
        for batch in sorted(ROWS["cuda"], reverse=True):
            asked = EngineConfig(capacity=capacity, batch_size=batch, window=batch, bucket=capacity,
                                 prefill_rows=rows, prefill_columns=columns)  # fmt: skip
            if (found := fitted(free, asked)).batch_size == batch:
                return found
        raise AssertionError(f"nothing fits {free} GiB")

    assert f"tries batches of {min(ROWS['cuda'])} to {max(ROWS['cuda'])}" in SIZING
    for _, free, *cells in table("GPU | free GiB"):
        for capacity, cell in zip((LONGEST, 2048, 1024), cells, strict=True):
            found = largest(float(free), capacity)
            assert cell == f"{found.batch_size}, {found.page_count * found.page_size // 1000}"
    small, big = (plan_memory(target, draft, EngineConfig(capacity=LONGEST, batch_size=b, window=3 * b), torch.bfloat16)
                  for b in (8, 64))  # fmt: skip
    parameters = sum(int(n.replace(",", "")) for n in re.findall(r"[\d,]{9,}", SIZING)[:2])
    assert abs(small.weights - 2 * parameters) < 1e5  # buffers
    assert f"{2 * parameters / 2**30:.1f} GiB" in SIZING
    page = EngineConfig.page * 2**18
    assert f"A page is {EngineConfig.page} tokens: {page >> 20} MiB." in SIZING
    assert (small.kv - page, LONGEST * 2**18) == (24 * 2**30, 2**30)
    assert [round((p.logits + p.activations) / 2**30 * 2) / 2 for p in (small, big)] == [0.5, 3.5]
    assert f"One row of {LONGEST} tokens takes a GPU with 20 GiB free" in SIZING
    smallest = EngineConfig(capacity=LONGEST, batch_size=1, window=1)
    assert fitted(20, smallest).page_count * EngineConfig.page >= LONGEST
    with pytest.raises(ValueError, match="too few for one sequence"):
        fitted(19, smallest)


@pytest.fixture(scope="module")
def sizes() -> list[Sizes]:
    return [Sizes.of(config(name), torch.bfloat16) for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")]


def test_the_rows_per_hour_follow_from_the_formula(sizes: list[Sizes]) -> None:
    batches = set()
    for name, free, *cells in table("GPU | free GiB"):
        batch, thousands = (int(number) for number in cells[-1].split(","))
        batches.add(min(batch, 1000 * thousands // (400 + 250)))
        known = [card.free for gpu, card in CARDS.items() if gpu.split()[0] in re.split(r"[ ,]+", name)]
        assert known, name
        assert set(known) == {int(free)}
    draft = draftings(*sizes)[0]
    for name, bandwidth, flops, rows, *cells in table("GPU | bytes/s"):
        assert int(rows) in batches
        assert CARDS[name][:2] == (float(bandwidth), float(flops))
        bounds = Roofline(CARDS[name], sizes[0])
        for acceptance, cell in zip((None, 0.6, 0.8, 0.9), cells, strict=True):
            found = bounds.rows_per_hour(int(rows), 400, 250, *((draft, acceptance) if acceptance else ()))
            unit = 10 ** (floor(log10(found)) - 1)
            assert cell == f"{round(found / unit) * unit:,}"


def test_the_table_of_long_texts_is_the_one_that_plan_prints(sizes: list[Sizes]) -> None:
    found = table("GPU | drafter")
    assert len(found) == 3 * len(CARDS)
    assert found == list(card_rows(*sizes))
