"""The program `kubectl-gym`, which `kubectl gym` runs. What it can do is in `arguments`, which takes its time to
load."""

import os
import signal


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until there is something to clean up
    from gym_operator.plugin.program import main as run

    run()


if __name__ == "__main__":
    main()
