"""The pre-norm transformer block that SigLIP, Qwen3-VL's vision and GR00T's vision-language attention share.

Knows nothing of images or language: positions, if any, arrive as rotary tables, and who may attend to whom as a mask.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from vla_accel import ops


class PreNormLayer(nn.Module):
    """Attention of all to all and a tanh-GELU MLP, each behind a LayerNorm. q, k and v are one matrix (same function,
    one product)."""

    def __init__(self, width: int, heads: int, mlp_dim: int, eps: float) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.layer_norm1 = nn.LayerNorm(width, eps=eps)
        self.qkv_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.layer_norm2 = nn.LayerNorm(width, eps=eps)
        self.fc1 = nn.Linear(width, mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, width)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None) -> Tensor:
        """x (B, T, width) to the same shape. `rope`: tables of the rotation of q and k (`ops.apply_rope`), or None;
        mask (B, T, T) bool, True = may attend, or None."""
        batch, tokens, width = x.shape
        qkv = self.qkv_proj(ops.layer_norm(x, self.layer_norm1))
        q, k, v = qkv.view(batch, tokens, 3, self.heads, self.head_dim).unbind(2)
        if rope is not None:
            q, k = ops.apply_rope(q, *rope), ops.apply_rope(k, *rope)
        x = x + self.out_proj(ops.attention(q, k, v, mask).reshape(batch, tokens, width))
        return x + self.fc2(F.gelu(self.fc1(ops.layer_norm(x, self.layer_norm2)), approximate="tanh"))
