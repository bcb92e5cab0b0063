"""The linear part of a map: one target layer's keys or values as a function of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kvxfer.maps.blocks import Block


@dataclass(frozen=True)
class LinearLayer:
    """One target layer's keys or values as a linear function of blocks; float32 once it is fitted.

    With one group, x are the columns of ``blocks`` side by side and the output is ``x @ weight[0] + bias``. With as
    many groups as heads, group h reads the columns of head h of every block and gives head h. A reduced-rank map keeps
    its second factor in ``right``: the group's weight is then ``weight[g] @ right[g]``.
    """

    blocks: tuple[Block, ...]
    weight: Float[Tensor, "groups features inner"]
    bias: Float[Tensor, " width"]
    right: Float[Tensor, "groups inner columns"] | None = None

    @property
    def groups(self) -> int:
        """1, or the number of heads."""
        return self.weight.shape[0]

    @property
    def parameters(self) -> int:
        return self.weight.numel() + self.bias.numel() + (0 if self.right is None else self.right.numel())

    @property
    def flops(self) -> int:
        """FLOPs per token: two per weight, one per bias."""
        return 2 * self.parameters - self.bias.numel()

    def dense(self) -> Float[Tensor, "features width"]:
        """The weight over all columns of the blocks, with zeros where a group does not read."""
        product = self.weight if self.right is None else self.weight @ self.right
        if self.groups == 1:
            return product[0]
        heads, inner, dim = product.shape
        spread = product.new_zeros(len(self.blocks), heads, inner // len(self.blocks), heads, dim)
        for head in range(heads):
            spread[:, head, :, head] = product[head].view(len(self.blocks), -1, dim)
        return spread.flatten(0, 2).flatten(1)
