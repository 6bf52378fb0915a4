"""What a script uses: ``Trainer``, its config and its builder."""

from flodl.spec.uncaught import exit_with_own_code

exit_with_own_code()
