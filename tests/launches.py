"""Count what a piece of code launches: collectives, and copies, as the dispatcher sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("c10d::", "_c10d_functional::")


class Launches(TorchDispatchMode):
    """While it is entered, every operator that runs is noted, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators.append(f"{func.namespace}::{func._schema.name.split('::')[1]}")
        return func(*args, **(kwargs or {}))

    @property
    def collectives(self) -> list[str]:
        """Names of the collectives, in order."""
        return [name for name in self.operators if name.startswith(COLLECTIVES)]

    def count(self, name: str) -> int:
        """How often an operator ran."""
        return self.operators.count(name)


def graph_operators(graph: torch.fx.GraphModule) -> list[str]:
    """Names of the operators that a graph calls, in order."""
    return [
        f"{node.target.namespace}::{node.target._schema.name.split('::')[1]}"
        for node in graph.graph.nodes
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    ]


def capturing_backend(seen: list[list[str]]) -> Callable[..., Any]:
    """A backend like ``aot_eager`` that notes the operators of each graph it runs."""
    from torch._dynamo.backends.common import aot_autograd

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        seen.append(graph_operators(graph))
        return graph.forward

    backend: Callable[..., Any] = aot_autograd(fw_compiler=compile_graph)
    return backend
