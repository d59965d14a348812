"""Registers the stages that kernels fuse, for the simulator and for GPUs."""

from dsv4jax.layer.kernels.base import ON_GPU, ON_SIMULATOR
from dsv4jax.layer.kernels.intake import IntakeKernels
from dsv4jax.layer.kernels.output import OutputKernels
from dsv4jax.layer.kernels.queries import QueryKernels
from dsv4jax.layer.stages.compose import FUSED, FusedStages

for _family in (ON_GPU, ON_SIMULATOR):
    FUSED[_family.backend] = FusedStages(intake=IntakeKernels, queries=QueryKernels, output=OutputKernels)
