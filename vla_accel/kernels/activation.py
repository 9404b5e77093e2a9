"""The activations of all ops, under one name each for PyTorch, Triton and CUDA C++."""

from __future__ import annotations

from enum import Enum


class Activation(str, Enum):
    """The activation after a product. GELU is the tanh form, GELU_ERF the exact one, QUICK_GELU is x sigmoid(1.702 x).

    GEGLU and SWIGLU are gated: two columns become one, gelu(gate) * up or silu(gate) * up.
    """

    NONE = "none"
    GELU = "gelu"
    SILU = "silu"
    RELU = "relu"
    GEGLU = "geglu"
    SWIGLU = "swiglu"
    MISH = "mish"
    GELU_ERF = "gelu_erf"
    QUICK_GELU = "quick_gelu"

    def __str__(self) -> str:
        return self.value

    @property
    def gated(self) -> bool:
        """Whether two columns become one."""
        return self in (Activation.GEGLU, Activation.SWIGLU)

    @property
    def gate(self) -> Activation:
        """The activation of the gate of a gated one."""
        return {Activation.GEGLU: Activation.GELU, Activation.SWIGLU: Activation.SILU}[self]

    @property
    def code(self) -> int:
        """Its number in kernels."""
        return _CODES[self]


_CODES = {activation: code for code, activation in enumerate(Activation)}
MACROS = {f"ACTIVATION_{activation.name}": activation.code for activation in Activation}
"""The codes under the names that CUDA C++ sources use."""
