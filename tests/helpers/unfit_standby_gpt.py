"""pretrain_gpt.py on a machine whose copies of memory are damaged, as far as the check of standbys can see."""

import itertools
import sys

import pretrain_gpt
from ft.worker import session as admission

if __name__ == "__main__":
    checksums = itertools.count()
    admission.checksum = lambda data: next(checksums)
    sys.exit(pretrain_gpt.main(sys.argv[1:]))
