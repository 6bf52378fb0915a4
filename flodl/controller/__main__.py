"""``python -m flodl.controller RUN_DIR``: the controller of one run."""

import asyncio
import gc
import logging
import resource
import sys
from pathlib import Path

from flodl.controller.process import serve
from flodl.errors import FlodlError
from flodl.launch.rundir import RunDir


def main() -> int:
    """Serve the run; its exit code is in outcome.json, ours says only whether we got that far."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # two log files a rank: 1024 is 500 ranks
    gc.freeze()  # what is imported stays: collections need not look at it
    try:
        asyncio.run(serve(RunDir(Path(sys.argv[1]))))
    except FlodlError as error:
        logging.getLogger("flodl.controller").error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
