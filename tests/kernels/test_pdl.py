"""Dependent launch by the kernels' sources: each waits on every way through it, and before that
stores nothing and reads what early_reads.py names. What the compiler makes of it: compile_sm90."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.kernels.early_reads import EARLY_READS, PUBLISHING

import millstream.kernels.pdl

FOLDER = Path(millstream.kernels.pdl.__file__).parent
# They compute from values alone, or from where a program is.
HARMLESS = {"cdiv", "next_power_of_2", "weight_rows", "tile_of", "launch_dependents"}


class Early:
    """What a kernel does before its wait."""

    def __init__(self, kernel: ast.FunctionDef) -> None:
        self.reads: set[str] = set()
        self.writes: list[str] = []
        parameters = [argument.arg for argument in kernel.args.args]
        ends = ("_ptr", "_from", "_boxes")
        self._pointers = {name: {name} for name in parameters if name.endswith(ends)}
        self.waits = self._follow(kernel.body)

    def _follow(self, body: Sequence[ast.stmt]) -> bool:
        """Whether every way through these statements, or out of the kernel there, has waited."""
        for statement in body:
            if isinstance(statement, ast.If):
                self._look_at(statement.test)
                ways = [self._follow(statement.body), self._follow(statement.orelse)]
                if all(ways):
                    return True
            elif isinstance(statement, ast.For | ast.While):
                self._follow(statement.body)
            elif isinstance(statement, ast.Return):
                self.writes.append("ends")
            elif is_call_of(statement, "wait"):
                return True
            else:
                self._look_at(statement)
        return False

    def _look_at(self, node: ast.AST) -> None:
        for call in calls(node):
            function = call.func
            named = function.attr if isinstance(function, ast.Attribute) else function.id  # type: ignore[attr-defined]
            if named == "load" or (isinstance(function, ast.Name) and named not in HARMLESS):
                self.reads |= self._named_in(call)
            elif named in ("store", "publish") or named.startswith("atomic"):
                self.writes.append(named)
        if isinstance(node, ast.Assign) and not any(calls_of(node.value, "load")):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._pointers[target.id] = self._named_in(node.value)

    def _named_in(self, node: ast.AST) -> set[str]:
        names = (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
        return set().union(*(self._pointers.get(name, set()) for name in names))


def calls(node: ast.AST) -> Iterator[ast.Call]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Call))


def calls_of(node: ast.AST, name: str) -> Iterator[ast.Call]:
    return (
        each
        for each in calls(node)
        if name in (getattr(each.func, "attr", None), getattr(each.func, "id", None))
    )


def is_call_of(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Expr) and any(calls_of(statement, name))


def kernels_of(source: str) -> list[ast.FunctionDef]:
    """Those that take part in dependent launch."""
    return [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any(argument.arg == "PDL" for argument in node.args.args)
    ]


KERNELS = {
    kernel.name: kernel
    for path in sorted(FOLDER.glob("*.py"))
    for kernel in kernels_of(path.read_text())
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_before_its_wait_a_kernel_reads_what_is_complete(kernel: ast.FunctionDef) -> None:
    early = Early(kernel)
    assert early.waits, "every program waits"
    assert not early.writes
    assert early.reads == EARLY_READS.get(kernel.name, set())


def test_every_kernel_is_looked_at() -> None:
    assert set(KERNELS) >= set(EARLY_READS) | PUBLISHING and len(KERNELS) >= 16
    launches = (
        path.read_text().count("**pdl.options(")
        for path in FOLDER.glob("*.py")
        if path.name != "pdl.py"
    )
    assert sum(launches) == len(KERNELS)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_next_kernel_may_start_at_once_or_when_all_is_published(
    kernel: ast.FunctionDef,
) -> None:
    first, last = kernel.body[0], kernel.body[-1]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        first = kernel.body[1]  # behind the docstring
    publishes = kernel.name in PUBLISHING
    assert is_call_of(last, "publish") == publishes
    assert is_call_of(first, "launch_dependents") != publishes
    assert not (publishes and any(isinstance(each, ast.Return) for each in ast.walk(kernel)))


BAD = {
    "reads an activation": "x = tl.load(x_ptr)\n wait(PDL)",
    "reads one by way of others": "at = x_ptr + 3\n y = tl.load(at + n)\n wait(PDL)",
    "reads one in a function": "y = rows_of(x_ptr, 4)\n wait(PDL)",
    "reads a box": "y = x_from.load([0, 0])\n wait(PDL)",
    "reads one on one of two ways": "if A:\n  wait(PDL)\n y = tl.load(x_ptr)\n wait(PDL)",
    "stores": "tl.store(x_ptr, 1)\n wait(PDL)",
    "adds": "tl.atomic_add(x_ptr, 1)\n wait(PDL)",
    "ends": "if A:\n  return\n wait(PDL)",
    "does not wait": "y = 1",
    "waits on one of two ways": "if A:\n  wait(PDL)\n else:\n  y = 1",
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
def test_what_breaks_the_rules_is_seen(body: str) -> None:
    (kernel,) = kernels_of(f"def _a_kernel(x_ptr, x_from, n, A, PDL):\n {body}\n")
    early = Early(kernel)
    assert early.reads or early.writes or not early.waits
