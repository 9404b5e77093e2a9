"""The emulator of CUDA kernels itself (`tests/support/cuda_emulator`): what it computes, the mistakes that it must
find, and that no instruction is passed over."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.cuda_emulator import EmulatedModule, EmulationError, Untranslatable, instructions, translate
from vla_accel.kernels import nvrtc
from vla_accel.kernels.wgmma import wgmma

THREADS, SHARED = 64, 4096
CPU = torch.device("cpu")

# Each kernel makes one mistake, or none. `out` are 1024 numbers, `in` are 1024 numbers that are 0, 1, 2, ...
KERNELS = {
    "exchange": """
      __shared__ float kept[64], more;
      kept[threadIdx.x] = in[threadIdx.x];
      if (threadIdx.x == 0) more = 1000.f;
      __syncthreads();
      float v = kept[63 - threadIdx.x] + more;
      v += __shfl_xor_sync(~0u, v, 1);
      griddepcontrol_wait();
      out[blockIdx.x * 64 + threadIdx.x] = v;
    """,
    "polls": """
      griddepcontrol_wait();
      if (blockIdx.x == 0) {
        if (threadIdx.x < 8) st_relaxed((u16*)(out + 512) + threadIdx.x, 1);
      } else {
        uint4 v = ld_relaxed_v4(out + 512);
        wait_there(v, out + 512);
        out[threadIdx.x] = v.x + v.y;
      }
    """,
    "copies": """
      const u32 barrier = smem_of(shared_memory + 1024);
      if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, 256);
        for (int i = 0; i < 2; ++i) bulk_load(smem_of(shared_memory + i * 128), in + 4 + i * 32, 128, barrier);
      }
      __syncthreads();
      mbarrier_wait(barrier, 0);
      griddepcontrol_wait();
      out[threadIdx.x] = ((float*)shared_memory)[threadIdx.x];
    """,
    "sends": """
      const u32 barrier = smem_of(shared_memory + 1024);
      if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, 64 * 16);
      }
      cluster_arrive_relaxed();
      cluster_wait();
      const u32 there = mapa(smem_of(shared_memory), 1 - blockIdx.x), their_barrier = mapa(barrier, 1 - blockIdx.x);
      st_async(there + threadIdx.x * 16, their_barrier, blockIdx.x, threadIdx.x, 0, 0);
      mbarrier_wait_cluster(barrier, 0);
      griddepcontrol_wait();
      const uint4 v = ((const uint4*)shared_memory)[threadIdx.x];
      out[blockIdx.x * 64 + threadIdx.x] = v.x * 100 + v.y;
      cluster_arrive();
      cluster_wait();
    """,
    "arrives_when_copied": """
      const u32 full = smem_of(shared_memory + 3072);
      if (threadIdx.x == 0) mbarrier_init(full, 32);
      __syncthreads();
      if (threadIdx.x < 32) {
        for (int i = 0; i < 4; ++i) {
          const float* from = in + (i % 2 * 32 + threadIdx.x) * 4;
          cp_async_16(smem_of(shared_memory) + (i * 32 + threadIdx.x) * 16, from, i < 3, 0);
          cp_async_commit();
          cp_async_wait<1>();
        }
        cp_async_arrive(full);
        cp_async_wait<0>();
      } else {
        griddepcontrol_wait();
        mbarrier_wait(full, 0);
        for (int i = threadIdx.x - 32; i < 512; i += 32) out[i] = ((float*)shared_memory)[i];
      }
    """,
    "counts": """
      u32* const counter = (u32*)(out + 512);
      griddepcontrol_wait();
      out[blockIdx.x * 64 + threadIdx.x] = blockIdx.x + 1.f;
      __syncthreads();
      if (threadIdx.x == 0) {
        red_release(counter);
        wait_count(counter, gridDim.x);
      }
      __syncthreads();
      out[128 + blockIdx.x * 64 + threadIdx.x] = out[(1 - blockIdx.x) * 64 + threadIdx.x];
    """,
    "copied_not_awaited": """
      if (threadIdx.x < 32) {
        cp_async_16(smem_of(shared_memory) + threadIdx.x * 16, in, true, 0);
        cp_async_commit();
        cp_async_wait<1>();
        use(((float*)shared_memory)[threadIdx.x * 4]);
        cp_async_wait<0>();
      }
    """,
    "copies_when_it_ends": "cp_async_16(smem_of(shared_memory) + threadIdx.x * 16, in, true, 0);",
    "nobody_counts": "griddepcontrol_wait(); if (threadIdx.x == 0) wait_count((u32*)out, 1);",
    "sends_home": """
      if (threadIdx.x) return;
      mbarrier_init(smem_of(shared_memory), 1);
      mbarrier_arrive_expect_tx(smem_of(shared_memory), 16);
      st_async(smem_of(shared_memory + 64), smem_of(shared_memory), 1, 2, 3, 4);
      mbarrier_wait_cluster(smem_of(shared_memory), 0);
    """,
    "no_barrier": "((float*)shared_memory)[threadIdx.x] = 1.f; use(((float*)shared_memory)[63 - threadIdx.x]);",
    "read_then_written": "use(((float*)shared_memory)[0]); if (threadIdx.x == 40) ((float*)shared_memory)[0] = 1.f;",
    "beyond_shared": "use(((float*)shared_memory)[1024 - 63 + threadIdx.x]);",
    "beyond_tensor": "use(in[1024 - 63 + threadIdx.x]);",
    "misaligned": "use(*(const float2*)(in + threadIdx.x));",
    "misaligned_copy": """
      if (threadIdx.x) return;
      mbarrier_init(smem_of(shared_memory), 1);
      bulk_load(smem_of(shared_memory + 64), in + 1, 64, smem_of(shared_memory));
    """,
    "half_a_barrier": "if (threadIdx.x < 32) __syncthreads();",
    "diverged": "if (threadIdx.x % 32 < 7) __syncwarp(); else use(__shfl_xor_sync(~0u, 1.f, 1));",
    "too_few_bytes": """
      if (threadIdx.x) return;
      mbarrier_init(smem_of(shared_memory), 1);
      mbarrier_arrive_expect_tx(smem_of(shared_memory), 128);
      bulk_load(smem_of(shared_memory + 64), in, 64, smem_of(shared_memory));
      mbarrier_wait(smem_of(shared_memory), 0);
    """,
    "ends_early": """
      if (threadIdx.x) return;
      mbarrier_init(smem_of(shared_memory), 1);
      mbarrier_arrive_expect_tx(smem_of(shared_memory), 64);
      bulk_load(smem_of(shared_memory + 64), in, 64, smem_of(shared_memory));
    """,
    "copy_not_awaited": """
      if (threadIdx.x == 0) {
        mbarrier_init(smem_of(shared_memory), 1);
        mbarrier_arrive_expect_tx(smem_of(shared_memory), 64);
        bulk_load(smem_of(shared_memory + 64), in, 64, smem_of(shared_memory));
      }
      __syncthreads();
      mbarrier_wait(smem_of(shared_memory), 1);
      use(((float*)shared_memory)[16]);
      __syncthreads();
      mbarrier_wait(smem_of(shared_memory), 0);
    """,
    "nobody_stores": """
      uint4 v = make_uint4(~0u, ~0u, ~0u, ~0u);
      griddepcontrol_wait();
      if (threadIdx.x == 0) {
        ((uint4*)out)[128] = v;
        wait_there(v, out + 512);
      }
    """,
    "no_such_barrier": "mbarrier_wait(smem_of(shared_memory), 0);",
    "on_a_barrier": """
      if (threadIdx.x == 0) {
        mbarrier_init(smem_of(shared_memory + 64), 1);
        fence_mbarrier_init();
        mbarrier_arrive(smem_of(shared_memory + 64));
      }
      __syncthreads();
      mbarrier_wait(smem_of(shared_memory + 64), 0);
      __syncthreads();
      ((float*)shared_memory)[threadIdx.x] = 1.f;
    """,
    "not_started": "st_cluster(mapa(smem_of(shared_memory), 1 - blockIdx.x % 2), 1.f);",
    "has_ended": """
      cluster_arrive_relaxed();
      cluster_wait();
      if (blockIdx.x % 2 == 0) return;
      for (int i = 0; i < 100; ++i) ld_relaxed_v4(in);
      ld_cluster(smem_of(shared_memory), 0);
    """,
    "relaxed": """
      st_cluster(smem_of(shared_memory), 1.f);
      cluster_arrive_relaxed();
      cluster_wait();
      use(ld_cluster(smem_of(shared_memory), 1 - blockIdx.x % 2));
      cluster_arrive();
      cluster_wait();
    """,
    "reads_too_early": "use(out[threadIdx.x]);",
    "writes_too_early": "out[threadIdx.x] = 1.f;",
    "writes": "griddepcontrol_wait(); out[threadIdx.x] = 1.f;",
}  # fmt: skip

BROKEN = {
    "no_barrier": "which warp . of block . of the cluster (wrote|read) with no barrier between",
    "read_then_written": "with no barrier between",
    "beyond_shared": "thread 63: the code reads 4 bytes at 4096 of its block's shared memory, of which it asked for",
    "beyond_tensor": "thread 63: the code reads 4 bytes outside of every tensor",
    "misaligned": r"kernels.cu:\d+: expected a pointer to a multiple of 8 bytes, got 4 beyond one",
    "misaligned_copy": "bulk_load: expected an address at a multiple of 16 bytes, got 4 beyond one",
    "half_a_barrier": "these threads wait for ever: 64 at __syncthreads",
    "diverged": "other lanes of its warp are at",
    "too_few_bytes": "these threads wait for ever: 2 at mbarrier_wait",
    "ends_early": "the block ends while copies to its shared memory are under way",
    "copy_not_awaited": "with no barrier between|wait for ever",
    "copies_when_it_ends": "a thread ends while copies by cp.async are under way",
    "nobody_counts": "these threads wait for ever: 2 at wait_count",
    "nobody_stores": "these threads wait for ever: 2 at wait_there",
    "no_such_barrier": "mbarrier_wait: there is no barrier at",
    "on_a_barrier": "the code writes 4 bytes at (64|68), where a barrier lies",
    "not_started": "nothing says yet that block . of the cluster has started",
    "has_ended": "block 0 of the cluster has ended",
    "relaxed": "with no barrier between",
    "writes_too_early": "writes, before griddepcontrol.wait, byte",
}

SOURCE = (
    nvrtc.source_of({})
    + "extern __shared__ __align__(128) unsigned char shared_memory[];\n"
    + "__device__ __forceinline__ void use(float v) { if (v == 12345.f) __syncthreads(); }\n"
    + "__device__ __forceinline__ void use(const float2& v) { use(v.x + v.y); }\n"
    + "".join(
        f'extern "C" __global__ void {name}(const float* in, float* out) {{{text}}}\n' for name, text in KERNELS.items()
    )
)


@pytest.fixture(scope="module")
def module(emulated: Path) -> EmulatedModule:
    return EmulatedModule(SOURCE, dict.fromkeys(KERNELS, SHARED), "sm_90a", CPU, folder=emulated)


def launch(module: EmulatedModule, name: str, *, blocks: int = 2, cluster: int = 2, dependent: bool = False) -> Tensor:
    numbers, out = torch.arange(1024, dtype=torch.float32), torch.zeros(1024)
    return launch_on(module, name, numbers, out, blocks=blocks, cluster=cluster, dependent=dependent)


def launch_on(
    module: EmulatedModule, name: str, numbers: Tensor, out: Tensor, *, blocks: int = 2, cluster: int = 2,
    dependent: bool = False,
) -> Tensor:  # fmt: skip
    module.allow(numbers, out)
    values = [ctypes.c_void_p(t.data_ptr()) for t in (numbers, out)]
    module.launch(name, blocks, THREADS, values, cluster=cluster, dependent=dependent)
    return out


@pytest.mark.parametrize("seed", range(5))
def test_threads_exchange_what_they_have(module: EmulatedModule, seed: int) -> None:
    module.seed = 100 * seed
    out = launch(module, "exchange")
    one = 1063.0 - torch.arange(64)
    assert torch.equal(out[:128], (one + one[torch.arange(64) ^ 1]).repeat(2))
    # The second block may begin first, and is then stuck until the first has begun, too.
    out = torch.zeros(1024)
    out[512:516].view(torch.int32).fill_(-1)
    assert launch_on(module, "polls", out.clone(), out, cluster=1)[:64].tolist() == [2.0 * 0x10001] * 64
    assert torch.equal(launch(module, "copies")[:64], torch.arange(4.0, 68.0))
    out = launch(module, "sends")[:128]
    assert torch.equal(out, torch.cat((torch.arange(100.0, 164.0), torch.arange(64.0))))


@pytest.mark.parametrize("seed", range(5))
def test_copies_by_threads_land_in_time(module: EmulatedModule, seed: int) -> None:
    module.seed = 100 * seed
    numbers = torch.arange(256.0)
    out = launch(module, "arrives_when_copied", blocks=1, cluster=1)
    assert torch.equal(out[:512], torch.cat((numbers, numbers[:128], torch.zeros(128))))
    out = launch(module, "counts", cluster=1)
    assert torch.equal(out[128:256], torch.tensor([2.0, 1.0]).repeat_interleave(64))


def test_a_copy_that_is_read_before_it_lands_is_found_in_some_order(module: EmulatedModule) -> None:
    """What is there is NaN until a copy lands, which may be early."""
    found = 0
    for seed in range(20):
        module.seed = 100 * seed
        try:
            launch(module, "copied_not_awaited")
        except EmulationError as error:
            assert "with no barrier between" in str(error)
            found += 1
    assert found


@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_is_found(module: EmulatedModule, name: str) -> None:
    for seed in range(3):
        module.seed = 100 * seed
        with pytest.raises(EmulationError, match=f"{name}: .*({BROKEN[name]})"):
            launch(module, name)
    launch(module, "exchange")  # It goes on after a failure.


def test_a_kernel_that_was_not_launched_in_clusters_may_not_send(module: EmulatedModule) -> None:
    """The GPU ends it with an illegal instruction."""
    launch(module, "sends_home", blocks=2, cluster=2)
    with pytest.raises(EmulationError, match="st_async: the kernel was not launched in clusters"):
        launch(module, "sends_home", blocks=1, cluster=1)


def test_a_read_before_the_wait_is_found_where_a_kernel_of_the_chain_wrote(module: EmulatedModule) -> None:
    numbers, out = torch.zeros(1024), torch.zeros(1024)
    launch_on(module, "reads_too_early", numbers, out)
    launch_on(module, "writes", numbers, out)
    launch_on(module, "reads_too_early", numbers, out)  # This launch waits for all before it begins.
    launch_on(module, "writes", numbers, out, dependent=True)
    with pytest.raises(
        EmulationError, match=r"reads, before griddepcontrol\.wait, byte \d+ of a tensor of 4096, which a"
    ):
        launch_on(module, "reads_too_early", numbers, out, dependent=True)


# -- matrices ---------------------------------------------------------------------------------------------------------


def test_tensor_cores_multiply(emulated: Path) -> None:
    """c = a bᵀ, b (8, 16), by each way to load and multiply, in BF16 whose products and sums are exact."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 8, shape, generator=generator).bfloat16() for shape in ((16, 16), (8, 16)))
    # As matrices of 8 rows of 16 bytes: of a by columns then rows, of b by columns.
    tiles = torch.cat(
        (a.view(2, 8, 2, 8).permute(2, 0, 1, 3).reshape(-1), b.view(8, 2, 8).permute(1, 0, 2).reshape(-1))
    )
    across = b.T.contiguous()  # (16, 8): what the transposed load takes
    text = """
extern __shared__ __align__(128) unsigned char shared_memory[];
extern "C" __global__ void multiply(const u16* tiles, const u16* across, float* out) {
  u16* const here = (u16*)shared_memory;
  for (int i = threadIdx.x; i < 384; i += 32) here[i] = tiles[i];
  for (int i = threadIdx.x; i < 128; i += 32) here[384 + i] = across[i];
  __syncthreads();
  const int lane = threadIdx.x;
  u32 a[4], b[4], t[4];
  ldmatrix_x4(a, smem_of(here) + lane * 16);
  ldmatrix_x4(b, smem_of(here + 256) + lane % 16 * 16);
  ldmatrix_x4_trans(t, smem_of(here + 384) + lane % 16 * 16);
  float sums[3][4] = {};
  mma_m16n8k16(sums[0], a[0], a[1], a[2], a[3], b[0], b[1]);
  mma_m16n8k16(sums[1], a[0], a[1], a[2], a[3], t[0], t[1]);
  wgmma_fence();
  wgmma(sums[2], a[0], a[1], a[2], a[3], wgmma_descriptor(smem_of(here + 256), 128, 256, false), 1);
  wgmma_commit();
  wgmma_wait<0>();
  griddepcontrol_wait();
  for (int way = 0; way < 3; ++way)
    for (int i = 0; i < 4; ++i) out[way * 128 + (lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[way][i];
}
"""
    source = nvrtc.source_of({}, generated=wgmma("wgmma", 8, "bf16", registers=True)) + text
    module = EmulatedModule(source, {"multiply": SHARED}, "sm_90a", CPU, folder=emulated)
    out = torch.zeros(3, 16, 8)
    module.allow(tiles, across, out)
    module.launch("multiply", 1, 32, [ctypes.c_void_p(t.data_ptr()) for t in (tiles, across, out)])
    want = a.float() @ b.float().T
    assert all(torch.equal(one, want) for one in out)


# -- what it reads ----------------------------------------------------------------------------------------------------

WRAPPER = (
    '__device__ __forceinline__ u32 {name}(u32 v) {{\n  asm("brev.b32 %0, %1;" : "=r"(v) : "r"(v));\n  return v;\n}}\n'
)
USES = 'extern "C" __global__ void f(u32* out) {{ out[0] = {name}(1); }}\n'


def test_an_instruction_that_it_does_not_know_is_named() -> None:
    source = WRAPPER.format(name="reversed") + USES.format(name="reversed")
    with pytest.raises(
        Untranslatable, match="reversed: it wraps an instruction of PTX that the emulator does not know"
    ):
        translate(source, ["f"])
    # It does not matter where nobody calls it.
    assert "brev" not in translate(WRAPPER.format(name="reversed") + USES.format(name="round_bf16"), ["f"])


def test_an_instruction_outside_of_a_function_of_its_own_is_named() -> None:
    with pytest.raises(Untranslatable, match="line 2: expected assembly in `__device__` functions alone"):
        translate('extern "C" __global__ void f(u32* out) {\n  asm volatile("trap;");\n}\n', ["f"])
    # What only tells the compiler something stays.
    assert '"+r"' in translate('extern "C" __global__ void f(int n) { asm volatile("" : "+r"(n)); }', ["f"])


def test_a_macro_of_an_instruction_counts_as_one() -> None:
    macro = '#define WAIT(how) \\\n  asm volatile(how \\\n      "p;")\n'
    wait = "__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {\n  WAIT(1);\n}\n"
    code = translate(macro + wait + 'extern "C" __global__ void f() { mbarrier_wait(0, 0); }\n', ["f"])
    assert "WAIT(" not in code and "asm" not in code


def test_lines_stay_where_they_were() -> None:
    source = nvrtc.source_of({}) + 'extern "C" __global__ void f() {}\n'
    lines = translate(source, ["f"]).split('#line 1 "kernels.cu"\n')[1].splitlines()
    assert lines[source.splitlines().index('extern "C" __global__ void f() {}')] == 'extern "C" __global__ void f() {}'


def test_every_name_of_the_list_is_one_of_the_kernels() -> None:
    """A name here that is no wrapper there is a wrapper that was renamed."""
    texts = "".join(path.read_text() for path in Path(nvrtc.__file__).parent.glob("**/*.cu"))
    generated = {"wgmma", "wgmma_bf16", "wgmma_bf16_by_registers", "wgmma_f16", "wgmma_e4m3", "wgmma_of_registers"}
    assert {name for name in instructions() - generated if f" {name}(" not in texts} == set()
