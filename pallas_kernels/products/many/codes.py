"""FP8 codes of a weight as left operands of products of many rows, by the order of the inputs in rows of x.

A step of a product has 16 inputs. Which ones it has is for rows of x to say: adjacent ones where rows are in order, and
where they are operand rows those that make 16 adjacent codes four steps of one lane (``activations``). A step's inputs
are added up together, so that an order of inputs is an order of sums.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.language.tensor_cores import TensorCores
from pallas_kernels.language.values import Value, select
from pallas_kernels.products.many.tiling import CHUNK_BYTES
from pallas_kernels.products.weights import QUAD, SPREAD, code_pair, widen

CHUNK_CODES = CHUNK_BYTES // 2  # of an output: as many as inputs
HALVES = 2  # of a chunk, which are multiplied one after the other
_HALF_INPUTS = CHUNK_CODES // HALVES
_STEPS = 2  # of a product with half a chunk
_UNIT = 16  # codes of one step, and of one access; an output's four are swizzled by pairs of outputs
_FURTHER = 8  # outputs from a lane's first one to its second one


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainOrder:
    """Codes of a lane where rows of x are in order. Adjacent lanes load the same word, of which each has two codes."""

    machine: TensorCores
    at: Value  # of its first output, from where a chunk of the tile begins
    selector: Value  # of its two codes

    @classmethod
    def of(cls, machine: TensorCores, outputs: tuple[Value, Value]) -> PlainOrder:
        """The second output is eight after the first."""
        lane = machine.thread % QUAD
        at = _unit(outputs[0], 0) + lane // 2 * 4
        selector = select(lane % 2 == 0, machine.constant(SPREAD[0], "i32"), SPREAD[1])
        return cls(machine=machine, at=at, selector=selector)

    def scale_inputs(self, inputs: int) -> list[Value | int]:
        """Return which inputs of a chunk have the scales of its halves, or of all of it, by inputs that share one."""
        return [0] if inputs % CHUNK_CODES == 0 else [0, _HALF_INPUTS]

    def load(self, start: Value) -> list[list[Value]]:
        """Load the codes of a chunk that begins there."""
        places = [
            [
                ((start + self.at) ^ unit * _UNIT) + (further * CHUNK_CODES + place)
                for unit in range(half * _STEPS, (half + 1) * _STEPS)
                for place in (0, 8)
                for further in (0, _FURTHER)
            ]
            for half in range(HALVES)
        ]
        return [[self.machine.load_shared(place, 4)[0] for place in of_half] for of_half in places]

    def operand(self, loaded: list[list[Value]], half: int, factor: Value) -> list[Value]:
        """Return half a chunk as the left operand of a product."""
        return [code_pair(self.machine, word, self.selector, factor) for word in loaded[half]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperandOrder:
    """Codes of a lane where rows of x are operand rows: those of 16 adjacent inputs, of both of its outputs."""

    machine: TensorCores
    at: tuple[Value, Value]  # of its outputs, from where a chunk of the tile begins

    @classmethod
    def of(cls, machine: TensorCores, outputs: tuple[Value, Value]) -> OperandOrder:
        first, second = (_unit(output, machine.thread % QUAD) for output in outputs)
        return cls(machine=machine, at=(first, second))

    def scale_inputs(self, inputs: int) -> list[Value | int]:
        """Do what ``PlainOrder`` does. This lane's inputs of both halves have one scale."""
        return [0] if inputs % CHUNK_CODES == 0 else [self.machine.thread % QUAD // (QUAD // HALVES) * _HALF_INPUTS]

    def load(self, start: Value) -> list[list[Value]]:
        """Load the codes of a chunk that begins there, of each output."""
        return [self.machine.load_shared(start + at, _UNIT) for at in self.at]

    def operand(self, loaded: list[list[Value]], half: int, factor: Value) -> list[Value]:
        """Return half a chunk as the left operand of a product."""
        steps = slice(half * _STEPS, (half + 1) * _STEPS)
        return widen(self.machine, [codes[steps] for codes in loaded], factor)


def _unit(output: Value, unit: Value | int) -> Value:
    """Return where a unit of an output of the tile is, from where the chunk begins."""
    return output * CHUNK_CODES + ((output // 2 % (CHUNK_CODES // _UNIT)) ^ unit) * _UNIT
