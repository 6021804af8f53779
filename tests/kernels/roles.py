"""Which part of a layer a product is, by its shape: of the built-in models."""

from __future__ import annotations

from millstream.engine.model_files.model_config import ModelConfig
from millstream.engine.model_files.shapes import SHAPE_NAMES, named_shape
from millstream.kernels import gemv

Shape = tuple[int, int]  # out_features, in_features

MODELS = [model for model in map(named_shape, SHAPE_NAMES) if isinstance(model, ModelConfig)]
ROLES: dict[Shape, str] = {
    shape: role for model in MODELS for role, shape in model.layer_products.items()
}
# The product that leaves the squares of what qkv and gate_up multiply.
BEFORE: dict[Shape, Shape] = {
    model.layer_products[role]: model.layer_products[before]
    for model in MODELS
    for role, before in (("qkv", "down"), ("gate_up", "o"))
}
_EPILOGUES = {"gate_up": gemv.SWIGLU, "o": gemv.RESIDUAL, "down": gemv.RESIDUAL}


def epilogue_of(shape: Shape) -> int:
    return _EPILOGUES.get(ROLES.get(shape, "head"), gemv.PLAIN)
