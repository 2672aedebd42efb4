"""The pages of documentation: every Markdown file of the repository, and what is in one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for folder in ("configs", "scripts", "tests", "toka_async") for page in (ROOT / folder).rglob("*.md")),
    ]
)
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def links(page: Path) -> list[str]:
    """The targets of its links to other places of the repository, as they are written."""
    found = _LINK.findall(_prose(page))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The names of its headings in links, as GitHub and PyPI make them."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in _HEADING.findall(_prose(page)))
    return {title.strip().replace(" ", "-") for title in titles}


def _prose(page: Path) -> str:
    return _FENCED.sub("", page.read_text(encoding="utf-8"))
