"""From what a user names to a folder with config.json, weights and tokenizer files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from millstream.hub.errors import ModelNotFound
from millstream.hub.progress import OnProgress

# In the order in which a loader would look: the first group with a file in the folder is what the
# tokenizer is made of.
_TOKENIZER_FILES: tuple[tuple[str, ...], ...] = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
    ("tekken.json",),
)

_WEIGHTS = "*.safetensors"
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
# Other formats of the same model: folders of their own, or a second copy beside the first.
_UNWANTED = ("original/*", "onnx/*", "openvino/*", "coreml/*", "checkpoint*/*", "consolidated*")


def resolve(
    model: str | None, *, weights: bool = True, on_progress: OnProgress | None = None
) -> Path:
    """The folder of a model: None is the default model, an existing folder is itself, anything
    else is a Hugging Face id, which is downloaded unless it is cached already.

    weights=False skips an id's weight files, for who needs the tokenizer or the config alone.
    on_progress hears of the default model's steps (default: shown on stderr); huggingface_hub
    shows its own bars. Raises ModelNotFound. Blocks; may take minutes.
    """
    if model is None:
        from millstream.hub.default_model import fetch_default

        return fetch_default(on_progress)
    if not model:
        raise ModelNotFound("the model's name is empty")
    if (folder := local_folder(model)) is not None:
        return _with_config(folder.resolve(), model)
    if (file := Path(model).expanduser()).is_file():
        hint = "; `millstream import-gguf` converts GGUF files" if file.suffix == ".gguf" else ""
        raise ModelNotFound(f"{model!r} is a file, not a model folder{hint}")
    if _looks_like_path(model):
        raise ModelNotFound(f"no such folder: {model!r}")
    return _with_config(_download(model, weights), model)


def local_folder(model: str) -> Path | None:
    """The existing folder that a user's words name, None if they name something else.

    Raises ModelNotFound for what cannot be looked at: no permission, no such user's ~, too long.
    """
    try:
        folder = Path(model).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError) as error:
        raise ModelNotFound(f"cannot look for {model!r}: {_cause(error)}") from error


def display_name(model: str | None, model_dir: Path) -> str:
    """What to call a model that `resolve` found: a Hugging Face id as it is, else the folder's own
    name, since clients need not know where it lies."""
    if model is None or local_folder(model) is not None:
        return model_dir.name
    return model


def has_tokenizer(model_dir: Path) -> bool:
    """Whether a model folder has a tokenizer's vocabulary. Raises OSError for a forbidden one."""
    return bool(_tokenizer_files(model_dir))


def fingerprint(model_dir: Path) -> str:
    """sha256 (hex) of the tokenizer's files, equal for equal tokenizers; "" without a tokenizer."""
    files = _tokenizer_files(model_dir)
    if not files:
        return ""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _tokenizer_files(model_dir: Path) -> list[Path]:
    for names in _TOKENIZER_FILES:
        if files := [model_dir / name for name in names if (model_dir / name).is_file()]:
            return files
    return []


def _with_config(folder: Path, model: str) -> Path:
    try:
        found = (folder / "config.json").is_file()
    except OSError as error:  # the folder may not be looked into
        raise ModelNotFound(f"cannot look into {model!r}: {_cause(error)}") from error
    if not found:
        raise ModelNotFound(f"{model!r} is no model: {folder} has no config.json")
    return folder


def _cause(error: OSError | RuntimeError) -> str:
    """What the system says, without the path, which the message has already."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _looks_like_path(model: str) -> bool:
    """An id is `name` or `owner/name`; anything more is a path that is not there."""
    return model[0] in "./~\\" or model.count("/") > 1 or model.endswith("/")


def _download(repo_id: str, weights: bool) -> Path:
    try:
        from huggingface_hub import HfApi, constants, snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise ModelNotFound(
            f"no folder {repo_id!r}, and huggingface_hub, which would download it, is not installed"
        ) from None
    unreachable: Exception | None = None
    try:
        # Asked first because snapshot_download itself waits for a silent hub for ever.
        HfApi().model_info(repo_id, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
    except HFValidationError:
        raise ModelNotFound(f"no folder {repo_id!r}, and no valid Hugging Face id") from None
    except Exception as error:  # httpx's, OSError, ValueError: the library documents no one base
        unreachable = error
    try:
        folder = snapshot_download(
            repo_id,
            allow_patterns=[*_SMALL_FILES, *([_WEIGHTS] if weights else [])],
            ignore_patterns=list(_UNWANTED),
            local_files_only=unreachable is not None,  # what is cached needs no hub
        )
    except Exception as error:
        reason = _reason(unreachable or error)
        raise ModelNotFound(f"no folder {repo_id!r}, and {constants.ENDPOINT} {reason}") from error
    path = Path(folder)
    if weights and not any(path.glob(_WEIGHTS)):
        raise ModelNotFound(f"{constants.ENDPOINT}'s {repo_id!r} has no safetensors weights")
    return path


def _reason(error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled

    match error:
        case GatedRepoError():
            return "gates this model: accept its terms on the model's page and set HF_TOKEN"
        case HfHubHTTPError() if error.response.status_code in (401, 404):
            return "has no such model, or it is private (HF_TOKEN opens it)"
        case OfflineModeIsEnabled():
            return "may not be asked (HF_HUB_OFFLINE is set); the local cache lacks the model"
    text = " ".join(str(error).split())
    return f"failed or cannot be reached ({type(error).__name__}: {text[:200]})"
