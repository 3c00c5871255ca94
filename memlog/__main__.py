"""Run the command line with ``python -m memlog`` if the script ``memlog`` is not on the path."""

from memlog.cli.main import main

if __name__ == "__main__":
    main()
