"""README and docs say what is there: links, names, commands and files."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import fusednorm

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/RESULTS.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
MOST_WORDS = 1500  # of README


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_are_there(page):
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page):
    named = re.findall(r"`((?:fusednorm|kernels|tests|bench|docs|examples)/[\w./-]+\.\w+)`", page.read_text())
    named += [f"bench/results/{name}" for name in re.findall(r"`(\d{4}-\d\d-\d\d-[\w-]+\.jsonl)`", page.read_text())]
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_package_that_are_used_are_there(page):
    text = page.read_text()
    names = set(re.findall(r"(?<!ops\.)\bfusednorm\.([A-Za-z_]+)", text))
    assert not [name for name in names if not hasattr(fusednorm, name) and not find_spec(f"fusednorm.{name}")]
    ops = set(re.findall(r"\bops\.fusednorm\.([a-z_]+)", text))
    assert not [name for name in ops if not hasattr(torch.ops.fusednorm, name)]
    assert not [name for name in re.findall(r"python -m (bench\.\w+)", text) if not find_spec(name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_that_are_named_are_there(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {name for name in re.findall(r"\bmake ([a-z][\w-]+)", page.read_text())} - {"of", "it", "no"} <= set(targets)
