// Words shared by all of the core. Nothing here knows of Python or torch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ringside {

constexpr int kMaxRanks = 256;
constexpr int kMaxDims = 64;  // as many as torch and NumPy have

// The numbers are the wire format between ranks and the interface to Python (engine/dtypes.py): append only.
enum class DType : uint8_t { f32, f64, f16, bf16, i8, u8, i16, i32, i64, boolean, count };
enum class ReduceOp : uint8_t { sum, avg, prod, min, max, band, bor, bxor, count };
enum class Algorithm : uint8_t { automatic, one_shot, direct, program };
enum class Kind : uint8_t {
  barrier, all_reduce, empty, reduce_scatter_in_place, all_gather_in_place,
  reduce_scatter, all_gather, broadcast, reduce, gather, scatter, all_to_all, split, count
};

enum class Status : int { ok, mismatch, peer_lost, deadline, interrupted, closed, exchange, no_weight, withdrawn };

inline size_t size_of(DType d) {
  switch (d) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16: return 2;
    default: return 1;
  }
}

}  // namespace ringside
