// Reduction kernels: out[i] = finish(fold over r of scale[r]·src[r][i]), left to right in the order given.
//
// f16 and bf16 are widened to f32, folded there, and rounded once. `avg` divides the finished sum by `divisor`
// (integers truncate). `scale` multiplies each contribution before the fold, as NCCL's PreMulSum does.
#pragma once
#include "core.hpp"

namespace ringside {

struct Fold {
  const void* const* src;  // nsrc pointers to count elements each
  int nsrc;
  void* const* dst;  // ndst pointers; each may equal a src
  int ndst;
  size_t count;    // elements
  double scale;    // 1.0: contributions are taken as they are
  double divisor;  // for avg; ignored by the other operations
  bool stream;     // write past the caches: for tensors that do not fit in them
  const double* scales = nullptr;  // one per source, in place of `scale`
};

using FoldKernel = void (*)(const Fold&);
using WidenKernel = void (*)(const void* src, float* dst, size_t count);
using NarrowKernel = void (*)(const float* src, void* dst, size_t count);
// Blocks of 32 elements in 8 bits each, with one power of two per block: see kernels_impl.hpp.
struct BlockCode {
  const float* src;
  uint8_t* codes;    // count
  uint8_t* scales;   // one per begun block
  size_t count;      // elements
  float* residual;   // what is added to them, and then what was rounded away of that; null: nothing
  float* back;       // what the codes are worth; may equal src
};
using EncodeKernel = void (*)(const BlockCode&);
using DecodeKernel = void (*)(const uint8_t* codes, const uint8_t* scales, float* dst, size_t count);
using PairKernel = void (*)(const void* a, const void* b, void* x, void* y, size_t bytes);
using DigestKernel = uint64_t (*)(const unsigned char* bytes, size_t words, const uint64_t* weights);
using StreamKernel = void (*)(void* dst, const void* src, size_t bytes);

struct KernelTable {
  const char* name;
  FoldKernel fold[static_cast<int>(DType::count)][static_cast<int>(ReduceOp::count)];  // null: refused
  WidenKernel widen_f16, widen_bf16;
  NarrowKernel narrow_f16, narrow_bf16;
  EncodeKernel encode_int8, encode_e4m3;
  DecodeKernel decode_int8, decode_e4m3;
  StreamKernel stream_copy;
  PairKernel stream_pair;  // two reads and two non-temporal writes per byte: what the memory can do at best
  DigestKernel digest_block;  // the weighted sum of one block's words (digest.hpp)
};

// The best table this processor can run; RINGSIDE_ISA=baseline|avx2|avx512 asks for a lesser one.
const KernelTable& kernels();
const KernelTable* kernels_named(const char* name);

}  // namespace ringside
