"""What the CUDA driver is on a GPU, as far as launches ask it: it encodes tensor maps, in the emulator's own form."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from tests.support.cuda_emulator.module import EmulationError

# CUtensorMapDataType: bytes of an element.
_SIZES = {0: 1, 6: 2, 9: 2}
_SWIZZLES = {64: 2, 128: 3}
MOST_BOX, MOST_RANK = 256, 5


class EmulatedDriver:
    """As `runtime.driver()`, of which this is one function. It raises EmulationError where the driver returns an error,
    and for maps that the emulator does not know."""

    def cuTensorMapEncodeTiled(
        self, at: ctypes.c_void_p, kind: int, rank: ctypes.c_uint32, address: ctypes.c_void_p, sizes: Sequence[int],
        strides: Sequence[int], box: Sequence[int], steps: Sequence[int], interleave: int, swizzle: int, promote: int,
        fill: int,
    ) -> int:  # fmt: skip
        """Write 16 u64 at `at`: address; rank, and bytes of an element in the upper half; five sizes, four strides in
        bytes, five sizes of a box. Dimensions that the tensor has not are of size one."""
        of_element, inner = _SIZES[kind], box[0] * _SIZES[kind]
        for wrong, what in (
            (not at.value or at.value % 64, "the map lies at no multiple of 64 bytes"),
            (min(sizes) < 1, f"the tensor is empty: {list(sizes)}"),
            (not address.value or address.value % 16, "the tensor begins at no multiple of 16 bytes"),
            (not 1 <= rank.value <= MOST_RANK, f"expected 1 to {MOST_RANK} dimensions, got {rank.value}"),
            (any(stride % 16 for stride in strides), f"strides are multiples of 16 bytes, got {list(strides)}"),
            (not 1 <= min(box) <= max(box) <= MOST_BOX, f"a box has 1 to {MOST_BOX} a side, got {list(box)}"),
            (set(steps) != {1} or interleave or fill, "expected steps of one, no interleaving, zeros outside"),
            (_SWIZZLES.get(inner) != swizzle, f"expected boxes of 64 or 128 bytes, swizzled as a whole, got {inner}"),
        ):
            if wrong:
                raise EmulationError(f"cuTensorMapEncodeTiled: {what}")
        ones, none = ([value] * (MOST_RANK - rank.value) for value in (1, 0))
        first = rank.value | of_element << 32
        fields = (address.value, first, *sizes, *ones, *strides, *none, *box, *ones)
        ctypes.memmove(at, (ctypes.c_uint64 * 16)(*fields), 128)  # type: ignore[arg-type]
        return 0
