"""The pages of the commands, their help and its examples: in step, complete, and runnable as they stand."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from exspec.jobs import cli
from exspec.pipeline.job.kinds import KINDS
from exspec.pipeline.job.settings import Job
from tests.jobs import docs

COMMANDS = docs.commands()
PAGES = sorted(docs.FOLDER.glob("*.md"))
ROOT = docs.FOLDER.parents[1]
TREES = {"pipeline/README.md": "pipeline", "actors/engine/README.md": "actors", "jobs/docs/README.md": "jobs"}
OTHERS = [ROOT / "README.md", ROOT / "pipeline" / "README.md", ROOT / "actors" / "engine" / "README.md"]
FENCE = re.compile(r"^    (.*)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def written(page: Path) -> str:
    """A page without its generated part."""
    before, _, rest = page.read_text(encoding="utf-8").partition(docs.BEGIN)
    return before + rest.partition(docs.END)[2]


def lines(page: Path) -> list[str]:
    """Command lines of a page, without its generated part."""
    return [line for line in FENCE.findall(written(page)) if line.startswith("exspec ")]


def parse(line: str) -> None:
    """Read a command line as the app does, and run nothing."""
    words = shlex.split(line, comments=True)[1:]
    if words[0] in ("--install-completion", "--show-completion"):
        return
    group: Any = typer.main.get_command(cli.app)
    with group.make_context("exspec", list(words)) as root:
        name, command, rest = group.resolve_command(root, words)
        command.make_context(name, rest, parent=root).close()


def test_every_page_says_what_the_help_says() -> None:
    """Where this fails: python -m tests.jobs.docs"""
    for path, expected in docs.pages().items():
        assert path.exists(), f"{path} is missing"
        assert path.read_text(encoding="utf-8") == expected, f"{path} is out of step"


def test_no_page_is_left_of_a_command_that_is_gone() -> None:
    assert set(PAGES) == set(docs.pages()) | docs.guides()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_is_written_to_its_end(name: str) -> None:
    text = (docs.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert [h for h in docs.HEADINGS if h not in text] == []
    assert any(mark in text for mark in docs.EXIT_CODES)
    assert lines(docs.FOLDER / f"{name}.md"), "no example"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_has_the_examples_of_the_help(name: str) -> None:
    shown = {" ".join(shlex.split(line, comments=True)) for line in lines(docs.FOLDER / f"{name}.md")}
    assert [line for line in docs.examples(COMMANDS[name]) if line not in shown] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_names_every_option_of_its_command(name: str) -> None:
    command = COMMANDS[name]
    generated = (docs.FOLDER / f"{name}.md").read_text(encoding="utf-8").partition(docs.BEGIN)[2]
    own = [p for p in command.params if p.param_type_name == "option" and p.name not in docs.settings(command)]
    assert [p.opts[0] for p in own if f"`{p.opts[0]}`" not in generated] == []


def test_every_setting_is_on_the_page_of_settings_and_on_no_other() -> None:
    page = (docs.FOLDER / docs.SETTINGS).read_text(encoding="utf-8")
    for command in COMMANDS.values():
        for p in command.params:
            if p.name in docs.settings(command):
                assert f"\n- `{p.opts[0]}` " in page
    for name in COMMANDS:
        generated = (docs.FOLDER / f"{name}.md").read_text(encoding="utf-8").partition(docs.BEGIN)[2]
        assert "`--draft-revision`" not in generated
        assert f"]({docs.SETTINGS})" in generated or not docs.settings(COMMANDS[name])


def anchors(page: Path) -> set[str]:
    """What links to headings of a page end with."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [*PAGES, *OTHERS, ROOT / "k8s" / "README.md"], ids=lambda p: f"{p.parent.name}-{p.name}"
)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        place, _, heading = link.partition("#")
        if "://" not in link:
            target = page.parent / place if place else page
            assert target.exists(), link
            assert not heading or heading in anchors(target), link


@pytest.mark.parametrize(("page", "folder"), TREES.items())
def test_a_tree_names_every_file(page: str, folder: str) -> None:
    tree = (ROOT / page).read_text(encoding="utf-8").partition("## The tree\n")[2]
    for path in (ROOT / folder).rglob("*.py"):
        assert path.name == "__init__.py" or re.search(rf"\b{re.escape(path.name)}\b", tree), path


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("colour", [{}, {"NO_COLOR": "1"}])
def test_help_ends_with_examples_that_survive_a_narrow_terminal(name: str, colour: dict[str, str]) -> None:
    result = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "80", "TERM": "xterm", **colour})
    shown = [line.strip() for line in result.stdout.splitlines()]
    written = docs.examples(COMMANDS[name])
    assert written
    assert all(line.startswith(f"exspec {name} ") or line == f"exspec {name}" for line in written)
    assert [line for line in written if line not in shown] == []
    assert shown[shown.index("Examples:") + 1 :] == written
    assert not [line for line in shown if "…" in line], "a name is cut"
    for line in written:
        parse(line)


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda p: f"{p.parent.name}-{p.name}")
def test_every_command_line_of_a_page_can_be_read(page: Path) -> None:
    for line in lines(page):
        parse(line)


def test_a_line_that_is_wrong_is_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse("exspec run --inputs messages/")


def test_every_job_file_of_the_pages_is_one() -> None:
    found = 0
    for page in [*PAGES, *OTHERS]:
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            kind = KINDS.get(page.stem, Job)
            pair = {"target": "t"} if kind.reads else {"target": "t", "draft": "d"}
            kind(**(pair | yaml.safe_load(block)))
            found += 1
    assert found


def test_a_page_with_other_options_is_out_of_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check can fail: a changed table, a missing page, a page too many."""
    for page in PAGES:
        (tmp_path / page.name).write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(docs, "FOLDER", tmp_path)
    changed = tmp_path / "audit.md"
    changed.write_text(changed.read_text(encoding="utf-8").replace("`--seed`", "`--seeds`"), encoding="utf-8")
    with pytest.raises(AssertionError, match=r"audit\.md is out of step"):
        test_every_page_says_what_the_help_says()
    changed.unlink()
    with pytest.raises(AssertionError, match=r"audit\.md is missing"):
        test_every_page_says_what_the_help_says()
    docs.main()
    test_every_page_says_what_the_help_says()
    with pytest.raises(AssertionError):
        test_a_page_is_written_to_its_end("audit")


def complete(*words: str) -> list[str]:
    """What bash offers after these words, the last of them begun, with the script that the app installs."""
    script = (
        'PATH="$1:$PATH"; shift; eval "$(exspec --show-completion bash)"; COMP_WORDS=(exspec "$@"); COMP_CWORD=$#; '
        '_exspec_completion exspec; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "-c", script, "bash", str(Path(sys.executable).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("con",), ["convert"]),
        (("run", "--method", ""), ["auto", "plain", "eqspec", "exspec"]),
        (("run", "--dtype", "b"), ["bfloat16"]),
        (("audit", "out/", "--sh"), ["--share"]),
        (("run", "--job", "jo"), []),  # the shell's own file names
    ],
)
def test_bash_completes(words: tuple[str, ...], expected: list[str]) -> None:
    assert complete(*words) == expected


def test_zsh_is_offered_the_choices_with_their_help() -> None:
    environment = os.environ | {"_EXSPEC_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "exspec run --method e"}
    command = [str(Path(sys.executable).parent / "exspec")]
    offered = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
    assert '"eqspec"' in offered
    assert '"exspec"' in offered
    assert "plain" not in offered


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_the_pages_commands_work_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new user types them, on few rows: messages, plan, run, a second run, audit, report, compact."""
    monkeypatch.chdir(tmp_path)
    quick = {
        "messages": " --rows 12 --shards 2", "run": " --max-new-tokens 8 --rows-per-chunk 2",
        "plan": " --max-new-tokens 8 --rows-per-chunk 2", "audit": " --count 4 --no-generate",
    }  # fmt: skip
    for name in ("messages", "plan", "run", "run", "audit", "report", "compact", "run"):
        line = docs.examples(COMMANDS[name])[0] + quick.get(name, "")
        result = CliRunner().invoke(cli.app, shlex.split(line)[1:])
        assert result.exit_code == 0, (line, result.output)
    assert "nothing to do: all 12 rows" in result.output
    (merged,) = (tmp_path / "out").glob("part-*")
    assert pq.read_table(merged).num_rows == 12
