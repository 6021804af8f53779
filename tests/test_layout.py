"""One namespace package over five folders: nothing may turn `millstream` into a plain package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PORTIONS = ("protos", "tokenizer_svc", "engine_svc", "client", "kernels")
ENGINE = ROOT / "engine_svc" / "millstream" / "engine"


def test_no_portion_has_an_init_at_the_top() -> None:
    for portion in PORTIONS:
        assert (ROOT / portion / "millstream").is_dir()
        assert not (ROOT / portion / "millstream" / "__init__.py").exists()


def test_every_package_is_typed() -> None:
    for portion in PORTIONS:
        for package in (ROOT / portion / "millstream").iterdir():
            if package.name != "__pycache__":
                assert (package / "py.typed").exists(), package


def test_the_client_imports_none_of_the_services_libraries() -> None:
    code = (
        "import sys, millstream.client, millstream.client.__main__\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy', 'msgspec', 'triton'}\n"
        "heavy.add('llguidance')\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_core_process_is_started_before_the_long_imports() -> None:
    """Importing the command line brings what starting the core needs, and no more."""
    code = (
        "import sys, millstream.engine.__main__\n"
        "print(sorted({'grpc', 'google.protobuf', 'millstream.hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_front_end_does_not_import_torch() -> None:
    """Nor what the first request with a stop string brings."""
    code = (
        "import sys, millstream.engine.__main__\n"
        "from millstream.engine import load, service, vllm_dialect\n"
        "from millstream.engine.frontend import servicer\n"
        "vllm_dialect.find_dialect()\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_each_package_of_the_engine_has_one_layer_of_the_import_contract() -> None:
    """None of whose packages may import one another: "|" between them, which ":" would allow."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = [layer for contract in contracts for layer in contract.get("layers", ())]
    layered = [package for layer in layers for package in layer.split(" | ")]
    assert sorted(layered) == sorted(_packages_of_the_engine())


def test_the_docs_say_which_packages_the_engines_import() -> None:
    lines = (ROOT / "docs" / "architecture.md").read_text().splitlines()
    rows = [re.fullmatch(r"\| (\w+)/ \|[^|]*\|([^|]*)\|", line) for line in lines]
    told = {row[1]: set(re.findall(r"\w+", row[2])) for row in rows if row}
    assert told == {name: _imported_by(name) for name in _packages_of_the_engine()}


def _packages_of_the_engine() -> list[str]:
    return [init.parent.name for init in ENGINE.glob("*/__init__.py")]


def _imported_by(package: str) -> set[str]:
    """Which others of the engine's packages one imports itself, for types too."""
    text = "".join(file.read_text() for file in (ENGINE / package).glob("*.py"))
    names = set(re.findall(r"^ *(?:from|import) millstream\.engine\.(\w+)", text, re.MULTILINE))
    return names.intersection(_packages_of_the_engine()) - {package}


def test_no_constant_is_written_down_in_two_packages() -> None:
    """What several need is in millstream.rpc: two copies would drift apart."""
    portions: dict[tuple[str, str], set[str]] = {}
    for portion in PORTIONS:
        for file in (ROOT / portion).rglob("*.py"):
            if "_pb2" not in file.name:
                for constant in _public_constants(file):
                    portions.setdefault(constant, set()).add(portion)
    shared = {constant: where for constant, where in portions.items() if len(where) > 1}
    assert not shared


def _public_constants(file: Path) -> Iterator[tuple[str, str]]:
    """The name and the value of each module constant that is a plain literal."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id.isupper() and target.id[0] != "_":
                    yield target.id, ast.unparse(node.value)
