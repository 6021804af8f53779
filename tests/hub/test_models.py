"""From names to folders: paths, Hugging Face ids over a loopback hub, fingerprints."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hub.gguf_files import tiny_llama, write_gguf
from tests.hub.loopback_hub import LoopbackHub, serve

from millstream.hub import (
    ModelNotFound,
    display_name,
    fingerprint,
    has_tokenizer,
    local_folder,
    resolve,
)
from millstream.hub.gguf_import import import_gguf

CODE = (
    "import json, sys\n"
    "from millstream.hub import ModelNotFound, resolve\n"
    "options = json.loads(sys.argv[2])\n"
    "try:\n"
    "    print(resolve(sys.argv[1], **options))\n"
    "except ModelNotFound as error:\n"
    "    sys.exit(f'refused: {error}')\n"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, with files beside the model that nobody needs."""
    root = tmp_path_factory.mktemp("tiny")
    import_gguf(write_gguf(root / "tiny.gguf", tiny_llama()), root / "model")
    (root / "model" / "pytorch_model.bin").write_bytes(b"pickle")
    (root / "model" / "README.md").write_text("read me")
    (root / "model" / "original").mkdir()
    (root / "model" / "original" / "params.json").write_text("{}")
    (root / "model" / "original" / "copy.safetensors").write_text("a second copy")
    return root / "model"


@pytest.fixture
def hub(tiny: Path, tmp_path: Path) -> Iterator[LoopbackHub]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "config.json").write_text("{}")
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"pickle")
    repos = {"org/tiny": tiny, "org/gated": tiny, "org/bin": tmp_path / "bin"}
    with serve(repos, gated={"org/gated"}) as served:
        yield served


def ask(
    model: str, environment: dict[str, str], **options: bool
) -> subprocess.CompletedProcess[str]:
    """resolve() in a process of its own: huggingface_hub reads its environment on import."""
    command = [sys.executable, "-c", CODE, model, json.dumps(options)]
    environment = os.environ | environment
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_fetch_obtains_any_model_and_prints_its_folder(
    hub: LoopbackHub, tiny: Path, tmp_path: Path
) -> None:
    def fetch(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "millstream.hub", "fetch", *flags]
        environment = os.environ | hub.environment(tmp_path / "cache")
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    done = fetch("--model", "org/tiny")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    assert (folder / "config.json").read_bytes() == (tiny / "config.json").read_bytes()
    assert fetch("--model", str(tiny)).stdout == f"{tiny}\n"
    missing = fetch("--model", "org/none")
    assert missing.returncode == 1
    assert missing.stderr.startswith("error: ")
    assert "has no such model" in missing.stderr
    assert fetch("--model", str(tiny), "--verify").returncode == 1


def test_an_id_is_downloaded_and_then_works_offline(
    hub: LoopbackHub, tiny: Path, tmp_path: Path
) -> None:
    environment = hub.environment(tmp_path / "cache")
    done = ask("org/tiny", environment)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    wanted |= {"tokenizer_config.json", "chat_template.jinja"}
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == wanted
    for name in wanted:
        assert (folder / name).read_bytes() == (tiny / name).read_bytes()
    assert fingerprint(folder) == fingerprint(tiny) != ""
    offline = ask("org/tiny", environment | {"HF_HUB_OFFLINE": "1"})
    assert offline.stdout == done.stdout
    unreachable = ask("org/tiny", environment | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert unreachable.stdout == done.stdout


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        (["millstream.hub", "fetch"], signal.SIGINT, 130),
        (["millstream.client", "fetch"], signal.SIGINT, 130),
        (["millstream.tokenizer", "--port", "0"], signal.SIGTERM, 0),
    ],
)
def test_row_81_an_interrupted_download_ends_at_once(
    hub: LoopbackHub, tmp_path: Path, command: list[str], number: int, code: int
) -> None:
    """And not with the file's end, which may be many minutes away."""
    hub.holds = ("model.safetensors", "tokenizer.json")
    environment = os.environ | hub.environment(tmp_path / "cache")
    command = [sys.executable, "-m", *command, "--model", "org/tiny"]
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert hub.holding.wait(60)
        process.send_signal(number)
        try:
            _, log = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode == code
    assert "Traceback" not in log


def test_the_tokenizer_service_needs_no_weights(hub: LoopbackHub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path / "cache")
    done = ask("org/tiny", environment, weights=False)
    folder = Path(done.stdout.strip())
    assert has_tokenizer(folder) and not list(folder.glob("*.safetensors"))
    assert not any("safetensors" in request for request in hub.requests)
    # Later the weights come into the same folder; offline, their absence is an error, not a crash.
    offline = ask("org/tiny", environment | {"HF_HUB_OFFLINE": "1"})
    assert offline.returncode == 1 and "refused" in offline.stderr
    assert ask("org/tiny", environment).stdout == done.stdout
    assert list(folder.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("org/absent", "has no such model"),
        ("absent", "has no such model"),
        ("org/gated", "gates this model"),
        ("org/bin", "no safetensors weights"),
        ("not a/valid id", "no valid Hugging Face id"),
    ],
)
def test_refusals_are_one_clear_line(
    hub: LoopbackHub, tmp_path: Path, model: str, says: str
) -> None:
    done = ask(model, hub.environment(tmp_path / "cache"))
    assert done.returncode == 1 and done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert line.startswith("refused: ") and says in line and model in line
    assert "Traceback" not in done.stderr


def test_without_a_network_it_fails_in_seconds(tmp_path: Path) -> None:
    cache = {"HF_HUB_CACHE": str(tmp_path)}
    with socket.socket() as silent_hub:
        silent_hub.bind(("127.0.0.1", 0))
        silent_hub.listen(64)  # accepts, and never answers
        endpoint = f"http://127.0.0.1:{silent_hub.getsockname()[1]}"
        began = time.monotonic()
        # 10 s by default
        limited = {"HF_ENDPOINT": endpoint, "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
        done = ask("org/tiny", cache | limited)
        assert time.monotonic() - began < 10
    assert endpoint in done.stderr and "cannot be reached" in done.stderr
    refused = ask("org/tiny", cache | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert "cannot be reached" in refused.stderr
    offline = ask("org/tiny", cache | {"HF_HUB_OFFLINE": "1"})
    assert "HF_HUB_OFFLINE is set" in offline.stderr


def test_folders(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(str(tiny)) == tiny
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert resolve("~/model") == tiny
    monkeypatch.chdir(tiny.parent)
    assert resolve("model") == tiny  # a folder comes before an id
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        resolve(str(tmp_path))
    for absent in ("./absent", "/no/such/folder", "~/absent", "a/b/c", "../absent/"):
        with pytest.raises(ModelNotFound, match="no such folder"):
            resolve(absent)
    with pytest.raises(ModelNotFound, match="import-gguf"):
        resolve(str(tiny.parent / "tiny.gguf"))
    with pytest.raises(ModelNotFound, match="empty"):
        resolve("")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("a" * 300, "File name too long"),
        ("./" + "a" * 300, "File name too long"),
        ("~no-such-user/model", "home directory"),
    ],
)
def test_what_cannot_be_looked_at_is_one_clear_line(model: str, says: str) -> None:
    for look in (resolve, local_folder):
        with pytest.raises(ModelNotFound, match=says) as caught:
            look(model)
        assert str(caught.value).count(model) == 1


def test_a_folder_without_permission_is_one_clear_line(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path) -> bool:  # tests may run as root, who has every permission
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(ModelNotFound, match=r"cannot look into .*: Permission denied"):
        resolve(str(tiny))
    monkeypatch.setattr(Path, "is_dir", denied)
    with pytest.raises(ModelNotFound, match=r"cannot look for .*: Permission denied"):
        resolve(str(tiny))


def test_fingerprints_tell_tokenizers_apart(tiny: Path, tmp_path: Path) -> None:
    assert fingerprint(tmp_path) == "" and not has_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert fingerprint(tmp_path) == ""
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("a b")
    first = fingerprint(tmp_path)
    assert len(first) == 64 and has_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("b a")
    assert fingerprint(tmp_path) != first
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    assert fingerprint(tmp_path) == fingerprint(tiny)


def test_display_name_is_the_id_or_the_folders_own_name(tmp_path: Path) -> None:
    assert display_name(None, tmp_path / "default") == "default"
    assert display_name(str(tmp_path), tmp_path) == tmp_path.name
    assert display_name("org/model", tmp_path / "snapshots" / "abc") == "org/model"
