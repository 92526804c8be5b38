"""Bodies of random leaves: weights of every kind, and what is done with them. Plain PyTorch.

Promises: each maps a value of shape (rows, width) and a turn to a value of that shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

Tensor = torch.Tensor


class Body(nn.Module):
    """Weights and what is done with them. ``layers_apart``: its layers may be units of their own."""

    layers_apart = True

    def forward(self, x: Tensor, turn: int) -> Tensor:
        raise NotImplementedError


class LinearBody(Body):
    def __init__(self, width: int, size: int, *, bias: bool = True, frozen: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias).requires_grad_(not frozen)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return self.linear(x)


class LowRank(Body):
    """A frozen layer, and a trained change of low rank."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Norm(Body):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return self.norm(x)


class HiddenLayer(Body):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, size)
        self.down = nn.Linear(size, width, bias=False)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Strided(Body):
    """A weight whose data is not contiguous: transposed, or one row expanded."""

    def __init__(self, width: int, size: int, *, expanded: bool, frozen: bool = False) -> None:
        super().__init__()
        data = torch.randn(1, width).expand(size, width) if expanded else torch.randn(width, size).t()
        self.weight = nn.Parameter(data, requires_grad=not frozen)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return torch.tanh(x @ self.weight.t()) @ self.weight


class Tied(Body):
    """One weight in two layers, the second of which has a bias besides."""

    layers_apart = False

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Raw(Body):
    """A weight of a shape with little in it, multiplied element by element."""

    def __init__(self, width: int, size: int, *, shape: Callable[[int, int], tuple[int, ...]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape(width, size)))

    def forward(self, x: Tensor, turn: int) -> Tensor:
        if self.weight.numel() == 0:
            return x + self.weight.sum(0)
        return x * self.weight


class Listed(Body):
    """A weight that is reached by way of a list."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.weights = [self.weight]

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return x @ self.weights[0]


class Codes(Body):
    """A frozen weight of a dtype that is never cast, and a trained one."""

    def __init__(self, width: int, size: int, *, make: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.codes = nn.Parameter(make(width), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor, turn: int) -> Tensor:
        if self.codes.dtype == torch.int64:
            return x[:, self.codes] * self.scale
        if self.codes.dtype == torch.bool:
            return torch.where(self.codes, x, x * self.scale)
        real = self.codes.real if self.codes.is_complex() else self.codes
        return x * real.to(x.dtype) * self.scale


class Spare(Body):
    """Weights that are used always, in some turns, on one rank, and never."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.rand(width))
        self.sometimes = nn.Parameter(torch.rand(size, width))
        self.somewhere = nn.Parameter(torch.rand(size, width))
        self.never = nn.Parameter(torch.rand(size, width))

    def forward(self, x: Tensor, turn: int) -> Tensor:
        y = x * self.always
        if turn % 2:
            y = y * self.sometimes.mean(0)
        if dist.get_rank() == 0:
            y = y + (x @ self.somewhere.t()).tanh().mean(1, keepdim=True)
        return y


class BatchNorm(Body):
    """Running statistics that forward changes in place."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return self.norm(x)


class Counter(Body):
    """Buffers that forward changes in place and assigns anew, and one that it reads."""

    calls: Tensor
    turns: Tensor
    shift: Tensor

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("turns", torch.zeros(2))
        self.register_buffer("shift", torch.rand(width), persistent=False)
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor, turn: int) -> Tensor:
        self.calls.add_(1)
        self.turns = self.turns + turn
        return (x + self.shift.to(x.dtype)) * self.weight


class Convolution(Body):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, size, 3, padding=1)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        return self.convolution(x.unsqueeze(1)).mean(1)


class Recurrent(Body):
    """Its weights are reached by way of a list that torch's kernel takes whole."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        output: Tensor = self.cell(x)[0]
        return output


class Attention(Body):
    """Reads its last layer's weights past that layer's forward."""

    layers_apart = False

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1)

    def forward(self, x: Tensor, turn: int) -> Tensor:
        output: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return output


class Stacked(Body):
    """Weights in a list and a dict of parameters; some of three dimensions, of which each row of ``x`` takes one."""

    layers_apart = False

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.randn(2, width, width), torch.rand(width)])
        self.named = nn.ParameterDict({"shift": torch.rand(size, width)})

    def forward(self, x: Tensor, turn: int) -> Tensor:
        taken = self.layers[0][torch.arange(len(x)) % 2]
        y = torch.bmm(x.unsqueeze(1), taken).squeeze(1).tanh()
        return y * self.layers[1] + self.named["shift"].mean(0)


def _complex_numbers(width: int) -> Tensor:
    return torch.complex(torch.rand(width, dtype=torch.float32), torch.rand(width, dtype=torch.float32))


MAKE_BODY: dict[str, Callable[[int, int], Body]] = {
    "linear": LinearBody,
    "linear without bias": partial(LinearBody, bias=False),
    "frozen linear": partial(LinearBody, frozen=True),
    "low rank": LowRank,
    "norm": Norm,
    "hidden layer": HiddenLayer,
    "transposed": partial(Strided, expanded=False),
    "expanded": partial(Strided, expanded=True),
    "frozen expanded": partial(Strided, expanded=True, frozen=True),
    "tied": Tied,
    "gate": partial(Raw, shape=lambda width, size: (width,)),
    "one element": partial(Raw, shape=lambda width, size: (1,)),
    "one row": partial(Raw, shape=lambda width, size: (1, width)),
    "no element": partial(Raw, shape=lambda width, size: (0, width)),
    "listed": Listed,
    "integers": partial(Codes, make=torch.randperm),
    "booleans": partial(Codes, make=lambda width: torch.rand(width) > 0.5),
    "complex numbers": partial(Codes, make=_complex_numbers),
    "8-bit floats": partial(Codes, make=lambda width: torch.rand(width).to(torch.float8_e4m3fn)),
    "spare": Spare,
    "batch norm": BatchNorm,
    "counter": Counter,
    "convolution": Convolution,
    "recurrent": Recurrent,
    "attention": Attention,
    "stacked": Stacked,
}
