"""One of several assemblers on one port, as a process that begins with nothing imported."""

from pathlib import Path

from shared import server
from shared.server import Seat
from shared.settings import AssemblerSettings
from shared.workers import Post


def work(settings: AssemblerSettings, processes: Path, post: Post) -> int:
    """Serves until SIGTERM; returns the exit code. processes: the directory that all of them share."""
    from assembler.application import AssemblerApplication  # noqa: PLC0415 -- the parent, too, imports this module

    settings = settings.model_copy(update={"port": post.port})
    seat = Seat(post.number, on_ready=lambda: post.ready.send(None))
    return server.run(AssemblerApplication(settings, processes), settings, seat)
