// The tensor cores: matrices in the registers of a warp, loaded and multiplied. Source: the PTX manual, "Matrix fragments
// for mma.m16n8k16", "ldmatrix", "Matrix fragments for wgmma.mma_async.m64nNk16", "Shared memory matrix layout".
#include "instructions.h"
#include "machine.h"

using namespace emulator;

namespace {

constexpr u32 PLACE = 0xffffff;

float half_of(u32 pair, int which) { return bits_as<float>(which ? pair & 0xffff0000u : pair << 16); }

// Lane 4 g + t holds, of a matrix of 16 rows and 16 columns, columns 2 t, 2 t + 1 of row g and of row g + 8, then
// columns 8 + 2 t, 9 + 2 t of both.
void rows_of(const Warp& warp, float (&a)[16][16]) {
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k) a[row][k] = half_of(warp.lane[row % 8 * 4 + k % 8 / 2].word[row / 8 + k / 8 * 2], k % 2);
}

// Lane 4 g + t holds sums 2 t, 2 t + 1 of rows g and g + 8.
void add_products(Warp& warp, const float (&a)[16][16], const float (&b)[8][16], int first) {
  for (int lane = 0; lane < LANES; ++lane)
    for (int i = 0; i < 4; ++i) {
      const float *row = a[lane / 4 + i / 2 * 8], *column = b[lane % 4 * 2 + i % 2];
      float sum = 0.f;
      for (int k = 0; k < 16; ++k) sum += row[k] * column[k];
      ((float*)warp.lane[lane].result)[first + i] += sum;
    }
}

void load_matrices(u32 (&r)[4], u32 address, bool transposed, const char* what) {
  auto& mine = current->warp->lane[current->lane];
  if (address >> 24 != (u32)current->block->rank) fail("%s: address %#x is another block's", what, address);
  if (address % 16) fail("%s: expected an address at a multiple of 16 bytes, got %u beyond one", what, address % 16);
  current->block->memory.read(address & PLACE, 16, current->warp->agent, current->warp->clock, what);
  mine.word[0] = address & PLACE;
  mine.result = r;
  meet(what, [&](Warp& warp) {
    const unsigned char* bytes = warp.block->memory.bytes;
    const auto number = [&](int matrix, int row, int column) {
      u16 v;
      memcpy(&v, bytes + warp.lane[matrix * 8 + row].word[0] + column * 2, 2);
      return (u32)v;
    };
    for (int lane = 0; lane < LANES; ++lane)
      for (int matrix = 0; matrix < 4; ++matrix) {
        const int g = lane / 4, pair = lane % 4 * 2;
        const u32 low = transposed ? number(matrix, pair, g) : number(matrix, g, pair);
        const u32 high = transposed ? number(matrix, pair + 1, g) : number(matrix, g, pair + 1);
        ((u32*)warp.lane[lane].result)[matrix] = low | high << 16;
      }
  });
}

}  // namespace

void ldmatrix_x4(u32 (&r)[4], u32 address) { load_matrices(r, address, false, "ldmatrix_x4"); }
void ldmatrix_x4_trans(u32 (&r)[4], u32 address) { load_matrices(r, address, true, "ldmatrix_x4_trans"); }

void mma_m16n8k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  auto& mine = current->warp->lane[current->lane];
  const u32 words[4] = {a0, a1, a2, a3};
  memcpy(mine.word, words, sizeof(words));
  mine.descriptor = b0 | (u64)b1 << 32;
  mine.result = c;
  meet("mma_m16n8k16", [](Warp& warp) {
    float a[16][16], b[8][16];
    rows_of(warp, a);
    for (int column = 0; column < 8; ++column)
      for (int k = 0; k < 16; ++k)
        b[column][k] = half_of((u32)(warp.lane[column * 4 + k % 8 / 2].descriptor >> k / 8 * 32), k % 2);
    add_products(warp, a, b, 0);
  });
}

// A warp's 16 rows of a wgmma whose a is in registers. b lies without a swizzle, k in a row: matrices of 8 columns and 16
// bytes of k, whose distances the descriptor has, along k (bits 16 to 29) and to the next columns (32 to 45).
void wgmma_of_registers(float* d, int count, const u32 (&a)[4], u64 b, int more) {
  auto& mine = current->warp->lane[current->lane];
  memcpy(mine.word, a, sizeof(mine.word));
  mine.descriptor = b;
  mine.result = d;
  if (!more) memset(d, 0, count * sizeof(float));
  meet("wgmma", [count](Warp& warp) {
    const u64 descriptor = warp.lane[0].descriptor;
    for (auto& lane : warp.lane)
      if (lane.descriptor != descriptor) fail("wgmma: lanes of a warp give different descriptors");
    if (descriptor >> 62) fail("wgmma: swizzled matrices are not emulated");
    const u32 first = (descriptor & 0x3fff) << 4, along = (descriptor >> 16 & 0x3fff) << 4, next = (descriptor >> 32 & 0x3fff) << 4;
    float rows[16][16], columns[8][16];
    rows_of(warp, rows);
    for (int tile = 0; tile < count / 4; ++tile) {
      for (int half = 0; half < 2; ++half) {
        const u32 matrix = first + tile * next + half * along;
        warp.block->memory.read(matrix, 128, warp.agent, warp.clock, "wgmma");
        for (int i = 0; i < 64; ++i) {
          u16 v;
          memcpy(&v, warp.block->memory.bytes + matrix + i * 2, 2);
          columns[i / 8][half * 8 + i % 8] = bits_as<float>((u32)v << 16);
        }
      }
      add_products(warp, rows, columns, tile * 4);
    }
  });
}
