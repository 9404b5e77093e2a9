// The tensor cores: matrices in the registers of a warp, loaded, stored and multiplied; numbers of 16 and 8 bits. Source:
// the PTX manual, "Matrix fragments for mma.m16n8k16", "ldmatrix", "stmatrix", "Matrix fragments for
// wgmma.mma_async.m64nNk16", "Shared memory matrix layout".
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

// A warp's 16 rows of a wgmma whose a is in registers. b lies with k in a row: without a swizzle, matrices of 8 columns
// and 16 bytes of k, whose distances the descriptor has, along k (bits 16 to 29) and to the next columns (32 to 45); or in
// swizzled rows of 128 bytes, of which eight columns are a stride apart.
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
    if (descriptor >> 62 > 1) fail("wgmma: other swizzles than that of 128 bytes are not emulated");
    const bool swizzled = descriptor >> 62;
    const u32 first = (descriptor & 0x3fff) << 4, along = (descriptor >> 16 & 0x3fff) << 4, next = (descriptor >> 32 & 0x3fff) << 4;
    const u32 half_step = swizzled ? 16 : along, row_step = swizzled ? 128 : 16;
    float rows[16][16], columns[8][16];
    rows_of(warp, rows);
    for (int tile = 0; tile < count / 4; ++tile) {
      for (int half = 0; half < 2; ++half)
        for (int column = 0; column < 8; ++column) {
          const u32 plain = first + (u32)tile * next + (u32)half * half_step + (u32)column * row_step;
          const u32 there = swizzled ? plain ^ (plain >> 7 & 7) << 4 : plain;
          warp.block->memory.read(there, 16, warp.agent, warp.clock, "wgmma");
          for (int i = 0; i < 8; ++i) {
            u16 v;
            memcpy(&v, warp.block->memory.bytes + there + i * 2, 2);
            columns[column][half * 8 + i] = bits_as<float>((u32)v << 16);
          }
        }
      add_products(warp, rows, columns, tile * 4);
    }
  });
}

// Stored transposed: lane 4 g + t has column g of rows 2 t and 2 t + 1.
void emulator::store_matrices(u32 address, const u32* r, int count) {
  auto& mine = current->warp->lane[current->lane];
  if (current->lane < 8 * count) {
    if (address >> 24 != (u32)current->block->rank) fail("stmatrix: address %#x is another block's", address);
    if (address % 16) fail("stmatrix: expected an address at a multiple of 16 bytes, got %u beyond one", address % 16);
  }
  mine.word[0] = address & PLACE;
  mine.result = (void*)r;
  meet("stmatrix", [count](Warp& warp) {
    for (int matrix = 0; matrix < count; ++matrix)
      for (int row = 0; row < 8; ++row) {
        const u32 to = warp.lane[matrix * 8 + row].word[0];
        warp.block->memory.write(to, 16, warp.agent, warp.clock, warp.clock.seen[warp.agent], "stmatrix");
        for (int column = 0; column < 8; ++column) {
          const u32 pair = ((const u32*)warp.lane[column * 4 + row / 2].result)[matrix];
          const u16 v = (u16)(pair >> row % 2 * 16);
          memcpy(warp.block->memory.bytes + to + column * 2, &v, 2);
        }
      }
  });
}

float emulator::widen_e4m3(unsigned char v) {
  const int exponent = v >> 3 & 15, mantissa = v & 7;
  const float size = exponent ? ldexpf(8.f + (float)mantissa, exponent - 10) : ldexpf((float)mantissa, -9);
  return (v & 0x7f) == 0x7f ? NAN : v & 0x80 ? -size : size;
}
float widen_f16(u16 v) {
  const int exponent = v >> 10 & 31, mantissa = v & 1023;
  float size = exponent ? ldexpf(1024.f + (float)mantissa, exponent - 25) : ldexpf((float)mantissa, -24);
  if (exponent == 31) size = mantissa ? NAN : INFINITY;
  return v & 0x8000 ? -size : size;
}

namespace {

// To `bits` of mantissa, ties to even, no exponent below `least`.
float rounded(float x, int bits, int least) {
  if (x == 0.f || !std::isfinite(x)) return x;
  const int step = std::max(ilogbf(x), least) - bits;
  return ldexpf(nearbyintf(ldexpf(x, -step)), step);
}

u32 half_bits(float x) {
  const float y = rounded(x, 10, -14), size = fabsf(y);
  const u32 sign = std::signbit(x) ? 0x8000 : 0;
  if (x != x) return 0x7fff;
  if (size > 65504.f) return sign | 0x7c00;
  if (size < 6.103515625e-05f) return sign | (u32)ldexpf(size, 24);
  const int exponent = ilogbf(size);
  return sign | (u32)(exponent + 15) << 10 | ((u32)ldexpf(size, 10 - exponent) & 1023);
}

u32 e4m3_bits(float x) {
  if (x != x) return 0x7f;
  const float size = std::min(fabsf(rounded(x, 3, -6)), 448.f);
  const u32 sign = std::signbit(x) ? 0x80 : 0;
  if (size < 0.015625f) return sign | (u32)ldexpf(size, 9);
  const int exponent = ilogbf(size);
  return sign | (u32)(exponent + 7) << 3 | ((u32)ldexpf(size, 3 - exponent) & 7);
}

}  // namespace

u32 pack_f16x2(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
u16 pack_e4m3x2(float low, float high) { return (u16)(e4m3_bits(low) | e4m3_bits(high) << 8); }

// A warp's 16 rows of a wgmma whose operands both lie in swizzled rows of 128 bytes, eight rows a stride apart (bits 32 to
// 45 of a descriptor). `kind`: 0 BF16, 1 FP16, 2 E4M3.
void emulator::wgmma_of_shared(float* d, int count, u64 a, u64 b, int more, int kind) {
  auto& mine = current->warp->lane[current->lane];
  mine.descriptor = a;
  mine.word[0] = (u32)b;
  mine.word[1] = (u32)(b >> 32);
  mine.result = d;
  if (!more) memset(d, 0, count * sizeof(float));
  meet("wgmma", [count, kind](Warp& warp) {
    const auto of = [](const auto& lane) { return lane.word[0] | (u64)lane.word[1] << 32; };
    const u64 descriptors[2] = {warp.lane[0].descriptor, of(warp.lane[0])};
    for (auto& lane : warp.lane)
      if (lane.descriptor != descriptors[0] || of(lane) != descriptors[1])
        fail("wgmma: lanes of a warp give different descriptors");
    const int numbers = kind == 2 ? 32 : 16, columns = count * 2;
    const auto row_of = [&](u64 descriptor, int row, float* to) {
      if (descriptor >> 62 != 1) fail("wgmma: expected operands whose rows of 128 bytes are swizzled");
      const u32 at = (u32)(descriptor & 0x3fff) << 4, stride = (u32)(descriptor >> 32 & 0x3fff) << 4;
      for (int piece = 0; piece < 2; ++piece) {
        const u32 plain = at + (u32)row / 8 * stride + (u32)row % 8 * 128 + (u32)piece * 16, there = plain ^ (plain >> 7 & 7) << 4;
        warp.block->memory.read(there, 16, warp.agent, warp.clock, "wgmma");
        for (int i = 0; i < numbers / 2; ++i) {
          const unsigned char* from = warp.block->memory.bytes + there + i * 32 / numbers;
          u16 v = *from;
          if (kind != 2) memcpy(&v, from, 2);
          to[piece * numbers / 2 + i] =
              kind == 2 ? widen_e4m3((unsigned char)v) : kind == 1 ? widen_f16(v) : bits_as<float>((u32)v << 16);
        }
      }
    };
    const int first = (int)(&warp - warp.block->warps.data()) % 4 * 16;
    float rows[16][32];
    for (int row = 0; row < 16; ++row) row_of(descriptors[0], first + row, rows[row]);
    for (int column = 0; column < columns; ++column) {
      float other[32];
      row_of(descriptors[1], column, other);
      for (int row = 0; row < 16; ++row) {
        float sum = 0.f;
        for (int k = 0; k < numbers; ++k) sum += rows[row][k] * other[k];
        // Lane 4 g + t has of each eight columns 2 t and 2 t + 1, of rows g and g + 8.
        const int lane = row % 8 * 4 + column % 8 / 2;
        ((float*)warp.lane[lane].result)[column / 8 * 4 + row / 8 * 2 + column % 2] += sum;
      }
    }
  });
}
