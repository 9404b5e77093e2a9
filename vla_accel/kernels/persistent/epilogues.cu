// What becomes of the sums of each product, and the step between two evaluations. This file follows product.cu.

__device__ __forceinline__ float2 none2() { return make_float2(0.f, 0.f); }

// -- q/k/v -----------------------------------------------------------------------------------------------------------

// Adds the shift, rotates queries and keys, and stores each head's rows.
struct HeadsEpilogue {
  static constexpr bool NORMED = true;
  struct Held {
    float2 shift_a, shift_b, cos, sin;
  };
  const Model& m;
  const Call& c;
  const int at;  // step and layer
  __device__ __forceinline__ Held load(int row, int column) const {
    const float* shift = constants(c, m.in_shift, at, Qkv::N, row) + column;
    const int position = __ldg(c.lengths + row / TOKENS) + row % TOKENS;
    const int angle = position * (HEAD_DIM / 2) + column % HEAD_DIM;
    return {ADAPTIVE ? ld_constant_f2(shift) : none2(), ADAPTIVE ? ld_constant_f2(shift + HEAD_DIM / 2) : none2(),
            ld_constant_f2(m.cos + angle), ld_constant_f2(m.sin + angle)};
  }
  __device__ __forceinline__ void store(int row, int column, int, const Quad& sum, const Held& held, bool real) const {
    if (!real) return;
    const int head = column / HEAD_DIM, i = column % HEAD_DIM;
    float2 a = make_float2(sum.a.x + held.shift_a.x, sum.a.y + held.shift_a.y);
    float2 b = make_float2(sum.b.x + held.shift_b.x, sum.b.y + held.shift_b.y);
    if (head < HEADS + KV_HEADS) {
      const float2 turned = make_float2(a.x * held.cos.x - b.x * held.sin.x, a.y * held.cos.y - b.y * held.sin.y);
      b = make_float2(b.x * held.cos.x + a.x * held.sin.x, b.y * held.cos.y + a.y * held.sin.y);
      a = turned;
    }
    const int key_head = (head - HEADS) % KV_HEADS;
    u16* to = head < HEADS ? c.q + (row * HEADS + head) * HEAD_DIM
                           : (head < HEADS + KV_HEADS ? c.k : c.v) + (row * KV_HEADS + key_head) * HEAD_DIM;
    *(u32*)(to + i) = pack_bf16x2(a.x, a.y);
    *(u32*)(to + i + HEAD_DIM / 2) = pack_bf16x2(b.x, b.y);
  }
};

// -- gate and up -----------------------------------------------------------------------------------------------------

// gate · σ(2 √(2/π) (gate + 0.044715 gate³)) · up, which is GELU's tanh form.
__device__ __forceinline__ float geglu(float gate, float up) {
  const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.f + exp2_fast(-2.8853900817779268f * inner)) * up;
}
struct GatedEpilogue {
  static constexpr bool NORMED = true;
  struct Held {
    float2 gate, up;
  };
  const Model& m;
  const Call& c;
  const int at;
  __device__ __forceinline__ Held load(int row, int column) const {
    const float* shift = constants(c, m.post_shift, at, 2 * MLP_DIM, row) + column;
    return {ADAPTIVE ? ld_constant_f2(shift) : none2(), ADAPTIVE ? ld_constant_f2(shift + MLP_DIM) : none2()};
  }
  __device__ __forceinline__ void store(int row, int column, int, const Quad& sum, const Held& shift, bool real) const {
    if (real)
      *(u32*)(c.active + place_of(row, column)) =
          pack_bf16x2(geglu(sum.a.x + shift.gate.x, sum.b.x + shift.up.x), geglu(sum.a.y + shift.gate.y, sum.b.y + shift.up.y));
  }
};

// -- the residual stream ---------------------------------------------------------------------------------------------

// The next norm's scale at four columns. `table`: null if it has none.
struct NextScale {
  float2 a, b;
  __device__ __forceinline__ static NextScale load(const float* row, int column) {
    if (!row) return {none2(), none2()};
    return {ld_constant_f2(row + column), ld_constant_f2(row + column + 4)};
  }
};
// The row of scales of the norm before the MLP (`post`) of a layer, or before q/k/v; behind the last layer, of the last
// norm.
__device__ __forceinline__ const float* scales(const Model& m, const Call& c, int step, int layer, bool post, int row) {
  if (layer == DEPTH) return m.final_scale + (ADAPTIVE ? step * WIDTH : 0);
  return ADAPTIVE ? constants(c, post ? m.post_scale : m.in_scale, step * DEPTH + layer, WIDTH, row) : nullptr;
}

// The owner of columns keeps the stream in shared memory, in float32, as (tile, row, 8).
__device__ __forceinline__ float* own_place(int tile, int row, int column) {
  return (float*)(shared_memory + OWN_AT) + (tile * ROWS + row) * 8 + column % 8;
}
// Stores four new values of the stream: for the owner; as the next product's input, x ∘ (1 + scale) in BF16; and the sum
// of squares of the row's eight columns, which two lanes share. All lanes call this.
__device__ __forceinline__ void publish(const Call& c, int row, int column, int tile, const Quad& v, const NextScale& scale,
                                        bool real) {
  float square = v.a.x * v.a.x + v.a.y * v.a.y + v.b.x * v.b.x + v.b.y * v.b.y;
  square += __shfl_xor_sync(~0u, square, 1);
  if (!real) return;
  float* own = own_place(tile, row, column);
  *(float2*)own = v.a;
  *(float2*)(own + 4) = v.b;
  u16* to = c.x + place_of(row, column);
  *(u32*)to = pack_bf16x2(v.a.x * (1.f + scale.a.x), v.a.y * (1.f + scale.a.y));
  *(u32*)(to + 4) = pack_bf16x2(v.b.x * (1.f + scale.b.x), v.b.y * (1.f + scale.b.y));
  if (column % 8 == 0) c.squares[column / 8 * 16 + row] = square;
}

// x += gate ∘ sums: behind attention, or (`mlp`) behind the MLP.
struct ResidualEpilogue {
  static constexpr bool NORMED = false;
  struct Held {
    float2 gate_a, gate_b;
    NextScale scale;
  };
  const Model& m;
  const Call& c;
  const int step, layer;
  const bool mlp;
  __device__ __forceinline__ Held load(int row, int column) const {
    const NextScale scale = NextScale::load(scales(m, c, step, layer + mlp, !mlp, row), column);
    if (!ADAPTIVE) return {make_float2(1.f, 1.f), make_float2(1.f, 1.f), scale};
    const float* gate = constants(c, mlp ? m.post_gate : m.in_gate, step * DEPTH + layer, WIDTH, row) + column;
    return {ld_constant_f2(gate), ld_constant_f2(gate + 4), scale};
  }
  __device__ __forceinline__ void store(int row, int column, int tile, const Quad& sum, const Held& held, bool real) const {
    const float* own = own_place(tile, row, column);
    Quad v = {none2(), none2()};
    if (real) {
      v.a = make_float2(own[0] + held.gate_a.x * sum.a.x, own[1] + held.gate_a.y * sum.a.y);
      v.b = make_float2(own[4] + held.gate_b.x * sum.b.x, own[5] + held.gate_b.y * sum.b.y);
    }
    publish(c, row, column, tile, v, held.scale, real);
  }
};

// The second layer of the time MLP makes the rows of actions; a state's row is its token.
struct MixEpilogue {
  static constexpr bool NORMED = false;
  struct Held {
    float2 a, b;
  };
  const Model& m;
  const Call& c;
  __device__ __forceinline__ Held load(int row, int column) const {
    const float* from = STATE && action_of(row) < 0 ? c.state + row / TOKENS * WIDTH : m.mix_bias;
    return {ld_constant_f2(from + column), ld_constant_f2(from + column + 4)};
  }
  __device__ __forceinline__ void store(int row, int column, int tile, const Quad& sum, const Held& held, bool real) const {
    const float some = STATE && action_of(row) < 0 ? 0.f : 1.f;
    const Quad v = {make_float2(held.a.x + some * sum.a.x, held.a.y + some * sum.a.y),
                    make_float2(held.b.x + some * sum.b.x, held.b.y + some * sum.b.y)};
    publish(c, row, column, tile, v, {none2(), none2()}, real);
  }
};

// -- between two evaluations -----------------------------------------------------------------------------------------

// The rows of evaluation `step` from the actions: the stream, or the hidden layer of the time MLP.
__device__ __forceinline__ void input(Consumer& me, int step) {
  const Model& m = me.m;
  const Call& c = me.c;
  const Share mine = tiles_of<Down>();
  const int row = threadIdx.x / 2 % ROWS, pair = (threadIdx.x & 1) * 2, action = action_of(row);
  constexpr int TOGETHER = WARPS * 32 / (2 * ROWS);
  me.actions.wait();
  for (int done = 0; done < mine.count; done += TOGETHER) {
    const int tile = done + threadIdx.x / (2 * ROWS), column = (mine.first + tile) * 8 + pair;
    const bool real = tile < mine.count && threadIdx.x < TOGETHER * 2 * ROWS;
    Quad v = {none2(), none2()};
    if (real && action >= 0) {
      const int at = (ADAPTIVE ? 0 : step) * INPUT_PAIRS + (INPUT_PAIRS > 1 && pinned(c, row));
      const float *bias = m.b_in + at * WIDTH + column, *weight = m.w_in + column, *from = c.actions + action * ACTION_DIM;
      v = {ldg2(bias), ldg2(bias + 4)};
#pragma unroll 8
      for (int i = 0; i < ACTION_DIM; ++i, weight += WIDTH) {
        const float2 a = ldg2(weight), b = ldg2(weight + 4);
        v.a.x += from[i] * a.x, v.a.y += from[i] * a.y, v.b.x += from[i] * b.x, v.b.y += from[i] * b.y;
      }
    }
    if (ADAPTIVE) {
      const NextScale scale = NextScale::load(real ? scales(m, c, step, 0, false, row) : nullptr, column);
      publish(c, row, column, tile, v, scale, real);
    } else if (real && action >= 0) {
      const auto silu = [](float x) { return x / (1.f + exp2_fast(-1.4426950408889634f * x)); };
      u16* to = c.embedded + place_of(row, column);
      *(u32*)to = pack_bf16x2(silu(v.a.x), silu(v.a.y));
      *(u32*)(to + 4) = pack_bf16x2(silu(v.b.x), silu(v.b.y));
    }
  }
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}
#define MOVES (BATCH * HORIZON * ACTION_DIM)
// Last norm, output projection and Euler step of evaluation `step`: a warp for each number of an action. The guidance,
// v -= gain · follow · (target - (x - time · v)), changes no bit where `follow` is zero.
__device__ __forceinline__ void move_actions(Consumer& me, int step) {
  const Model& m = me.m;
  const Call& c = me.c;
  const int lane = threadIdx.x & 31;
  me.x.wait();
#pragma unroll 1
  for (int at = blockIdx.x + gridDim.x * (threadIdx.x >> 5); at < MOVES; at += gridDim.x * WARPS) {
    const int action = at / ACTION_DIM, i = at % ACTION_DIM;
    const int row = action / HORIZON * TOKENS + TOKENS - HORIZON + action % HORIZON;
    float dot = 0.f, square = 0.f;
#pragma unroll 8
    for (int column = lane * 4; column < WIDTH; column += 128) {
      const uint2 x = *(const uint2*)(c.x + place_of(row, column));
      const float4 w = __ldg((const float4*)(m.w_out + i * WIDTH + column));
      dot += low_of(x.x) * w.x + high_of(x.x) * w.y + low_of(x.y) * w.z + high_of(x.y) * w.w;
    }
#pragma unroll 4
    for (int tile = lane; tile < WIDTH / 8; tile += 32) square += c.squares[tile * 16 + row];
    dot = warp_sum(dot);
    square = warp_sum(square);
    if (lane == 0) {
      const float dt = __ldg(m.schedule + step), time = __ldg(m.schedule + STEPS + step), gain = __ldg(m.schedule + 2 * STEPS + step);
      const float present = c.actions[at], follow = __ldg(c.follow + action);
      float velocity = rsqrtf(square / WIDTH + m.eps) * dot + __ldg(m.out_shift + step * ACTION_DIM + i);
      velocity -= gain * (follow * (__ldg(c.target + at) - (present - time * velocity)));
      c.actions[at] = present + dt * (TRAINED && follow > 0.f ? 0.f : velocity);
    }
  }
}
