"""Registers the stages that kernels fuse, for the simulator and for GPUs."""

import functools

from dsv4jax.layer.backend import PALLAS, SIMULATED
from dsv4jax.layer.kernels.cache import CacheUpdateKernels
from dsv4jax.layer.kernels.intake import IntakeKernels
from dsv4jax.layer.kernels.output import OutputKernels
from dsv4jax.layer.kernels.products import ProjectionsKernels
from dsv4jax.layer.kernels.queries import QueryKernels
from dsv4jax.layer.stages.compose import FUSED, FusedStages

for _name, _simulate in ((PALLAS, False), (SIMULATED, True)):
    _products, _update = ProjectionsKernels(_simulate), CacheUpdateKernels(_simulate)
    FUSED[_name] = FusedStages(
        intake=functools.partial(IntakeKernels, products=_products, kernels=_update),
        queries=functools.partial(QueryKernels, products=_products),
        output=functools.partial(OutputKernels, _products),
    )
