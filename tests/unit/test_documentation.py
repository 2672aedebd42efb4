from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.documentation import PAGES, ROOT, anchors, links

FIRST = ROOT / "README.md"
MOST_BYTES = 9_216  # of the first page: what is longer belongs beside its code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_linked_from_another() -> None:
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(page)}
    assert len(PAGES) > 10
    assert [page for page in PAGES if page != FIRST and page not in linked] == []


def test_the_first_page_is_short() -> None:
    assert FIRST.stat().st_size <= MOST_BYTES


def test_links_and_anchors_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b.c`, and D_e\n\n[x](y.md#z) [w](https://example.org) [v](#u)\n\n```\n# [t](s)\n```\n")
    assert anchors(page) == {"a-bc-and-d_e"}
    assert links(page) == ["y.md#z", "#u"]
