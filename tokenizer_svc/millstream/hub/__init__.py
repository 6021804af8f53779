"""Where models come from: a folder, a Hugging Face id, or the embedded default model.

Shared by both services. Needs no torch, and importing it imports no other library either.
"""

from millstream.hub.errors import FetchError, GgufError, HubError, ModelNotFound
from millstream.hub.models import display_name, fingerprint, has_tokenizer, local_folder, resolve
from millstream.hub.progress import OnProgress, StderrProgress, silent

__all__ = [
    "FetchError",
    "GgufError",
    "HubError",
    "ModelNotFound",
    "OnProgress",
    "StderrProgress",
    "display_name",
    "fingerprint",
    "has_tokenizer",
    "local_folder",
    "resolve",
    "silent",
]
