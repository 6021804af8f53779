"""docs/known-faults.md names tests: all of them must be there."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_ROW = re.compile(r"^\| (\d[\d, ]*) \|", re.MULTILINE)
_REFERENCE = re.compile(r"(?:(?:tests/)?([\w/]+\.py))?(?:::(test_\w+\*?))?")


def _rows() -> list[tuple[str, str]]:
    """(number, line) of each row."""
    lines = (ROOT / "docs" / "known-faults.md").read_text().splitlines()
    return [(match[1], line) for line in lines if (match := _ROW.match(line))]


def _references(line: str) -> Iterator[tuple[str, str | None]]:
    """(file, test or None) of each reference; one without a file is to the file before it."""
    file = ""
    for match in _REFERENCE.finditer(line):
        if match[1] or match[2]:
            file = match[1] or file
            yield file, match[2]


@pytest.mark.parametrize(("number", "line"), _rows(), ids=[number for number, _ in _rows()])
def test_the_tests_of_a_row_are_there(number: str, line: str) -> None:
    for file, test in _references(line):
        path = ROOT / "tests" / file
        assert path.is_file(), f"row {number}: there is no tests/{file}"
        if test is not None:
            names = re.findall(r"def (test_\w+)", path.read_text())
            assert fnmatch.filter(names, test), f"row {number}: no {test} in tests/{file}"


def test_rows_are_found() -> None:
    assert len(_rows()) >= 64
    assert list(_references("a/test_b.py::test_c*, ::test_d; and tests/bench/e.py")) == [
        ("a/test_b.py", "test_c*"),
        ("a/test_b.py", "test_d"),
        ("bench/e.py", None),
    ]
