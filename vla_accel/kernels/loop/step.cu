// This kernel runs between two evaluations of the expert. The file follows core.cu.

// It does the final norm, the output projection and the Euler step of evaluation `step - 1`, then makes the input of
// evaluation `step`. v -= gain · follow · (target - (x - time · v)), with `time` and `gain` of evaluation `step - 1`;
// where `follow` is zero no bit changes. A cluster of STEP_BLOCKS takes a row and each block a part of its columns;
// each sends its part of the velocity to all of them.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    between(const __grid_constant__ Model m, const __grid_constant__ Call c, float eps, int step, float time,
            float gain) {
  constexpr int COLUMNS = W / STEP_BLOCKS, VECTORS = (COLUMNS + 127) / 128, EACH = (A + WARPS - 1) / WARPS;
  __shared__ float dots[STEP_BLOCKS][A][2], squares[STEP_BLOCKS], action[A];
  __shared__ __align__(16) float sums[WARPS][VECTORS * 128];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int rank = blockIdx.x % STEP_BLOCKS, row = blockIdx.x / STEP_BLOCKS, first = rank * COLUMNS;
  cluster_arrive_relaxed();
  griddepcontrol_launch_dependents();
  cluster_wait();  // All blocks have started, so their memory may be written.
  if (row >= BATCH * HZ) {
    // The state's token of π0 has blocks of its own.
    griddepcontrol_wait();
    if (step < c.steps)
      for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
        const u64 at = (u64)(row - BATCH * HZ) * T * W + first + i;
        const float one = c.state[(u64)(row - BATCH * HZ) * W + first + i];
        c.xf[at] = one;
        c.xb[place_of((row - BATCH * HZ) * T, first + i, W)] = round_bf16(one);
      }
    return;
  }
  const int token_row = row / HZ * T + (T - HZ) + row % HZ;
  const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
  // Constants are fetched before the wait. A warp takes every eighth action dimension, a lane every 32nd four columns.
  float4 out[EACH][VECTORS], in[EACH][VECTORS];
  float shifted[EACH];
#pragma unroll
  for (int n = 0; n < EACH; ++n) {
    const int a = warp + WARPS * n;
    shifted[n] = 0.f;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int i = v * 128 + lane * 4;
      const bool real = a < A && i < COLUMNS;
      in[n][v] = real && step < c.steps ? ldg_v4(m.w_in + (u64)a * W + first + i) : none;
      out[n][v] = real && step > 0 ? ldg_v4(m.w_out + (u64)a * W + first + i) : none;
      if (step > 0 && i < COLUMNS) {
        const u64 at = (ADAPTIVE ? (u64)(step - 1) * W : 0) + first + i;
        const float4 scale = ldg_v4(m.final_scale + at);
        if (ADAPTIVE) {
          const float4 shift = ldg_v4(m.final_shift + at);
          shifted[n] += shift.x * out[n][v].x + shift.y * out[n][v].y + shift.z * out[n][v].z + shift.w * out[n][v].w;
        }
        out[n][v].x *= 1.f + scale.x;
        out[n][v].y *= 1.f + scale.y;
        out[n][v].z *= 1.f + scale.z;
        out[n][v].w *= 1.f + scale.w;
      }
    }
  }
  griddepcontrol_wait();
  if (step > 0) {
    float dot[EACH], square = 0.f;
#pragma unroll
    for (int n = 0; n < EACH; ++n) dot[n] = 0.f;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      const int i = v * 128 + lane * 4;
      float4 x = none;
      if (i < COLUMNS) {
        const uint4 bits = ld_cg_v4(c.xf + (u64)token_row * W + first + i);
        x = *(const float4*)&bits;
      }
      square += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
#pragma unroll
      for (int n = 0; n < EACH; ++n)
        dot[n] += x.x * out[n][v].x + x.y * out[n][v].y + x.z * out[n][v].z + x.w * out[n][v].w;
    }
    const int a = threadIdx.x;
    const float present = a < A ? ld_cg(c.actions + (u64)row * A + a) : 0.f;
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
      square += __shfl_xor_sync(~0u, square, offset);
#pragma unroll
      for (int n = 0; n < EACH; ++n) {
        dot[n] += __shfl_xor_sync(~0u, dot[n], offset);
        shifted[n] += __shfl_xor_sync(~0u, shifted[n], offset);
      }
    }
    if (lane < STEP_BLOCKS) {
#pragma unroll
      for (int n = 0; n < EACH; ++n)
        if (warp + WARPS * n < A)
          st_cluster_v2(mapa(smem_of(dots[rank][warp + WARPS * n]), lane), dot[n], shifted[n]);
      if (warp == 0) st_cluster(mapa(smem_of(squares + rank), lane), square);
    }
    cluster_arrive();
    cluster_wait();
    if (a < A) {
      float sum = 0.f, scaled = 0.f, velocity = m.b_out[a];
#pragma unroll
      for (int from = 0; from < STEP_BLOCKS; ++from) {
        sum += squares[from];
        scaled += dots[from][a][0];
        velocity += dots[from][a][1];
      }
      velocity += rsqrtf(sum / NORMED + eps) * scaled;
      const float off = c.follow[row] * (c.target[(u64)row * A + a] - (present - time * velocity));
      const float moved = present - 1.f / (float)c.steps * (velocity - gain * off);
      if (rank == 0) c.actions[(u64)row * A + a] = moved;
      action[a] = moved;
    }
  } else if (threadIdx.x < A) {
    action[threadIdx.x] = ld_cg(c.actions + (u64)row * A + threadIdx.x);
  }
  if (step == c.steps) return;
  __syncthreads();
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    float4 sum = none;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const float one = warp + WARPS * n < A ? action[warp + WARPS * n] : 0.f;
      sum.x += in[n][v].x * one;
      sum.y += in[n][v].y * one;
      sum.z += in[n][v].z * one;
      sum.w += in[n][v].w * one;
    }
    *(float4*)(sums[warp] + v * 128 + lane * 4) = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < COLUMNS; i += THREADS) {
    float sum = m.b_in[(ADAPTIVE ? 0 : (u64)step * W) + first + i];
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[w][i];
    if (ADAPTIVE) {
      c.xf[(u64)token_row * W + first + i] = sum;
      c.xb[place_of(token_row, first + i, W)] = round_bf16(sum);
    } else {
      c.hidden[place_of(token_row, first + i, W)] = round_bf16(sum / (1.f + __expf(-sum)));
    }
  }
}
