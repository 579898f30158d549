# Sourced by examples/quickstart.sh, .ci/run and the scripts of tests/: a Python environment with this checkout and its
# needs in it.
#
# An active virtual or conda environment is used; otherwise .venv is made beside this checkout. What is installed is
# remembered, so that a second call does nothing and needs no network. MEGATRON_FT_TORCH names the torch to install
# where there is none (default: 2.13.0 with Python 3.11, what pip chooses with newer ones). MEGATRON_FT_CORE names the
# release of megatron-core to install instead of the one in setup.py; "newest" is that of setup.py.

# Options of pytest: on each processor, and on at most 8, the tests of one file at a time.
side_by_side=(-n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder)

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
    stamp="$home/.megatron-ft-$(cat setup.py pyproject.toml <(pwd; echo "${MEGATRON_FT_CORE:-newest}") | sha256sum | cut -c1-16)-"
    if compgen -G "$stamp$extras*" >/dev/null; then return; fi  # with these extras, and perhaps more
    echo "installing into $home (once; a few minutes the first time)"
    rm -f "$home"/.megatron-ft-*  # of a checkout that this one takes the place of
    python -c 'import torch' 2>/dev/null || install "${MEGATRON_FT_TORCH:-$(default_torch)}"
    install -e ".[$extras]"
    if [ "${MEGATRON_FT_CORE:-newest}" != newest ]; then install "megatron-core==$MEGATRON_FT_CORE"; fi
    touch "$stamp$extras"
}

# What is said of the sources before any test runs: style, format, import contracts, types.
check_sources() {
    python -m ruff check . && python -m ruff format --check . && lint-imports --no-logo && python -m mypy
}

# Runs a command as most users of a cluster have to: without any capability of the kernel, and with the file descriptors
# that a system gives by default.
as_plain_user() {
    local before=()
    if [ "$(id -u)" -eq 0 ]; then
        before=(setpriv --bounding-set=-all --inh-caps=-all --ambient-caps=-all)
    fi
    (ulimit -n 1024 && exec "${before[@]}" "$@")
}

# Installs the Debian packages that tests use and that are missing, if this is root and apt-get is there. A package that
# cannot be installed is named, and its tests are skipped. Services of the packages are not started.
install_debian_packages() {
    local pair missing=()
    for pair in etcd:etcd-server slurmctld:slurm-wlm munged:munge ip:iproute2 unshare:util-linux cc:gcc; do
        command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
    done
    if [ ${#missing[@]} -eq 0 ] || [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then return; fi
    echo "installing Debian packages: ${missing[*]}"
    (
        policy=/usr/sbin/policy-rc.d
        if [ ! -e $policy ]; then
            trap 'rm -f "$policy"' EXIT
            printf '#!/bin/sh\nexit 101\n' >$policy
            chmod 755 $policy
        fi
        apt_get update || true
        apt_get install --no-install-recommends "${missing[@]}" && exit
        for package in "${missing[@]}"; do
            apt_get install --no-install-recommends "$package" || echo "not installed: $package (see apt-get's message)"
        done
    )
}

apt_get() {
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq -y -o Dpkg::Use-Pty=0 "$@" >/dev/null
}

default_torch() {
    python -c 'import sys; print("torch==2.13.0" if sys.version_info < (3, 12) else "torch")'
}

newest_python() { # prints the newest Python from 3.12 on that is on the PATH or that pyenv has; nothing if there is none
    local candidate
    for candidate in $(compgen -c python3. | grep -xE 'python3\.[0-9]+' | sort -u) \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
        "$candidate" -c '
import sys
if sys.version_info >= (3, 12):
    print("%d.%02d.%03d" % sys.version_info[:3], sys.executable)' 2>/dev/null || true
    done | sort | tail -n 1 | cut -d " " -f 2-
}

install() {
    python -m pip install --quiet --disable-pip-version-check "$@" ||
        give_up "pip could not install $*" "look at pip's message above; the first installation needs the network"
}

give_up() { # give_up PROBLEM FIX
    printf 'error: %s\n  fix: %s\n' "$1" "$2" >&2
    exit 2
}
