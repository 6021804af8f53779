"""The core process: `python -m millstream.engine.core_process --fd N`; startup/spawn.py starts it,
and frontend/supervisor.py is at the other end of its socket.

    reader thread:  socket -> commands        (end of file: the front end is gone, exit at once)
    main thread:    commands -> EngineCore -> step -> one StepRecord -> socket

It imports what the first frame needs, loads what the second one says, answers Loaded or LoadFailed,
then steps while there is work and sleeps on the queue while there is none. The parent alone decides
when it ends: signals to the whole process group (Ctrl-C, systemd's SIGTERM) are ignored.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import queue
import socket
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, assert_never

from millstream.engine.channel import CoreChannel
from millstream.engine.config import EngineConfig
from millstream.engine.core import EngineCore
from millstream.engine.grammars.errors import GrammarError, GrammarsFullError, VocabularyError
from millstream.engine.load import load_core
from millstream.engine.records import (
    AskStats,
    BlockEvents,
    CachedBlocks,
    Fault,
    Finish,
    ForgetGrammar,
    GrammarPrepared,
    Load,
    Loaded,
    LoadFailed,
    PrepareGrammar,
    Start,
    StatsRecord,
    Submit,
    ToCore,
    UnwatchBlocks,
    WatchBlocks,
)
from millstream.engine.request import FinishReason, samples_of
from millstream.engine.startup.child_process import CLEAR_ERRORS, explain, named, outlive_nobody
from millstream.engine.startup.phases import Phases, process_start_s
from millstream.engine.startup.preload import preload
from millstream.rpc.logs import configure_logging
from millstream.rpc.process import freeze_what_lives

logger = logging.getLogger(__name__)

_LAST_WORD_S = 1.0  # for a front end that lags; the end of file says the rest
_QUIET_S = 0.5  # without a command, before idle time is used

# Answers that other threads have are put here too, for the main thread to send.
Command = ToCore | GrammarPrepared
Commands = queue.SimpleQueue[Command]


def main() -> None:
    """Runs a core over the inherited socket; the exit code is 1 after a failure."""
    parser = argparse.ArgumentParser(prog="python -m millstream.engine.core_process")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args()
    outlive_nobody()
    gc.disable()  # until all is loaded: what a start makes, it keeps
    phases = Phases(process_start_s())
    configure_logging(arguments.log_level, process="core")
    channel = CoreChannel(socket.socket(fileno=arguments.fd))
    start = channel.receive()
    if start is None:
        return
    assert isinstance(start, Start)
    commands: Commands = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, commands), name="reader", daemon=True).start()
    phases.end("interpreter")
    preload(start.config)
    phases.end("imports")
    load = commands.get()
    assert isinstance(load, Load)
    phases.end("waiting for the model's folder")
    core = _load(start.config, load, channel, phases)
    if core is None:
        sys.exit(1)
    try:
        _run(core, commands, channel)
    except OSError as error:  # the reader thread is about to exit for the same reason
        logger.debug("the front end is gone: %s", error)
    except Exception as error:
        logger.exception("the engine core failed")
        channel.send(Fault(f"the engine core failed: {named(error)}"))
    sys.exit(1)


def _read(channel: CoreChannel, commands: Commands) -> None:
    """The reader thread: ends the process at the end of file, whatever the main thread does."""
    while (command := channel.receive()) is not None:
        commands.put(command)
    os._exit(0)


def _load(
    config: EngineConfig, load: Load, channel: CoreChannel, phases: Phases
) -> EngineCore | None:
    """The core, announced with Loaded; None once LoadFailed is sent."""
    model_dir = None if load.model_dir is None else Path(load.model_dir)
    try:
        core = load_core(config, model_dir, lambda reason: _end_with_rank(reason, channel))
    except Exception as error:
        level = logging.DEBUG if isinstance(error, CLEAR_ERRORS) else logging.ERROR
        logger.log(level, "cannot load", exc_info=True)
        channel.send(LoadFailed(explain(error)))
        return None
    phases.include(core.info.phases)
    freeze_what_lives()
    gc.enable()
    phases.end("other")
    channel.send(Loaded(core.info, phases.so_far()))
    return core


def _end_with_rank(reason: str, channel: CoreChannel) -> None:
    """The ranks' thread: one of them is lost. The main thread may sleep, or wait in a collective
    for ever, so the process ends here."""
    logger.error("%s", reason)
    with contextlib.suppress(OSError):
        channel.send(Fault(reason), patience_s=_LAST_WORD_S)
    os._exit(1)


def _run(core: EngineCore, commands: Commands, channel: CoreChannel) -> None:
    """Steps for ever; returns never, raises what the core or the channel raises."""
    while True:
        asked: list[int] = []
        if not core.has_work:
            _obey(core, next_command(core, commands), asked, channel, commands)
        while not commands.empty():
            _obey(core, commands.get(), asked, channel, commands)
        if core.has_work:
            channel.send(core.step())
        _tell_block_events(core, channel)
        # After the step, which tells of what ended: no gauge is ahead of what streams were sent.
        for token in asked:
            channel.send(StatsRecord(token, core.stats()))


def next_command(core: EngineCore, commands: Commands, quiet_s: float = _QUIET_S) -> Command:
    """The next command, once it is there. After a quiet time, prepares for later steps meanwhile:
    who sends a request then may wait for the end of a piece of that, some ten milliseconds; who
    sends one as soon as another is answered never does."""
    with contextlib.suppress(queue.Empty):
        return commands.get(timeout=quiet_s)
    while commands.empty() and core.prepare_ahead():
        pass
    return commands.get()


def _obey(
    core: EngineCore, command: Command, asked: list[int], channel: CoreChannel, commands: Commands
) -> None:
    match command:
        case Submit(requests):
            for request in requests:
                for sample in samples_of(request):
                    core.submit(sample)
        case Finish(keys, reason):
            core.finish(keys, FinishReason(reason))
        case AskStats(token):
            asked.append(token)
        case WatchBlocks(token):
            _tell_block_events(core, channel)  # of what the answer has already
            channel.send(CachedBlocks(token, core.watch_blocks()))
        case UnwatchBlocks():
            core.unwatch_blocks()
        case PrepareGrammar(token, spec):
            outcome = core.prepare_grammar(spec)
            outcome.add_done_callback(lambda outcome: commands.put(_prepared(token, outcome)))
        case ForgetGrammar(spec):
            core.forget_grammar(spec)
        case GrammarPrepared():
            channel.send(command)
        case Start() | Load():
            raise ValueError("a core starts once")
        case _:
            assert_never(command)


def _prepared(token: int, outcome: Future[Any]) -> GrammarPrepared:
    error = outcome.exception()
    if error is None:
        return GrammarPrepared(token)
    if not isinstance(error, GrammarError):
        logger.error("compiling a grammar failed", exc_info=error)
        return GrammarPrepared(token, "compiling it failed; the service's log has it")
    return GrammarPrepared(
        token,
        str(error),
        has_vocabulary=not isinstance(error, VocabularyError),
        has_room=not isinstance(error, GrammarsFullError),
    )


def _tell_block_events(core: EngineCore, channel: CoreChannel) -> None:
    if events := core.take_block_events():
        channel.send(BlockEvents(events))


if __name__ == "__main__":
    main()
