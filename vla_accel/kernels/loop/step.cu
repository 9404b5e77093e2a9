// This kernel runs between two evaluations of the expert. The file follows core.cu.
//
// It does the final norm, the output projection and the Euler step x += dt · v of evaluation `step - 1`, then makes the
// input of evaluation `step`. `time`, `dt` and `gain` are those of evaluation `step - 1`. The guidance is
// v -= gain · follow · (target - (x - time · v)); where `follow` is zero it changes no bit. A cluster of STEP_BLOCKS
// takes a row and each block a part of its columns; each sends its part of the velocity to all of them.

#define COLUMNS (WIDTH / STEP_BLOCKS)              // of a block
#define VECTORS ((COLUMNS + 127) / 128)            // of four columns, of a lane
#define ACTIONS_EACH ((ACTION_DIM + WARPS - 1) / WARPS)  // action dimensions of a warp: every eighth

__device__ __forceinline__ float dot_of(const float4& a, const float4& b) {
  return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

struct StepMemory {
  float dots[STEP_BLOCKS][ACTION_DIM][2], squares[STEP_BLOCKS], action[ACTION_DIM];
  __align__(16) float sums[WARPS][VECTORS * 128];
};

// A block's columns of one row.
struct StepRow {
  const Model& m;
  const Call& c;
  StepMemory& memory;
  const int step, row, rank;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = rank * COLUMNS;
  const int token_row = row / HORIZON * TOKENS + (TOKENS - HORIZON) + row % HORIZON;
  // Weights of the two projections, and the products of the norm's shift with the output weights.
  float4 out[ACTIONS_EACH][VECTORS], in[ACTIONS_EACH][VECTORS];
  float shifted[ACTIONS_EACH];

  // Loads the constants, the norm's scale and shift inside the output weights.
  __device__ __forceinline__ void load_weights() {
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int n = 0; n < ACTIONS_EACH; ++n) {
      const int a = warp + WARPS * n;
      shifted[n] = 0.f;
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        const int i = v * 128 + lane * 4;
        const bool real = a < ACTION_DIM && i < COLUMNS;
        in[n][v] = real && step < c.steps ? ldg_v4(m.w_in + (u64)a * WIDTH + first + i) : none;
        out[n][v] = real && step > 0 ? ldg_v4(m.w_out + (u64)a * WIDTH + first + i) : none;
        if (step > 0 && i < COLUMNS) {
          const u64 at = (ADAPTIVE ? (u64)(step - 1) * WIDTH : 0) + first + i;
          const float4 scale = ldg_v4(m.final_scale + at);
          if (ADAPTIVE) shifted[n] += dot_of(ldg_v4(m.final_shift + at), out[n][v]);
          out[n][v].x *= 1.f + scale.x;
          out[n][v].y *= 1.f + scale.y;
          out[n][v].z *= 1.f + scale.z;
          out[n][v].w *= 1.f + scale.w;
        }
      }
    }
  }

  // Sends the block's parts of the velocity and of the row's squares to all blocks.
  __device__ __forceinline__ void send_dots() {
    float dot[ACTIONS_EACH], square = 0.f;
    clear<ACTIONS_EACH>(dot);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int i = v * 128 + lane * 4;
      float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
      if (i < COLUMNS) {
        const uint4 bits = ld_cg_v4(c.xf + (u64)token_row * WIDTH + first + i);
        x = *(const float4*)&bits;
      }
      square += dot_of(x, x);
#pragma unroll
      for (int n = 0; n < ACTIONS_EACH; ++n) dot[n] += dot_of(x, out[n][v]);
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
      square += __shfl_xor_sync(~0u, square, offset);
#pragma unroll
      for (int n = 0; n < ACTIONS_EACH; ++n) {
        dot[n] += __shfl_xor_sync(~0u, dot[n], offset);
        shifted[n] += __shfl_xor_sync(~0u, shifted[n], offset);
      }
    }
    if (lane < STEP_BLOCKS) {
#pragma unroll
      for (int n = 0; n < ACTIONS_EACH; ++n)
        if (warp + WARPS * n < ACTION_DIM)
          st_cluster_v2(mapa(smem_of(memory.dots[rank][warp + WARPS * n]), lane), dot[n], shifted[n]);
      if (warp == 0) st_cluster(mapa(smem_of(memory.squares + rank), lane), square);
    }
  }

  // Moves the row's actions by the velocity. Thread a has action dimension a.
  __device__ __forceinline__ void move(float eps, float time, float dt, float gain) {
    const int a = threadIdx.x;
    const float present = a < ACTION_DIM ? ld_cg(c.actions + (u64)row * ACTION_DIM + a) : 0.f;
    send_dots();
    cluster_arrive();
    cluster_wait();
    if (a >= ACTION_DIM) return;
    float sum = 0.f, scaled = 0.f, velocity = m.b_out[a];
#pragma unroll
    for (int from = 0; from < STEP_BLOCKS; ++from) {
      sum += memory.squares[from];
      scaled += memory.dots[from][a][0];
      velocity += memory.dots[from][a][1];
    }
    velocity += rsqrtf(sum / MODEL_WIDTH + eps) * scaled;
    const float off = c.follow[row] * (c.target[(u64)row * ACTION_DIM + a] - (present - time * velocity));
    const float moved = present + dt * (velocity - gain * off);
    if (rank == 0) c.actions[(u64)row * ACTION_DIM + a] = moved;
    memory.action[a] = moved;
  }

  // Writes the block's columns of the next evaluation's input.
  __device__ __forceinline__ void write_input() {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int n = 0; n < ACTIONS_EACH; ++n) {
        const float one = warp + WARPS * n < ACTION_DIM ? memory.action[warp + WARPS * n] : 0.f;
        sum.x += in[n][v].x * one;
        sum.y += in[n][v].y * one;
        sum.z += in[n][v].z * one;
        sum.w += in[n][v].w * one;
      }
      *(float4*)(memory.sums[warp] + v * 128 + lane * 4) = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
      float sum = m.b_in[(ADAPTIVE ? 0 : (u64)step * WIDTH) + first + i];
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += memory.sums[w][i];
      if (ADAPTIVE) {
        c.xf[(u64)token_row * WIDTH + first + i] = sum;
        c.xb[place_of(token_row, first + i, WIDTH)] = round_bf16(sum);
      } else {
        c.hidden[place_of(token_row, first + i, WIDTH)] = round_bf16(sum / (1.f + __expf(-sum)));
      }
    }
  }
};

// Writes the block's columns of the state's token of a sequence (π0).
__device__ __forceinline__ void write_state(const Call& c, int sequence, int first) {
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    const float one = c.state[(u64)sequence * WIDTH + first + i];
    c.xf[(u64)sequence * TOKENS * WIDTH + first + i] = one;
    c.xb[place_of(sequence * TOKENS, first + i, WIDTH)] = round_bf16(one);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    between(const __grid_constant__ Model m, const __grid_constant__ Call c, float eps, int step, float time,
            float dt, float gain) {
  __shared__ StepMemory memory;
  const int rank = blockIdx.x % STEP_BLOCKS, row = blockIdx.x / STEP_BLOCKS;
  cluster_arrive_relaxed();
  griddepcontrol_launch_dependents();
  cluster_wait();  // All blocks have started, so their memory may be written.
  if (row >= BATCH * HORIZON) {
    // The state's token has blocks of its own.
    griddepcontrol_wait();
    if (step < c.steps) write_state(c, row - BATCH * HORIZON, rank * COLUMNS);
    return;
  }
  StepRow part{m, c, memory, step, row, rank};
  part.load_weights();
  griddepcontrol_wait();
  if (step > 0)
    part.move(eps, time, dt, gain);
  else if (threadIdx.x < ACTION_DIM)
    memory.action[threadIdx.x] = ld_cg(c.actions + (u64)row * ACTION_DIM + threadIdx.x);
  if (step == c.steps) return;
  __syncthreads();
  part.write_input();
}
