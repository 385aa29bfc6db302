// Words shared by all of the core. Nothing here knows of Python or torch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ringside {

constexpr int kMaxRanks = 256;
constexpr int kMaxDims = 64;  // as many as torch and NumPy have

// The codes that Python knows too (enums.py).
enum class DType : uint8_t {
#define DTYPE(member, name) member,
#include "enums.def"
  count
};
enum class ReduceOp : uint8_t {
#define REDUCE_OP(member, name) member,
#include "enums.def"
  count
};
enum class Algorithm : uint8_t {
#define ALGORITHM(member, name) member,
#include "enums.def"
};
enum class Kind : uint8_t {
#define KIND(member, name) member,
#include "enums.def"
  count
};
enum class Status : int {
#define STATUS(member, name) member,
#include "enums.def"
};
enum class Path : uint8_t {
#define PATH(member, name) member,
#include "enums.def"
  count
};

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
