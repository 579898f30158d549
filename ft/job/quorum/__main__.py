"""Entry point of the quorum server: ``python -m ft.job.quorum``."""

from ft.job.quorum.server import main

if __name__ == "__main__":
    main()
