"""What rsync takes for ssh: hands the command that rsync wants run on the host, and its bytes, to the ssh session that
is open already. Standard library only.

    python relay.py DESCRIPTOR HOST COMMAND...

The descriptor is a socket: on it go the number of words of the command and the words, each ended by NUL, then what
rsync says; what comes back is for rsync.
"""

import contextlib
import os
import sys
import threading

PIECE_BYTES = 1 << 16


def _copy(source: int, target: int) -> None:
    """Until one of the two has ended; whoever notices, says so."""
    with contextlib.suppress(OSError):
        while piece := os.read(source, PIECE_BYTES):
            while piece:
                piece = piece[os.write(target, piece) :]


def _main(descriptor: int, words: "list[str]") -> None:
    for stream in (0, 1):  # rsync's pipes do not block, as ssh likes them
        os.set_blocking(stream, True)
    header = "".join(f"{word}\0" for word in (str(len(words)), *words))
    os.write(descriptor, os.fsencode(header))
    threading.Thread(target=_copy, args=(0, descriptor), daemon=True).start()
    _copy(descriptor, 1)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[3:])
