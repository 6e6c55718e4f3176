"""Products on AMX tiles, in the place of the dense ones of linears with packed weights.

The dense weights go: what few rows read and what many rows read are two forms of the same numbers already.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from executor import linears
from executor.linears import PackedLinear
from executor.native.tiles import Tiles


@dataclass(frozen=True, slots=True)
class Product:
    """That of one linear: `[..., in]` to `[..., out]`."""

    tiles: Tiles
    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        return self.tiles.multiply(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Tiling:
    """All that is needed for a change between two steps."""

    products: dict[PackedLinear, Product]
    most_rows: int
    """Up to how many rows packed weights stay faster."""

    @classmethod
    def of(cls, module: nn.Module, tiles: Tiles) -> Tiling:
        """Packs the weights of all linears that fit tiles, and times them: seconds, on any thread but the engine's."""
        packed = [each for each in module.modules() if isinstance(each, PackedLinear) and tiles.fits(each)]
        products = {each: Product(tiles, tiles.pack(each.weight), each.bias) for each in packed}
        sample = linears.sample_of(packed)
        crossing = linears.crossing_of(
            [each.in_features for each in sample],
            [each.few for each in sample],
            [products[each] for each in sample],
        )
        return cls(products, crossing.most_rows)

    def apply(self, network: nn.Module) -> None:
        """Puts the products in their places. network: the model's own, which has the dense weights, too."""
        released = {each.weight.untyped_storage().data_ptr() for each in self.products}
        for linear, product in self.products.items():
            linear.replace_dense(product, self.most_rows)
        kept = {
            parameter.untyped_storage().data_ptr()
            for module in network.modules()
            if type(module) is not nn.Linear
            for parameter in module.parameters(recurse=False)
        }
        for module in network.modules():
            if type(module) is nn.Linear and module.weight.untyped_storage().data_ptr() in released - kept:
                module.weight = linears.let_go()
