// The phases that are products: output, gate and up, down, and the second layer of a time MLP. This file follows
// products.cu.

// The packed weights of a layer.
__device__ __forceinline__ const unsigned char* layer_weights(const Model& m, int layer) {
  return m.weights + m.layer_at + layer * m.layer_bytes;
}

// What the q/k/v and attention of a layer read: its keys and values of the prefix, and its weights.
__device__ __forceinline__ void prefetch_attention(const Model& m, const Call& c, int layer) {
  const u64 cached = (u64)c.prefix_tokens * KV_HEADS * HEAD_DIM;
  prefetch(c.keys + layer * cached, cached * 2);
  prefetch(c.values + layer * cached, cached * 2);
  prefetch(layer_weights(m, layer), m.o_at);
}

extern "C" __global__ void __maxnreg__(GATE_UP_REGISTERS)
    gate_up(const __grid_constant__ Model m, const __grid_constant__ Call c, float eps, int step, int layer) {
  const u64 at = (u64)step * DEPTH + layer;
  normed_pairs<GATE_UP_UNITS, GATE_UP_BYTES, BATCHED_ROWS>(
      c, layer_weights(m, layer) + m.gate_up_at, m.post_scale + at * WIDTH, Units::dealt(MLP_DIM / 8), eps,
      [&] {
        if (FEW_ROWS) prefetch(layer_weights(m, layer) + m.down_at, m.layer_bytes - m.down_at);
      },
      [] {},
      [&](int unit, int, int column) {
        const float* shift = m.post_shift + at * 2 * MLP_DIM + unit * 8 + column;
        return make_float2(ADAPTIVE ? __ldg(shift) : 0.f, ADAPTIVE ? __ldg(shift + MLP_DIM) : 0.f);
      },
      [&](int unit, int row, int column, float gate, float up, const float2& shift) {
        gate += shift.x;
        up += shift.y;
        // σ(gate), or σ(2 √(2/π) (gate + 0.044715 gate³)), which is GELU's tanh.
        const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
        const float exponent =
            ACTIVATION == ACTIVATION_SWIGLU ? -1.4426950408889634f * gate : -2.8853900817779268f * inner;
        const float y = gate / (1.f + exp2_fast(exponent)) * up;
        c.active[place_of(row, unit * 8 + column, MLP_DIM)] = round_bf16(y);
      });
  // `attend` reads the suffix's keys and values until they are there, so they must be erased between two of them. This
  // kernel has waited for the end of output, and so of this layer's `attend`; the next one waits for the end of down,
  // and so of this kernel.
  const u32 none = (u32)NOTHING_YET;
  if (KEY_ROUNDS > 0 && GROUP_RANKS == 0)
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < TOKENS * KV_HEADS * HEAD_DIM / 8; i += gridDim.x * THREADS)
      ((uint4*)c.ks)[i] = ((uint4*)c.vs)[i] = make_uint4(none, none, none, none);
}

// x += gate ∘ (rows Wᵀ), where x is the residual stream, kept in float32 (xf) and in BF16 (xb).
template <int K, int PARTS, int PACKED, int BYTES, class Before>
__device__ __forceinline__ void into_stream(const Call& c, const u16* rows, const unsigned char* weights,
                                            const float* gate, Before before) {
  split_product<K, PARTS, PACKED, BYTES>(
      rows, weights, before, [&](int column) { return ADAPTIVE ? __ldg(gate + column) : 1.f; },
      [&](int row, int column) { return ld_cg(c.xf + (u64)row * WIDTH + column); },
      [&](int row, int column, float sum, float held, float present) {
        sum = present + held * sum;
        c.xf[(u64)row * WIDTH + column] = sum;
        c.xb[place_of(row, column, WIDTH)] = round_bf16(sum);
      });
}

extern "C" __global__ void __maxnreg__(SPLIT_REGISTERS)
    output(const __grid_constant__ Model m, const __grid_constant__ Call c, int step, int layer) {
  into_stream<HEADS * HEAD_DIM, OUTPUT_SPLIT, OUTPUT_PACKED, OUTPUT_BYTES>(
      c, c.context, layer_weights(m, layer) + m.o_at, m.in_gate + ((u64)step * DEPTH + layer) * WIDTH, [] {});
}

extern "C" __global__ void __maxnreg__(SPLIT_REGISTERS)
    down(const __grid_constant__ Model m, const __grid_constant__ Call c, int step, int layer) {
  into_stream<MLP_DIM, DOWN_SPLIT, DOWN_PACKED, DOWN_BYTES>(
      c, c.active, layer_weights(m, layer) + m.down_at, m.post_gate + ((u64)step * DEPTH + layer) * WIDTH,
      [&] {
        if (FEW_ROWS) prefetch_attention(m, c, (layer + 1) % DEPTH);
      });
}

#if !ADAPTIVE
// The row of a state token is already in the stream.
extern "C" __global__ void __maxnreg__(SPLIT_REGISTERS)
    mix(const __grid_constant__ Model m, const __grid_constant__ Call c) {
  split_product<WIDTH, MIX_SPLIT, MIX_PACKED, MIX_BYTES>(
      c.hidden, m.weights, [] {}, [&](int column) { return __ldg(m.mix_bias + column); }, [](int, int) { return 0.f; },
      [&](int row, int column, float sum, float bias, float) {
        if (STATE && row % TOKENS == 0) return;
        c.xf[(u64)row * WIDTH + column] = sum + bias;
        c.xb[place_of(row, column, WIDTH)] = round_bf16(sum + bias);
      });
}
#endif
