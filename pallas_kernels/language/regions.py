"""Parts of a body whose values may not be used outside of them.

On a GPU, what a branch computes does not exist after the branch.
"""

from __future__ import annotations

from typing import Literal

Part = Literal["body", "when", "branch", "turn", "role"]
_PLACES: dict[Part, str] = {
    "body": "in a launch",
    "when": "inside machine.when",
    "branch": "in a branch",
    "turn": "in a turn of a loop",
    "role": "in a role",
}
_INSTEAD: dict[Part, str] = {
    "body": "a value is of one launch",
    "when": "use it inside, or compute both sides outside and write select(condition, a, b)",
    "branch": "what a branch leaves behind is the carry: carry = machine.branch(condition, then, carry)",
    "turn": "what a turn leaves behind is the carry: carry = machine.loop(count, body, carry), body(i, carry) -> carry",
    "role": "leave it in shared memory, with a Barrier for the role that reads it",
}


class Region:
    """A part of a body, which its values remember: the inside of a ``when`` or branch, a turn of a loop, or a role."""

    __slots__ = ("is_left", "outer", "part")

    def __init__(self, part: Part, outer: Region | None = None):
        self.part: Part = part
        self.outer = outer  # the part that contains it
        self.is_left = False  # permanently, or while another role runs

    def refuse(self) -> None:
        """Raise TypeError for the use of a value outside of its part."""
        raise TypeError(f"a value that was made {_PLACES[self.part]} is used outside of it: {_INSTEAD[self.part]}")

    def leave(self, outer: Region, *, is_left: bool = True) -> None:
        """Mark this part and those around it, up to ``outer``, as left; or as entered again, with ``is_left`` False."""
        region: Region | None = self
        while region is not None and region is not outer:
            region.is_left = is_left
            region = region.outer
