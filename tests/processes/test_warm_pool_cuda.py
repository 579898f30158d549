"""The warm pool on a machine with GPUs, where packages initialise CUDA when they are imported.

The machine has no GPU: a planted ``sitecustomize`` shadows the calls of torch that reach the driver. As in CUDA, a
process whose parent has called ``cuInit`` cannot use CUDA (``torch.cuda._lazy_init`` raises in a bad fork, and the
driver returns CUDA_ERROR_NOT_INITIALIZED if something else has called it).
"""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from ft.job.agent import environment
from ft.platform import processes
from ft.platform.supervisor import command

ROOT = Path(__file__).parent.parent.parent
SHADOW = """
import os, sys
CALLED_BY = []
def cu_init():
    if CALLED_BY and CALLED_BY[0] != os.getpid():
        raise RuntimeError("CUDA driver error: initialization error")
    CALLED_BY.append(os.getpid())
if any("ft.job.agent.warm" in word for word in sys.orig_argv):
    sys.modules["shadow"] = sys.modules[__name__]
    __name__ = "torch.cuda"  # what follows stands for functions of that module
    import torch
    from types import SimpleNamespace
    def lazy_init():
        if not torch.cuda._initialized or CALLED_BY[:1] != [os.getpid()]:
            cu_init()
            torch.cuda._initialized = True
    def get_device_properties(device=None):
        torch.cuda._lazy_init()
        return SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    def current_device():
        torch.cuda._lazy_init()
        return 0
    torch.cuda.is_available = lambda: True
    torch.cuda.is_initialized = lambda: torch.cuda._initialized
    torch.cuda._lazy_init, torch.cuda.current_device = lazy_init, current_device
    torch.cuda.get_device_properties = get_device_properties
    torch.cuda.init = lambda: torch.cuda._lazy_init()
"""
# attention/dot_product_attention/backends.py of Transformer Engine 2.x, with flash-attn installed
ASKS = """
import torch
from torch.cuda import get_device_properties
def get_device_compute_capability():
    props = get_device_properties(torch.cuda.current_device())
    return (props.major, props.minor)
CAPABILITY = get_device_compute_capability()
"""
ASKS_MORE = """
import os, torch
SMS = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
assert os.environ["TORCH_WARM_POOL"] == "0", "torch 2.8 would start processes that compile"
"""
USES = "import torch\ntorch.cuda.init()\n"
SETS = "import torch\ntorch.cuda._initialized = True\n"  # as C++ of an extension does that calls lazyInitCUDA
BY_DRIVER = "import shadow\nshadow.cu_init()\n"  # as cupy, numba.cuda or NVSHMEM do, without torch
THREADS = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
USER = "try:\n    import transformer_engine\n    HAS_TE = True\nexcept Exception:\n    HAS_TE = False\n"
SCRIPT = """
import os, sys
assert "TORCH_WARM_POOL" not in os.environ, "workers compile as torch does by itself"
early = [name for name in sys.argv[1:] if name in sys.modules]
import torch, user0, user1, user2
torch.cuda.init()
print("WORKER", user2.HAS_TE, "transformer_engine" in early, len(early), flush=True)
"""
USERS = ["user0", "user1", "user2"]


@pytest.fixture
def pool(tmp_path):
    """Return a function that starts a pool with a planted package, and one worker; it returns (notes, output)."""

    def start(package: str):
        (tmp_path / "transformer_engine.py").write_text(package)
        for name in USERS:
            (tmp_path / f"{name}.py").write_text(USER)
        (tmp_path / "sitecustomize.py").write_text(SHADOW)
        (tmp_path / "script.py").write_text(SCRIPT)
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))}
        environ |= environment.defaults({})  # numpy's threads
        config = {
            "preload": [],
            "target": str(tmp_path / "script.py"),
            "is_module": False,
            "args": [*USERS, "transformer_engine"],
        }
        ours, theirs = socket.socketpair()
        processes.adopt_orphans()  # as the agent does: the worker's parent is this process
        words = command("ft.job.agent.warm", [str(theirs.fileno()), json.dumps(config)], os.getpid(), True)
        process = subprocess.Popen(words, env=environ, pass_fds=[theirs.fileno()], cwd=tmp_path)
        theirs.close()
        try:
            return _talk(ours, tmp_path / "worker.log")
        finally:
            ours.close()
            process.kill()
            process.wait()

    return start


def _talk(sock: socket.socket, log: Path) -> tuple[list[str], str]:
    sock.settimeout(300)
    notes = []
    with sock.makefile("rb") as reader:
        for line in reader:
            message = json.loads(line)
            if "note" in message:
                notes.append(message["note"])
            elif "ready" in message:
                sock.sendall(json.dumps({"fork": {"worker": "w", "log": str(log), "env": {}}}).encode() + b"\n")
            else:
                break
    os.waitpid(message["pid"], 0)
    return notes, log.read_text()


@pytest.mark.parametrize("package", [ASKS, ASKS_MORE])
def test_properties_of_the_gpu_are_known_without_cuda(package, pool):
    notes, said = pool(package)
    assert notes == [] and said == "WORKER True True 4\n"


@pytest.mark.parametrize(
    "package, words",
    [
        pytest.param(USES, "initialises CUDA", id="by torch"),
        pytest.param(SETS, "initialises CUDA", id="past torch's Python", marks=pytest.mark.long),
        pytest.param(BY_DRIVER, "makes CUDA unusable in forked processes", id="without torch", marks=pytest.mark.long),
    ],
)
def test_a_package_that_initialises_cuda_is_withheld_at_once(package, words, pool):
    notes, said = pool(package)
    assert said == "WORKER True False 0\n", notes
    assert words in notes[-1] and "workers will import" in notes[-1] and "transformer_engine" in notes[-1]
    assert len(notes) == (2 if package is BY_DRIVER else 1), "one new start, however many modules import the package"


@pytest.mark.long
def test_modules_that_start_threads_are_withheld(pool):
    notes, said = pool(THREADS)
    assert said == "WORKER True False 0\n" and len(notes) == len(USERS), notes
    for module, note in zip(USERS, notes, strict=True):
        assert note.startswith(f"warm pool: importing {module} starts 1 thread(s); workers will import {module} them")
