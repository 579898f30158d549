"""``python -m ft.job.quorum``: the quorum server."""

from ft.job.quorum.server import main

if __name__ == "__main__":
    main()
