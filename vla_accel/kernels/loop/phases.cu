// These phases are products: output, gate and up, down, and the second layer of a time MLP. The file follows
// products.cu.

extern "C" __global__ void __launch_bounds__(THREADS, MT <= 2 || BATCHED_ROWS ? 2 : 1)
    gate_up(const __grid_constant__ Model m, const __grid_constant__ Call c, float eps, int step, int layer) {
  const u64 at = (u64)step * L + layer;
  normed_pairs<GATE_UP_UNITS, BATCHED_ROWS>(
      shared_memory, c, m.weights + m.layer_at + layer * m.layer_bytes + m.gate_up_at, m.post_scale + at * W, Units::dealt(MLP / 8), eps,
      [&](int unit, int, int column) {
        const float* shift = m.post_shift + at * 2 * MLP + unit * 8 + column;
        return make_float2(ADAPTIVE ? __ldg(shift) : 0.f, ADAPTIVE ? __ldg(shift + MLP) : 0.f);
      },
      [&](int unit, int row, int column, float gate, float up, const float2& shift) {
        gate += shift.x;
        up += shift.y;
        // σ(gate), or σ(2 √(2/π) (gate + 0.044715 gate³)), which is GELU's tanh.
        const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
        const float y = gate / (1.f + exp2_fast(ACTIVATION == ACTIVATION_SWIGLU ? -1.4426950408889634f * gate : -2.8853900817779268f * inner)) * up;
        c.active[place_of(row, unit * 8 + column, MLP)] = round_bf16(y);
      });
  // `attend` reads the suffix's keys and values until they are there, so they must go between two of them. This kernel has
  // waited for the end of output, and so of this layer's `attend`; the next one waits for down's, and so for this one's.
  const u32 none = (u32)NOTHING_YET;
  if (KEY_ROUNDS > 0 && GROUP_RANKS == 0)
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < T * KV * D / 8; i += gridDim.x * THREADS)
      ((uint4*)c.ks)[i] = ((uint4*)c.vs)[i] = make_uint4(none, none, none, none);
}

// x += gate ∘ (rows Wᵀ), where x is the residual stream, kept in float32 (xf) and in BF16 (xb).
template <int K, int PARTS, int PACKED>
__device__ __forceinline__ void into_stream(const Model& m, const Call& c, const u16* rows,
                                            const unsigned char* weights, const float* gate) {
  split_product<K, PARTS, PACKED>(
      rows, weights,
      [&](int column) { return ADAPTIVE ? __ldg(gate + column) : 1.f; },
      [&](int row, int column) { return ld_cg(c.xf + (u64)row * W + column); },
      [&](int row, int column, float sum, float held, float present) {
        sum = present + held * sum;
        c.xf[(u64)row * W + column] = sum;
        c.xb[place_of(row, column, W)] = round_bf16(sum);
      });
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    output(const __grid_constant__ Model m, const __grid_constant__ Call c, int step, int layer) {
  into_stream<H * D, OUTPUT_SPLIT, OUTPUT_PACKED>(m, c, c.context,
                                                  m.weights + m.layer_at + layer * m.layer_bytes + m.o_at,
                                                  m.in_gate + ((u64)step * L + layer) * W);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    down(const __grid_constant__ Model m, const __grid_constant__ Call c, int step, int layer) {
  into_stream<MLP, DOWN_SPLIT, DOWN_PACKED>(m, c, c.active, m.weights + m.layer_at + layer * m.layer_bytes + m.down_at,
                                            m.post_gate + ((u64)step * L + layer) * W);
}

#if !ADAPTIVE
// The row of a state token is already in the stream.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    mix(const __grid_constant__ Model m, const __grid_constant__ Call c) {
  split_product<W, MIX_SPLIT, MIX_PACKED>(
      c.hidden, m.weights, [&](int column) { return __ldg(m.mix_bias + column); }, [](int, int) { return 0.f; },
      [&](int row, int column, float sum, float bias, float) {
        if (STATE && row % T == 0) return;
        c.xf[(u64)row * W + column] = sum + bias;
        c.xb[place_of(row, column, W)] = round_bf16(sum + bias);
      });
}
#endif
