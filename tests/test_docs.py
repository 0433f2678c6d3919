"""The documentation: generated pages are current, and no link leads nowhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def load_builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "build_reference", ROOT / "docs/build_reference.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", load_builder().PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    made = load_builder().PAGES[name]()
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == made, "run `make docs`"


def anchors(page: Path) -> set[str]:
    """Give the anchors of a page's headings, as they are made on the web."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


def links(text: str) -> list[str]:
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages - {"index.md"} <= set(links(index))


def test_the_options_of_the_migration_page_are_there() -> None:
    page = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    section = page.split("## Options")[1].split("## Tool parsers")[0]
    commands = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    named = {option for row in rows for option in re.findall(r"`(--[a-z-]+)`", row[4])}
    assert len(named) >= 20
    assert {option for option in named if f"`{option}`" not in commands} == set()
