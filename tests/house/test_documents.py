"""Links, names, commands and files in README and docs exist, and the Python code of README runs."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import fusednorm
from bench.records import rows_of
from fusednorm import __main__, ops
from fusednorm.host.triton_compat import CALL_US
from fusednorm.operands import BY_INDEX, FORMS, OPS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/RESULTS.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
BY_HAND = [page for page in PAGES if page.name != "RESULTS.md"]
NOTES, RESULTS = ROOT / "bench/NOTES.md", ROOT / "bench/results"
MOST_WORDS = 1400  # in README.md, without its tables of times


def test_readme_is_short():
    text = re.sub(r"<!-- bench: .*?<!-- end -->", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(re.findall(r"\w[^\s|]*", text)) <= MOST_WORDS


def test_readme_says_what_a_call_costs_with_another_triton():
    assert f"each call takes {CALL_US} microseconds" in " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_are_there(page):
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page):
    named = re.findall(r"`((?:fusednorm|kernels|tests|bench|docs|examples)/[\w./-]+\.\w+)`", page.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


def test_results_that_the_notes_name_are_there():
    named = re.findall(r"`([\w-]+\.jsonl)`", NOTES.read_text() + (RESULTS / "README.md").read_text())
    assert named and not [name for name in named if not list(RESULTS.glob(f"*/{name}"))]


def test_every_results_file_is_described():
    described = (RESULTS / "README.md").read_text()
    assert not [path.name for path in RESULTS.glob("*/*.jsonl") if f"`{path.name}`" not in described]


@pytest.mark.parametrize("page", BY_HAND, ids=lambda page: page.name)
def test_results_that_a_document_names_have_the_day_of_their_newest_record(page):
    """A record newer than the sentence is a reason to read the sentence again."""
    text = re.sub(r"<!-- bench: .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
    for name, day in re.findall(r"`([\w/.-]+\.jsonl)`[,\s(]*([\d-]*)", text):
        newest = rows_of([ROOT / name])[-1]["date"][:10]
        assert day == newest, f"{page.name} names {name} of {day or 'no day'}; its newest record: {newest}"


def test_headings_of_the_notes_that_code_names_are_there():
    headings = set(re.findall(r"^#+ (.*)", NOTES.read_text(), re.MULTILINE))
    named: set[str] = set()
    for folder in ("fusednorm", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            text = " ".join(path.read_text().replace("#", " ").split())
            named |= set(re.findall(r'bench/NOTES\.md,(?: section)? "([^"]+)"', text))
    assert len(named) > 1 and not named - headings


def test_links_within_the_notes_lead_to_headings():
    text = NOTES.read_text()
    titles = (re.sub(r"[^\w -]", "", title.lower()) for title in re.findall(r"^#+ (.*)", text, re.MULTILINE))
    headings = {title.replace(" ", "-") for title in titles}
    links = re.findall(r"\]\(#([^)]+)\)", text)
    assert links and not set(links) - headings


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_package_that_are_used_are_there(page):
    text = page.read_text()
    names = set(re.findall(r"(?<!ops\.)\bfusednorm\.([A-Za-z_]+)", text))
    assert not [name for name in names if not hasattr(fusednorm, name) and not find_spec(f"fusednorm.{name}")]
    ops = set(re.findall(r"\bops\.fusednorm\.([a-z_]+)", text))
    assert not [name for name in ops if not hasattr(torch.ops.fusednorm, name)]
    assert not [name for name in re.findall(r"-m ((?:bench|examples|tests)\.\w+)", text) if not find_spec(name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_that_are_named_are_there(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {name for name in re.findall(r"\bmake ([a-z][\w-]+)", page.read_text())} - {"of", "it", "no"} <= set(targets)


def test_the_python_of_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names = {"model": torch.nn.Sequential(torch.nn.LayerNorm(8))}
    try:
        for block in blocks:
            exec(block, names)
    finally:
        fusednorm.disable_eager()
        fusednorm.disable_inductor()
    assert len(blocks) == 2 and isinstance(names["model"][0], fusednorm.LayerNorm)
    assert names["x"].grad.shape == (8, 4096) and names["norm"].weight.grad is not None


def test_plans_that_the_documents_ask_for_are_made(capsys):
    text = "\n".join(page.read_text() for page in PAGES)
    asked = re.findall(r"python -m fusednorm plan ([^`#]*?--rows[^`#]*?)(?=  #|`|\n[^ ])", text)
    assert len(asked) >= 2
    for arguments in asked:
        assert __main__.main(["plan", *shlex.split(arguments)]) == 0
        assert "registers up to" in capsys.readouterr().out


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs/reference.md").read_text()
    documented = set(re.findall(r"auto(?:class|function|module):: fusednorm\.(\w+)", text))
    assert {*fusednorm.__all__, *fusednorm._INTEGRATIONS} <= documented


def test_every_op_form_and_function_is_described():
    said = re.findall(r"\w+", ops.__doc__.split("\nSchemas\n")[0])
    assert not [name for name in OPS if name not in said and BY_INDEX not in name]
    formulas = (ROOT / "docs/forms.md").read_text()
    assert not [suffix for _, suffix, *_ in FORMS if f"_fwd{suffix}`" not in formulas]
    for page in ("README.md", "docs/using.md"):
        text = (ROOT / page).read_text()
        assert not [name for name in fusednorm.__all__ if "rms_norm" in name and name not in text], page
