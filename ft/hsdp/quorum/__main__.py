"""``python -m ft.hsdp.quorum``: the quorum server."""

from ft.hsdp.quorum.server import main

if __name__ == "__main__":
    main()
