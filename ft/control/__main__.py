"""``python -m ft.control``: the side-car."""

from ft.control.sidecar import main

if __name__ == "__main__":
    main()
