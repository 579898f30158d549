"""Makes a device ready in a standby, before the standby has a logical rank.

A process pays for the first use of a GPU once: the driver makes a context, libraries (cuBLAS, cuDNN, Transformer
Engine) are loaded and allocate handles and workspaces, and the code of each kernel is loaded into the context at its
first launch. A standby whose node has a GPU to spare pays for that while it waits: it runs the operators of a
transformer layer once, forward and backward, and with that learns whether the device computes right. It makes no
communicator, and keeps no tensor.
"""

import sys
import time
from collections.abc import Callable, Iterator

import numpy
import torch
import torch.nn.functional as F

from ft.base.errors import DeviceUnusable

_TOKENS, _HIDDEN, _HEADS = 128, 256, 4
_SIZE = 384


class WarmDevice:
    """Prepares a device in small pieces, so that a logical rank that comes meanwhile is taken soon.

    Args:
        select: function that makes the device with an index the current one; None: devices are left alone.
    """

    def __init__(self, select: Callable[[int], None] | None = None):
        self._select = select
        self._pieces: Iterator[str] | None = None
        self._index = -1
        self._took: list[str] = []

    @property
    def is_wanted(self) -> bool:
        """Return whether there is a device that is not ready yet."""
        return self._pieces is not None

    def want(self, index: int | None) -> None:
        """Begin to prepare the device with this index, unless one was named before; None: there is none to spare."""
        if index is not None and self._select is not None and self._index < 0:
            self._index, self._pieces = index, self._prepare(self._select)

    def go_on(self) -> str:
        """Do the next piece. Return what to say when all are done, before that "".

        A piece that fails on a sound device, because there is no kernel for it or no memory, ends the preparation, with
        whatever exception a library raises: the standby is of use without it.

        Raises:
            DeviceUnusable: the device cannot be used, or computes wrongly.
        """
        assert self._pieces is not None
        began = time.perf_counter()
        try:
            if piece := next(self._pieces, ""):
                self._took.append(f"{piece} {1e3 * (time.perf_counter() - began):.0f} ms")
                return ""
            self._pieces = None
            return f"device {self._index} is ready: {', '.join(self._took)}"
        except Exception as error:
            self._pieces = None
            self._examine(error)
            return f"device {self._index} is prepared in part: {error}"

    def _prepare(self, select: Callable[[int], None]) -> Iterator[str]:
        """Yield the name of each piece once it is done."""
        select(self._index)
        device = _current()
        torch.ones(1, device=device).add_(1).item()
        yield "context"
        _multiply(device)
        yield "products"
        for dtype in (torch.bfloat16, torch.float32):
            _train_layer(device, dtype)
            yield f"layer ({str(dtype).removeprefix('torch.')})"
        if "transformer_engine.pytorch" in sys.modules:
            _train_te(device)
            yield "Transformer Engine"
        _copy(device)
        yield "copies"

    def _examine(self, error: Exception) -> None:
        """Raise DeviceUnusable if not even a small product comes out right after ``error``."""
        if isinstance(error, DeviceUnusable):
            raise error
        try:
            _multiply(_current())
        except Exception:
            raise DeviceUnusable(f"device {self._index}: {error}") from error


def _current() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def fault_of_products(
    multiply: Callable[[numpy.ndarray, numpy.ndarray], numpy.ndarray], draw: numpy.random.Generator
) -> str:
    """Return what is wrong with the products of matrices that ``multiply`` computes; "": nothing.

    Sums of products of small whole numbers are exact in float32, in whatever order a library adds them up. So a
    difference is a fault of the machine, and not one of rounding.
    """
    left, right = (draw.integers(-8, 9, (_SIZE, _SIZE)).astype(numpy.float32) for _ in range(2))
    first, second = multiply(left, right), multiply(left, right)
    if first.tobytes() != second.tobytes():
        return "a product of matrices differs when it is computed twice"
    is_right = numpy.array_equal(first.sum(axis=0, dtype=numpy.float64), left.sum(axis=0, dtype=numpy.float64) @ right)
    return "" if is_right else "a product of matrices is wrong"


def _multiply(device: torch.device) -> None:
    def multiply(left: numpy.ndarray, right: numpy.ndarray) -> numpy.ndarray:
        return (torch.from_numpy(left).to(device) @ torch.from_numpy(right).to(device)).cpu().numpy()

    if fault := fault_of_products(multiply, numpy.random.default_rng(0)):
        raise DeviceUnusable(f"{device}: {fault}")


def _train_layer(device: torch.device, dtype: torch.dtype) -> None:
    """Run the operators of a transformer layer with its loss and an Adam update; shapes [batch, tokens, hidden]."""
    x = torch.full((1, _TOKENS, _HIDDEN), 0.5, dtype=dtype, device=device, requires_grad=True)
    weights = [torch.full(shape, 0.01, dtype=dtype, device=device, requires_grad=True) for shape in _SHAPES]
    qkv, projection, up, down = weights
    q, k, v = F.linear(F.layer_norm(x, [_HIDDEN]), qkv).view(1, _TOKENS, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
    hidden = x + F.linear(attended, projection)
    hidden = hidden + F.linear(F.gelu(F.linear(hidden, up)), down)
    labels = torch.zeros(_TOKENS, dtype=torch.int64, device=device)
    F.cross_entropy(hidden.float().view(_TOKENS, _HIDDEN), labels).backward()
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    torch.optim.AdamW(weights, lr=1e-3, foreach=True).step()


_SHAPES = ((3 * _HIDDEN, _HIDDEN), (_HIDDEN, _HIDDEN), (4 * _HIDDEN, _HIDDEN), (_HIDDEN, 4 * _HIDDEN))


def _train_te(device: torch.device) -> None:
    te = sys.modules["transformer_engine.pytorch"]
    layer = te.LayerNormMLP(_HIDDEN, 4 * _HIDDEN, params_dtype=torch.bfloat16, device=device)
    layer(torch.full((_TOKENS, 1, _HIDDEN), 0.5, dtype=torch.bfloat16, device=device)).sum().backward()


def _copy(device: torch.device) -> None:
    """Copy to pinned host memory on a stream of its own, as snapshots do, and give the memory of all pieces back."""
    if device.type != "cuda":
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).copy_(
            torch.zeros(1 << 20, dtype=torch.uint8, device=device), non_blocking=True
        )
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
