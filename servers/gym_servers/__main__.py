"""The program `gym-servers`. What it can do is in `commands`, which takes its time to load."""

from gym_servers.first_process import end_when_told


def main() -> None:
    """Entry point."""
    end_when_told()
    from gym_servers.commands import main as run

    run()


if __name__ == "__main__":
    main()
