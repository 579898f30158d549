"""``python -m ft.job.control`` runs the control plane process."""

from ft.job.control.sidecar import main

if __name__ == "__main__":
    main()
