"""One namespace package over five folders: nothing may turn `millstream` into a plain package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PORTIONS = ("protos", "tokenizer_svc", "engine_svc", "client", "kernels")


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


def test_the_front_end_does_not_import_torch() -> None:
    """Nor what the first request with a stop string brings."""
    code = (
        "import sys, millstream.engine.__main__\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
