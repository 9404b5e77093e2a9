// The loop: the order of the phases, for the warp that copies and for those that compute. This file is the last.

// The weights of a layer, as addresses: q/k/v, output, gate and up, down. The time MLP's lies behind the last layer.
__device__ __forceinline__ const u16* weights_of(const Model& m, int layer, int which) {
  return (const u16*)__ldg(m.weights + layer * 4 + which);
}

__device__ __forceinline__ void push_cache(Producer& ring, const Call& c, int layer) {
  const int parts = parts_of(c), items = items_of(c);
#pragma unroll 1
  for (int at = blockIdx.x; at < items; at += gridDim.x) {
    const int batch = at / parts / HEADS, length = length_of(c, batch);
    const Item item(at, parts, length);
    if (item.suffix) continue;
    const u64 from = (((u64)layer * BATCH + batch) * c.prefix_tokens * KV_HEADS + item.head / GROUP) * HEAD_DIM;
    ring.push_keys(c.keys + from, item.first, length);
    ring.push_keys(c.values + from, item.first, length);
  }
}

__device__ __forceinline__ void produce(const Model& m, const Call& c) {
  Producer ring;
#pragma unroll 1
  for (int step = 0; step < STEPS; ++step) {
    if (!ADAPTIVE) ring.push<Mix>(weights_of(m, DEPTH, 0));
#pragma unroll 1
    for (int layer = 0; layer < DEPTH; ++layer) {
      ring.push<Qkv>(weights_of(m, layer, 0));
      push_cache(ring, c, layer);
      ring.push<Output>(weights_of(m, layer, 1));
      ring.push<GateUp>(weights_of(m, layer, 2));
      ring.push<Down>(weights_of(m, layer, 3));
    }
  }
  cp_async_wait<0>();
}

__device__ __forceinline__ bool works(int items) { return (int)blockIdx.x < items; }

__device__ __forceinline__ void consume_layer(Consumer& me, int step, int layer) {
  const Call& c = me.c;
  const int at = step * DEPTH + layer;
  if (tiles_of<Qkv>().count) {
    HeadsEpilogue epilogue{me.m, c, at};
    product<Qkv>(me, me.x, c.x, epilogue);
    me.heads.arrive();
  }
  me.heads.expect(workers(Qkv::TILES));
  if (works(items_of(c))) {
    attend(me);
    me.parts.arrive();
  }
  me.parts.expect(workers(items_of(c)));
  if (works(COMBINED)) {
    combine(me);
    me.context.arrive();
  }
  me.context.expect(workers(COMBINED));
  const bool owner = tiles_of<Down>().count > 0;
  if (owner) {
    ResidualEpilogue epilogue{me.m, c, step, layer, false};
    product<Output>(me, me.context, c.context, epilogue);
    me.x.arrive();
  }
  me.x.expect(workers(Down::TILES));
  if (tiles_of<GateUp>().count) {
    GatedEpilogue epilogue{me.m, c, at};
    product<GateUp>(me, me.x, c.x, epilogue);
    me.hidden.arrive();
  }
  me.hidden.expect(workers(GateUp::TILES));
  if (owner) {
    ResidualEpilogue epilogue{me.m, c, step, layer, true};
    product<Down>(me, me.hidden, c.active, epilogue);
    me.x.arrive();
  }
  me.x.expect(workers(Down::TILES));
}

__device__ __forceinline__ void consume(const Model& m, const Call& c) {
  Consumer me(m, c);
#pragma unroll 1
  for (int step = 0; step < STEPS; ++step) {
    if (tiles_of<Down>().count) {
      input(me, step);
      (ADAPTIVE ? me.x : me.embedded).arrive();
    }
    (ADAPTIVE ? me.x : me.embedded).expect(workers(Down::TILES));
    if (!ADAPTIVE) {
      if (tiles_of<Mix>().count) {
        MixEpilogue epilogue{m, c};
        product<Mix>(me, me.embedded, c.embedded, epilogue);
        me.x.arrive();
      }
      me.x.expect(workers(Mix::TILES));
    }
#pragma unroll 1
    for (int layer = 0; layer < DEPTH; ++layer) consume_layer(me, step, layer);
    if (works(MOVES)) {
      move_actions(me, step);
      me.actions.arrive();
    }
    me.actions.expect(workers(MOVES));
  }
  if (blockIdx.x > 0) return;
  // The last hand-off: nobody waits for a counter any more. The next launch finds zeros.
  me.actions.wait();
  if (threadIdx.x < HOPS) c.arrivals[threadIdx.x * HOP_STRIDE] = 0;
}

extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 1)
    denoise(const __grid_constant__ Model m, const __grid_constant__ Call c) {
  if (threadIdx.x == 0) Stages().init();
  __syncthreads();
  if (threadIdx.x < WARPS * 32)
    consume(m, c);
  else
    produce(m, c);
}
