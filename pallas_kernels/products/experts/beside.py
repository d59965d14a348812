"""One launch of a product with experts and, in blocks of its own, of the same product of the shared expert.

The shared expert's product then takes hardly any time of its own. One token picks few experts, whose units leave
multiprocessors free for its blocks. Of more tokens the last units do: then its blocks begin when those of the experts
end. Its sums have the same parts, and the same bits, as in a launch of their own.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from pallas_kernels.activations import ActivationRows
from pallas_kernels.language.lanes import Buffer
from pallas_kernels.language.launch import SCRATCH_BYTES, Grid, launch
from pallas_kernels.language.tensor_cores import Role, TensorCores
from pallas_kernels.language.values import negate
from pallas_kernels.products.epilogues.faces import Made
from pallas_kernels.products.experts import sm90
from pallas_kernels.products.experts.layout import Layout
from pallas_kernels.products.few import block as few
from pallas_kernels.products.few import sm90 as few_sm90
from pallas_kernels.products.few.launch import alone_in_a_block
from pallas_kernels.products.problem import Unsupported
from pallas_kernels.products.weights import ROWS

_MOST_AFTER = 32  # rows of the shared expert's product, up to which its blocks may come after those of the experts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A launch of two products: its first blocks compute that of experts, and the others that of the shared one."""

    experts: Layout
    shared: few.Layout

    @property
    def grid(self) -> Grid:
        one, other = self.experts.grid, self.shared.grid
        return Grid(
            blocks=(one.blocks[0] + other.blocks[0], 1),
            warpgroups=one.warpgroups,
            shared_bytes=max(one.shared_bytes, other.shared_bytes),
        )

    def launch(
        self, inputs: tuple[sm90.ExpertInputs, few.FewInputs[Any]], rows: ActivationRows, *, simulate: bool
    ) -> tuple[Made, Made]:
        """Return what is made of both products. ``rows`` are those of x, for the experts."""
        one, other = self.experts, self.shared
        made = launch(
            functools.partial(_body, launched=self),
            name=f"{one.epilogue.name}_and_shared",
            grid=self.grid,
            inputs=inputs,
            state=(
                one.epilogue.state(one.epilogue.x_rows, one.weight.outputs),
                other.epilogue.state(other.rows, other.weight.shape[0]),
            ),
            simulate=simulate,
        )
        return one.epilogue.finished(made[0], rows.shape[0]), other.epilogue.finished(made[1], other.rows)


def _body(
    machine: TensorCores,
    inputs: tuple[sm90.ExpertInputs, few.FewInputs[Buffer]],
    out: tuple[Made, Made],
    *,
    launched: Beside,
) -> None:
    experts, shared = launched.experts, launched.shared
    is_of_experts, taken = machine.block(0) < experts.blocks, machine.shared_bytes
    with machine.when(is_of_experts):
        sm90.body(machine, inputs[0], out[0], layout=experts)
    most, machine.shared_bytes = machine.shared_bytes, taken  # a block computes one of the products
    multiplying, loading = sm90.REGISTERS[experts.warpgroups]

    def attend() -> None:
        """Be at the barriers of the block, which wait for the warpgroup that loads codes of experts elsewhere."""
        machine.loop(shared.barriers, lambda _, __: machine.barrier("block"))

    with machine.when(negate(is_of_experts)):
        block = few.Block.of(machine, inputs[1], shared)
        machine.roles(
            Role(
                warpgroups=experts.warpgroups,
                registers=multiplying,
                body=lambda: few_sm90.compute(machine, block, inputs[1], out[1]),
            ),
            Role(warpgroups=1, registers=loading, body=attend),
        )
    machine.shared_bytes = max(most, machine.shared_bytes)


def beside(experts: Layout, shared: few.Layout) -> Beside | Unsupported:
    """Return one launch of two products that have these layouts alone, if the shared one takes no time of its own."""
    if experts.is_rounded or shared.weight.block is None or shared.weight.activations != "bf16":
        return Unsupported(kind="slower", reason="experts and the shared one were timed together with bf16 rows alone")
    if shared.weight.groups > 1 or shared.cluster > shared.split.cluster or shared.epilogue.beside:
        return Unsupported(kind="no kernel", reason="beside experts blocks of one group make what they store alone")
    if shared.rows > ROWS:
        return Unsupported(kind="no kernel", reason=f"there are registers for at most {ROWS} rows, got {shared.rows}")
    if experts.warpgroups % shared.split.all_parts:
        reason = f"{shared.split.all_parts} parts of the shared expert's inputs are not {experts.warpgroups} warpgroups"
        return Unsupported(kind="no kernel", reason=reason)
    shared = alone_in_a_block(shared, experts.warpgroups)
    places, most = shared.grid.blocks[0], experts.gpu.multiprocessors
    units, room = experts.most_units, most - places
    if room >= 1 and -(-units // room) <= -(-units // most):
        experts = dataclasses.replace(experts, blocks=min(room, experts.blocks))
    elif shared.rows > _MOST_AFTER:
        reason = f"products of the shared expert with {shared.rows} rows take longer than the experts' last units"
        return Unsupported(kind="slower", reason=reason)
    found = Beside(experts=experts, shared=dataclasses.replace(shared, first_block=experts.blocks))
    if found.grid.shared_bytes + SCRATCH_BYTES > experts.gpu.shared_bytes:
        return Unsupported(kind="no kernel", reason="a block of the shared expert has no room for all of its inputs")
    return found
