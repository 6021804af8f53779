"""The public vllm.grpc.engine.VllmEngine service over the same engine: a translation, no more.

Its stubs come with PyPI's smg-grpc-proto, which the rest of the engine does not need.
"""

from __future__ import annotations

import logging

from millstream.engine.service import Dialect

logger = logging.getLogger(__name__)


def find_dialect() -> Dialect | None:
    """The dialect; None, and a line in the log, where its stubs cannot be imported."""
    try:
        from millstream.engine.vllm_dialect.servicer import DIALECT
    except ImportError as error:
        if not (error.name or "").startswith("smg_grpc_proto"):
            raise
        logger.info("no vllm.grpc.engine.VllmEngine: pip install smg-grpc-proto brings it")
        return None
    except RuntimeError as error:  # stubs that were made for a newer grpcio or protobuf
        reason = " ".join(str(error).split())
        logger.warning("no vllm.grpc.engine.VllmEngine: smg-grpc-proto does not load: %s", reason)
        return None
    return DIALECT
