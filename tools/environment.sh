# Sourced by examples/quickstart.sh and tests/run.sh: a Python environment with this checkout and its needs in it.
#
# An active virtual or conda environment is used; otherwise .venv is made beside this checkout. What is installed is
# remembered, so that a second call does nothing and needs no network. MEGATRON_FT_TORCH names the torch to install
# where there is none (default: torch==2.13.0).

prepare_environment() { # prepare_environment EXTRAS
    local extras=$1
    if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
        if [ ! -x .venv/bin/python ]; then
            command -v python3 >/dev/null || give_up "python3 is not installed" "install Python 3.11 or newer"
            python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
                give_up "$(python3 --version) is too old" "put Python 3.11 or newer first on the PATH"
            echo "making .venv with $(python3 --version)"
            python3 -m venv .venv || give_up "python3 cannot make .venv" "install Python's venv module (python3-venv)"
        fi
        . .venv/bin/activate
    fi
    local home stamp
    home=$(python -c 'import sys; print(sys.prefix)')
    stamp="$home/.megatron-ft-$(cat setup.py pyproject.toml <(pwd; echo "$extras") | sha256sum | cut -c1-16)"
    if [ -e "$stamp" ]; then return; fi
    echo "installing into $home (once; a few minutes the first time)"
    python -c 'import torch' 2>/dev/null ||
        install "${MEGATRON_FT_TORCH:-torch==2.13.0}"
    install -e ".[$extras]"
    touch "$stamp"
}

install() {
    python -m pip install --quiet --disable-pip-version-check "$@" ||
        give_up "pip could not install $*" "look at pip's message above; the first installation needs the network"
}

give_up() { # give_up PROBLEM FIX
    printf 'error: %s\n  fix: %s\n' "$1" "$2" >&2
    exit 2
}
