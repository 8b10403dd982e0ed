"""The command `fp4convert`, and python -m fp4convert: told to stop, it ends well, also before the command line is loaded."""

from __future__ import annotations

import sys

from fp4convert.stops import Stopped, listen


def main() -> None:
    """Run the command line; every expected failure becomes one message and its exit code."""
    try:
        listen()
        from fp4convert.cli import main as command_line

        command_line()
    except Stopped as stopped:
        sys.stderr.write("interrupted\n")
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main()
