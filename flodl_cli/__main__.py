"""``python -m flodl_cli`` is ``fdl``."""

from flodl_cli.main import main

main()
