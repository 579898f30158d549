"""``python -m ft.job.control``: the side-car."""

from ft.job.control.sidecar import main

if __name__ == "__main__":
    main()
