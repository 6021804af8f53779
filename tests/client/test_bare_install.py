"""The client needs none of the services' libraries: not when imported, not when installed."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

_HEAVY = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "huggingface_hub", "gguf")
_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "statement",
    [
        "import millstream.client",
        "from millstream.client.__main__ import run\ntry: run(['--help'])\nexcept SystemExit: pass",
        "from millstream.client.__main__ import run\n"
        "try: run(['serve', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_importing_the_client_imports_nothing_heavy(statement: str) -> None:
    script = f"import sys\n{statement}\nprint('LOADED', *sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in shown.stdout.split("LOADED")[1].split()}
    assert "grpc" in loaded
    assert not loaded & set(_HEAVY)


def test_importing_the_client_imports_no_service() -> None:
    script = "import millstream.client, sys; print(*sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    services = ("millstream.engine", "millstream.tokenizer", "millstream.hub", "millstream.kernels")
    assert not [name for name in shown.stdout.split() if name.startswith(services)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bare_install_is_the_client_alone(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=True)
    python = str(tmp_path / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", str(_ROOT)], check=True, cwd=tmp_path)
    listed = subprocess.run([*pip, "list"], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].lower().replace("-", "_") for line in listed.splitlines()}
    assert {"millstream", "grpcio", "protobuf"} <= names
    assert not names & set(_HEAVY)

    subprocess.run([python, "-c", "from millstream.client import Client"], check=True, cwd=tmp_path)
    millstream = str(tmp_path / "bin" / "millstream")
    for command in ("generate", "chat", "health", "serve", "demo", "bench"):
        subprocess.run([millstream, command, "--help"], check=True, capture_output=True)
    # A folder is there without a download: nothing else stops `serve` before it starts services.
    with_model = ["serve", "--model", str(tmp_path)]
    in_process = ["bench", "--in-process"]
    commands = (["fetch"], ["demo"], ["serve"], with_model, in_process, ["-engine"], ["-tokenizer"])
    for command in commands:
        program = millstream + command.pop(0) if command[0].startswith("-") else millstream
        shown = subprocess.run(
            [program, *command],
            capture_output=True,
            text=True,
            env={"MILLSTREAM_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"},
        )
        assert shown.returncode == 1
        assert "pip install 'millstream[" in shown.stderr
        assert "Traceback" not in shown.stderr
        assert len(shown.stderr.strip().splitlines()) <= 2
