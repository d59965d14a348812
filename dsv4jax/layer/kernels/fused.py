"""Registers the stages that kernels fuse, for the simulator and for GPUs."""

import functools

from dsv4jax.layer.kernels.base import ON_GPU, ON_SIMULATOR
from dsv4jax.layer.kernels.cache import CacheUpdateKernels
from dsv4jax.layer.kernels.intake import IntakeKernels
from dsv4jax.layer.kernels.output import OutputKernels
from dsv4jax.layer.kernels.products import ProjectionsKernels
from dsv4jax.layer.kernels.queries import QueryKernels
from dsv4jax.layer.stages.compose import FUSED, FusedStages

for _family in (ON_GPU, ON_SIMULATOR):
    _products, _update = ProjectionsKernels(_family), CacheUpdateKernels(_family)
    FUSED[_family.backend] = FusedStages(
        intake=functools.partial(IntakeKernels, products=_products, kernels=_update),
        queries=functools.partial(QueryKernels, products=_products),
        output=functools.partial(OutputKernels, _products),
    )
