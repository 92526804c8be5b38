"""Layout cases: random tensors for properties, and the layers of released models."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
from hypothesis import strategies as st

from fsdp_fn.layout import BlockAtomic, Flat, Granularity, TensorAtomic, TensorSpec

GRANULARITIES: st.SearchStrategy[Granularity] = st.one_of(
    st.just(Flat()), st.builds(BlockAtomic, st.integers(1, 6)), st.just(TensorAtomic())
)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 33]), max_size=3).map(tuple)
SPECS = st.lists(
    st.builds(
        TensorSpec,
        name=st.just(""),
        shape=SHAPES,
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
        requires_grad=st.booleans(),
        granularity=st.none() | GRANULARITIES,
    ),
    max_size=12,
).map(lambda specs: tuple(replace(spec, name=f"t{i}") for i, spec in enumerate(specs)))


def load_model_shapes() -> ModuleType:
    """The shapes that the padding benchmark prints its table for."""
    path = Path(__file__).parents[1] / "benchmarks" / "model_shapes.py"
    spec = importlib.util.spec_from_file_location("model_shapes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SHAPES_OF_LAYERS = load_model_shapes()
LAYERS = {
    name: tuple(TensorSpec(tensor, shape, torch.bfloat16) for tensor, shape in shapes.items())
    for name, shapes in {
        "llama3-8b": SHAPES_OF_LAYERS.llama3_8b_layer(),
        "llama3-70b": SHAPES_OF_LAYERS.llama3_70b_layer(),
        "qwen3-235b": SHAPES_OF_LAYERS.qwen3_235b_layer(),
        "deepseek-v3-dense": SHAPES_OF_LAYERS.deepseek_v3_dense_layer(),
        "deepseek-v3-experts": SHAPES_OF_LAYERS.deepseek_v3_moe_layer(),
    }.items()
}
