"""Files that docs, docstrings and comments name must be there. docs/architecture.md says how paths
are shortened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENGINE = "engine_svc/millstream/engine"
DOCS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
# Not below an address, and not the end of another name.
_PATH = re.compile(r"(?<![\w/.:-])((?:[\w-]+/)*[\w-]+\.(?:py|md|proto|sh|yml))\b")
_PROSE = re.compile(r'""".*?"""|#[^\n]*', re.DOTALL)


def _files() -> Iterator[str]:
    for top in ROOT.iterdir():
        if not top.name.startswith("."):
            yield from (str(path.relative_to(ROOT)) for path in (top, *top.rglob("*")))


FILES = set(_files())
NAMES = {Path(file).name for file in FILES}


def _whole(path: str) -> Iterator[str]:
    """What a shortened path may stand for."""
    yield path
    yield f"{ENGINE}/{path}"
    first, _, rest = path.partition("/")
    yield f"{first}/millstream/{rest}"
    yield f"{first}/millstream/{path}"


def _is_there(path: str, beside: Path) -> bool:
    """`beside`: the file that names it, which may mean one in its own folder or below tests."""
    folder = beside.parent.relative_to(ROOT)
    return not FILES.isdisjoint([*_whole(path), str(folder / path), f"tests/{path}"])


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_docs_name_files_that_are_there(doc: Path) -> None:
    text = re.sub(r"\]\([^)]*\)", "]", doc.read_text())  # links are clicked, not read
    missing = [path for path in _PATH.findall(text) if not _is_there(path, doc)]
    # A name alone is of a file beside the one named before.
    assert [path for path in missing if "/" in path or path not in NAMES] == []


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_links_lead_somewhere(doc: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]*)[^)]*\)", doc.read_text()):
        assert (doc.parent / target).exists(), target


def test_docstrings_and_comments_name_files_that_are_there() -> None:
    missing = []
    for file in sorted(FILES):
        if file.endswith(".py") and "_pb2" not in file:
            prose = " ".join(_PROSE.findall((ROOT / file).read_text()))
            missing += [f"{file}: {path}" for path in _PATH.findall(prose) if not _known(path)]
    assert missing == []


def _known(path: str) -> bool:
    """Code names files as it is nearest to them: the end of a path will do."""
    return any(f"/{file}".endswith(f"/{whole}") for whole in _whole(path) for file in FILES)
