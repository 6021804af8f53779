"""`millstream health`: whether the services serve."""

from __future__ import annotations

import argparse
import asyncio
import time

from millstream.client.cli import flags
from millstream.client.connection import Connection
from millstream.client.services import Services
from millstream.client.types import Health

HELP = "tell whether the services serve; exit code 0 if so, else 1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Checks both services, or only those whose target is given."
    parser.add_argument(
        "--engine",
        metavar="TARGET",
        help=f"or several with commas between, which must all serve; default: {flags.ENGINE}",
    )
    parser.add_argument("--tokenizer", metavar="TARGET", help=f"default: {flags.TOKENIZER}")
    parser.add_argument(
        "--watch", action="store_true", help="print each change, until Ctrl-C, instead"
    )


def run(args: argparse.Namespace) -> int:
    targets = {"engine": args.engine, "tokenizer": args.tokenizer}
    if args.engine is None and args.tokenizer is None:
        targets = {"engine": flags.ENGINE, "tokenizer": flags.TOKENIZER}
    return asyncio.run(_watch(targets) if args.watch else _check(targets))


async def _check(targets: dict[str, str | None]) -> int:
    services = _services(targets)
    results = {}
    for connection in _connections(services):
        results[connection] = await connection.check()
        print(f"{connection.kind} {connection.target}: {results[connection]}")
    await services.close()
    return 0 if set(results.values()) == {Health.SERVING} else 1


async def _watch(targets: dict[str, str | None]) -> int:
    services = _services(targets)

    async def follow(connection: Connection) -> None:
        async for health in connection.watch():
            now = time.strftime("%H:%M:%S")
            print(f"{now} {connection.kind} {connection.target}: {health}", flush=True)

    await asyncio.gather(*map(follow, _connections(services)))
    return 0


def _services(targets: dict[str, str | None]) -> Services:
    engine = targets["engine"]
    engines = None if engine is None else flags.targets(engine)
    return Services(engine=engines, tokenizer=targets["tokenizer"], timeout_s=0)


def _connections(services: Services) -> list[Connection]:
    tokenizer = [] if services.tokenizer is None else [services.tokenizer]
    return [*services.engines.connections, *tokenizer]
