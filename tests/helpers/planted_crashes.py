"""What crashes leave in the logs of workers, and the orders that follow from them."""

USERS = """\
Traceback (most recent call last):
  File "train.py", line 18, in <module>
    train()
  File "train.py", line 15, in train
    check_batch(step)
  File "train.py", line 8, in check_batch
    raise ValueError(f"sample {sample} of step 3 has no tokens")
ValueError: sample 17 of step 3 has no tokens
"""
GLOO = """\
Traceback (most recent call last):
  File "train.py", line 16, in train
    dist.all_reduce(gradient)
  File "distributed_c10d.py", line 3252, in all_reduce
    work.wait()
RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:47538.
"""
NCCL_TIMEOUT = """\
Traceback (most recent call last):
  File "train.py", line 16, in train
    work.wait()
torch.distributed.DistBackendError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)
"""
SEGFAULT = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f6372e50b80 (most recent call first):
  File "train.py", line 12 in check_batch
  File "train.py", line 18 in <module>

Extension modules: numpy, torch._C (total: 21)
"""

TEXTS = {"user": USERS, "gloo": GLOO, "nccl": NCCL_TIMEOUT, "segfault": SEGFAULT}
ORDERS = {
    "stop": {"kind": "Stop", "code": 1, "message": ""},
    "restart": {"kind": "Restart", "number": 1, "reason": "", "ranks": {}},
}
