"""``ft simulate control``: the control plane in simulated clusters."""


def add_parser(simulations) -> None:
    """Adds ``control``; ``main`` is a function of the parsed arguments that returns the exit code."""
    parser = simulations.add_parser("control", help="the control plane's decisions under simulated faults")
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="simulate seeds 0 to N - 1")
    parser.set_defaults(main=lambda arguments: 0)
