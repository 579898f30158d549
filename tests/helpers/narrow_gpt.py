"""pretrain_gpt.py whose few ranks are connected as thousands are: trees of several levels, and all groups sparse."""

import sys

import pretrain_gpt
from ft.state.groups import registry, tree

FAN_OUT = 2

if __name__ == "__main__":
    tree.FAN_OUT = FAN_OUT
    registry.MOST_IN_MESH = 2
    sys.exit(pretrain_gpt.main(sys.argv[1:]))
