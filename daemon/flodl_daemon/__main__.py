"""``python -m flodl_daemon run --bootstrap-stdin [--pulse-fd N]``: serve one run on this host. For each beat it writes
a byte to descriptor N: how many ranks run.

Exit codes: 0 the run is over; 1 the controller was lost; 2 a permanent fault (bootstrap, devices, secret): starting it
again would end the same way.
"""

import argparse
import asyncio
import logging
import sys

from flodl.errors import ConfigError, FlodlError, JoinRefused, ProtocolError
from flodl.launch import bootstrap
from flodl_daemon.daemon import serve

PERMANENT = (ConfigError, JoinRefused, ProtocolError)


def main() -> int:
    """Read the bootstrap, say ready, serve."""
    parser = argparse.ArgumentParser(prog="flodl_daemon", allow_abbrev=False)
    parser.add_argument("command", choices=["run"])
    parser.add_argument("--bootstrap-stdin", action="store_true", required=True)
    parser.add_argument("--pulse-fd", type=int, default=-1)
    pulse_fd = parser.parse_args().pulse_fd
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.raiseExceptions = False  # whoever read our stderr may be gone; the run goes on
    try:
        given = bootstrap.read(sys.stdin.buffer)
        sys.stdout.buffer.write(bootstrap.ready_line(given.run_id))
        sys.stdout.buffer.flush()
        return asyncio.run(serve(given, pulse_fd))
    except FlodlError as error:
        logging.getLogger("flodl_daemon").error("%s", error)
        return 2 if isinstance(error, PERMANENT) else 1


if __name__ == "__main__":
    sys.exit(main())
