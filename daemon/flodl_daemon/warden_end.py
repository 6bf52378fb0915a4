"""The end of the warden: a daemon hears of it by the pipe FLODL_WARDEN_FD; one that has none hears of nothing."""

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import TypeVar

from flodl.errors import PeerLost

T = TypeVar("T")


def watch(tell: Callable[[], object]) -> Callable[[], object]:
    """Call ``tell`` once, in the running loop, when the warden has ended.

    Returns:
        What ends the watch.
    """
    loop, fd = asyncio.get_running_loop(), int(os.environ.get("FLODL_WARDEN_FD", "-1"))
    if fd < 0:
        return lambda: None
    os.set_inheritable(fd, False)

    def on_end() -> None:
        loop.remove_reader(fd)
        tell()

    loop.add_reader(fd, on_end)
    return lambda: loop.remove_reader(fd)


async def before(work: Coroutine[None, None, T]) -> T:
    """The result of ``work``, if it comes before the warden's end.

    Raises:
        PeerLost: the warden has ended.
    """
    task, ended = asyncio.create_task(work), asyncio.Event()
    waiting = asyncio.create_task(ended.wait())
    unwatch = watch(ended.set)
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise PeerLost("its warden has ended before the controller let it in")
    finally:
        unwatch()
        task.cancel()
        waiting.cancel()
