"""`millstream-tokenizer`: the service's command line; the only place that puts it together."""

from __future__ import annotations

import argparse
import os
import sys

# gRPC's own lines for what we report in one of ours (a taken port). Read when grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# The service spreads its work over threads itself; two such schemes would fight for the cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it advises to install torch

from millstream import hub
from millstream.rpc.flags import add_server_arguments, server_config
from millstream.rpc.logs import configure_logging
from millstream.rpc.parsing import HelpFormatter, Parser
from millstream.rpc.process import open_standard_streams, run_and_exit
from millstream.rpc.server import ServerConfig, StartError, run_service
from millstream.tokenizer import config as tokenizer_config
from millstream.tokenizer.codec import Codec, TokenizerLoadError
from millstream.tokenizer.config import TokenizerConfig
from millstream.tokenizer.service import LoadedTokenizer, TokenizerService

PROG = "millstream-tokenizer"
DEFAULT_PORT = 50052


def main() -> None:
    """Serves until a signal; exits with 0, or with 1 and one line on stderr, or 2 on bad flags."""
    open_standard_streams()
    arguments = _parser().parse_args()
    # transformers imports torch where it is installed: a second and 200 MB for nothing.
    sys.modules["torch"] = None  # type: ignore[assignment]
    config = tokenizer_config.from_arguments(arguments)
    configure_logging(arguments.log_level, process="tokenizer")
    run_and_exit(PROG, lambda: _serve(config, server_config(arguments)))


async def _serve(config: TokenizerConfig, server: ServerConfig) -> int:
    service = TokenizerService(
        config, lambda: _load(config), max_message_bytes=server.max_message_bytes
    )
    return await run_service(service, server)


def _load(config: TokenizerConfig) -> LoadedTokenizer:
    """Raises StartError. Blocks, maybe for minutes (a download)."""
    try:
        # A folder need not be a model: a tokenizer alone will do.
        local = hub.local_folder(config.model) if config.model else None
        model_dir = local or hub.resolve(config.model, weights=False)
        codec = Codec.load(model_dir)
    except (hub.HubError, TokenizerLoadError) as error:
        raise StartError(str(error)) from error
    return LoadedTokenizer(
        name=config.served_model_name or hub.display_name(config.model, model_dir),
        fingerprint=hub.fingerprint(model_dir),
        codec=codec,
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROG,
        description="Serves a model's tokenizer over gRPC (millstream.v1.Tokenizer): texts and "
        "chats to token ids, token ids to text. Stops on Ctrl-C or SIGTERM after a drain.",
        formatter_class=HelpFormatter,
    )
    add_server_arguments(parser, default_port=DEFAULT_PORT)
    tokenizer_config.add_arguments(parser)
    return parser


if __name__ == "__main__":
    main()
