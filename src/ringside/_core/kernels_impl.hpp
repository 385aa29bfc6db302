// The kernels themselves, compiled once per instruction set: each including file sets its flags and RINGSIDE_TABLE.
// Everything is in an unnamed namespace, so that no function built with wide vectors can be linked into another set.
#include <cstring>
#include <type_traits>
#include "kernels.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ringside {
namespace {

constexpr size_t kBlockBytes = 4096;  // accumulators stay in the first-level cache

inline float from_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline uint32_t to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

inline float widen_bf16_one(uint16_t h) { return from_bits(uint32_t(h) << 16); }

// Round to nearest even; a NaN stays a NaN (its quiet bit set, its upper payload kept).
inline uint16_t narrow_bf16_one(float f) {
  const uint32_t u = to_bits(f);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;
  return uint16_t((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

inline float widen_f16_one(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16;
  const uint32_t body = uint32_t(h & 0x7fffu) << 13;
  if (body >= 0x0f800000u) {  // Inf, NaN
    const uint32_t quiet = (body & 0x007fffffu) ? 0x00400000u : 0u;
    return from_bits(sign | 0x70000000u | body | quiet);
  }
  return from_bits(sign | to_bits(from_bits(body) * 0x1p112f));  // exact, subnormals too
}

inline uint16_t narrow_f16_one(float f) {
  const uint32_t u = to_bits(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
  if (a >= 0x477ff000u) return uint16_t(sign | 0x7c00u);               // rounds to Inf
  if (a < 0x38800000u) {                                               // subnormal: let the adder round
    const float magic = from_bits(0x3f000000u);                       // 0.5: one f16 subnormal step is its last bit
    return uint16_t(sign | (to_bits(from_bits(a) + magic) - 0x3f000000u));
  }
  return uint16_t(sign | ((a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13));
}

void widen_bf16(const void* src, float* dst, size_t n) {
  const uint16_t* s = static_cast<const uint16_t*>(src);
  for (size_t i = 0; i < n; ++i) dst[i] = widen_bf16_one(s[i]);
}
void narrow_bf16(const float* src, void* dst, size_t n) {
  uint16_t* d = static_cast<uint16_t*>(dst);
  for (size_t i = 0; i < n; ++i) d[i] = narrow_bf16_one(src[i]);
}
void widen_f16(const void* src, float* dst, size_t n) {
  const uint16_t* s = static_cast<const uint16_t*>(src);
  size_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s + i))));
#endif
  for (; i < n; ++i) dst[i] = widen_f16_one(s[i]);
}
void narrow_f16(const float* src, void* dst, size_t n) {
  uint16_t* d = static_cast<uint16_t*>(dst);
  size_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(d + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
  for (; i < n; ++i) d[i] = narrow_f16_one(src[i]);
}

void stream_copy(void* dst, const void* src, size_t bytes) {
  char* d = static_cast<char*>(dst);
  const char* s = static_cast<const char*>(src);
#if defined(__x86_64__)
  const size_t head = (64 - (reinterpret_cast<uintptr_t>(d) & 63)) & 63;
  if (bytes >= head + 64) {
    memcpy(d, s, head);
    d += head, s += head, bytes -= head;
    for (; bytes >= 64; bytes -= 64, d += 64, s += 64) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(d), _mm512_loadu_si512(s));
#elif defined(__AVX__)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(d), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s)));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(d + 32), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + 32)));
#else
      for (int k = 0; k < 64; k += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(d + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(s + k)));
#endif
    }
  }
#endif
  memcpy(d, s, bytes);
}

// Addresses and size are multiples of 64 bytes.
void stream_pair(const void* a, const void* b, void* x, void* y, size_t bytes) {
  const char *p = static_cast<const char*>(a), *q = static_cast<const char*>(b);
  char *u = static_cast<char*>(x), *v = static_cast<char*>(y);
  for (size_t i = 0; i < bytes; i += 64) {
#if defined(__AVX512F__)
    const __m512i s = _mm512_or_si512(_mm512_load_si512(p + i), _mm512_load_si512(q + i));
    _mm512_stream_si512(reinterpret_cast<__m512i*>(u + i), s);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(v + i), s);
#elif defined(__x86_64__)
    for (int k = 0; k < 64; k += 16) {
      const __m128i s = _mm_or_si128(_mm_load_si128(reinterpret_cast<const __m128i*>(p + i + k)),
                                     _mm_load_si128(reinterpret_cast<const __m128i*>(q + i + k)));
      _mm_stream_si128(reinterpret_cast<__m128i*>(u + i + k), s);
      _mm_stream_si128(reinterpret_cast<__m128i*>(v + i + k), s);
    }
#else
    for (int k = 0; k < 64; ++k) u[i + k] = v[i + k] = char(p[i + k] | q[i + k]);
#endif
  }
}

// How a dtype lies in memory (S), what it is folded in (A), and block conversions between the two.
template <class T>
struct Plain {
  using S = T;
  using A = T;
  static const A* widen(const S* s, A*, size_t) { return s; }
  static const S* narrow(const A* a, S*, size_t) { return a; }
};
struct Half {
  using S = uint16_t;
  using A = float;
  static const A* widen(const S* s, A* room, size_t n) { return widen_f16(s, room, n), room; }
  static const S* narrow(const A* a, S* room, size_t n) { return narrow_f16(a, room, n), room; }
};
struct Brain {
  using S = uint16_t;
  using A = float;
  static const A* widen(const S* s, A* room, size_t n) { return widen_bf16(s, room, n), room; }
  static const S* narrow(const A* a, S* room, size_t n) { return narrow_bf16(a, room, n), room; }
};

template <class T>
struct is_float { static constexpr bool value = false; };
template <> struct is_float<float> { static constexpr bool value = true; };
template <> struct is_float<double> { static constexpr bool value = true; };

// Signed overflow wraps, as it does in NumPy and torch: computed in the unsigned type of a width no promotion changes.
template <class T> struct wrapping { using type = T; };
template <> struct wrapping<int8_t> { using type = uint32_t; };
template <> struct wrapping<uint8_t> { using type = uint32_t; };
template <> struct wrapping<int16_t> { using type = uint32_t; };
template <> struct wrapping<int32_t> { using type = uint32_t; };
template <> struct wrapping<int64_t> { using type = uint64_t; };

struct Sum {
  template <class A> static A apply(A a, A b) {
    using W = typename wrapping<A>::type;
    return A(W(a) + W(b));
  }
};
struct Prod {
  template <class A> static A apply(A a, A b) {
    using W = typename wrapping<A>::type;
    return A(W(a) * W(b));
  }
};
// IEEE 754-2019 minimum and maximum: a NaN on either side wins.
struct Min {
  template <class A> static A apply(A a, A b) { return (a < b || a != a) ? a : b; }
};
struct Max {
  template <class A> static A apply(A a, A b) { return (a > b || a != a) ? a : b; }
};
struct Band {
  template <class A> static A apply(A a, A b) { return A(a & b); }
};
struct Bor {
  template <class A> static A apply(A a, A b) { return A(a | b); }
};
struct Bxor {
  template <class A> static A apply(A a, A b) { return A(a ^ b); }
};

template <class Op, bool Scaled, class A>
void fold_block(A* acc, const A* first, const A* next, size_t n, A scale, A next_scale) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    if constexpr (Scaled)
      acc[i] = Op::apply(first == acc ? first[i] : A(first[i] * scale), A(next[i] * next_scale));
    else
      acc[i] = Op::apply(first[i], next[i]);
  }
}

// Two ranks and tensors that fit in the caches: no accumulator block in between.
template <class Op, bool Scaled, class T>
void fold_pair(const T* a, const T* b, T* x, T* y, size_t n, T scale, T next_scale) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    T v;
    if constexpr (Scaled)
      v = Op::apply(T(a[i] * scale), T(b[i] * next_scale));
    else
      v = Op::apply(a[i], b[i]);
    x[i] = v;
    y[i] = v;
  }
}

template <class E, class Op, bool Scaled, bool Divided>
void fold_blocks(const Fold& f) {
  using S = typename E::S;
  using A = typename E::A;
  constexpr size_t block = kBlockBytes / sizeof(A);
  constexpr bool plain = sizeof(S) == sizeof(A);
  const auto scale_of = [&f](int r) { return A(f.scales != nullptr ? f.scales[r] : f.scale); };
  const A scale = scale_of(0);
  if constexpr (plain && !Divided) {
    if (f.nsrc == 2 && f.ndst <= 2 && !f.stream) {  // one target: it is stored twice, which costs nothing
      return fold_pair<Op, Scaled>(static_cast<const A*>(f.src[0]), static_cast<const A*>(f.src[1]),
                                   static_cast<A*>(f.dst[0]), static_cast<A*>(f.dst[f.ndst - 1]), f.count, scale,
                                   scale_of(1));
    }
  }
  alignas(64) A acc[block];
  alignas(64) A room[block];
  alignas(64) S packed[block];
  for (size_t at = 0; at < f.count; at += block) {
    const size_t n = f.count - at < block ? f.count - at : block;
    const A* first = E::widen(static_cast<const S*>(f.src[0]) + at, acc, n);
    if (f.nsrc == 1) {
      for (size_t i = 0; i < n; ++i) acc[i] = Scaled ? A(first[i] * scale) : first[i];
    } else {
      if (Scaled && first == acc) {  // widened in place: scale it here, fold_block scales only what it reads elsewhere
        for (size_t i = 0; i < n; ++i) acc[i] = A(acc[i] * scale);
      }
      fold_block<Op, Scaled>(acc, first, E::widen(static_cast<const S*>(f.src[1]) + at, room, n), n, scale,
                             scale_of(1));
      for (int r = 2; r < f.nsrc; ++r)
        fold_block<Op, Scaled>(acc, acc, E::widen(static_cast<const S*>(f.src[r]) + at, room, n), n, scale, scale_of(r));
    }
    if constexpr (Divided) {
      using D = std::conditional_t<is_float<A>::value, A, int64_t>;  // 200 ranks do not fit into an int8
      const D by = D(f.divisor);
      for (size_t i = 0; i < n; ++i) acc[i] = A(D(acc[i]) / by);
    }
    const S* result = E::narrow(acc, packed, n);
    for (int d = 0; d < f.ndst; ++d) {
      S* to = static_cast<S*>(f.dst[d]) + at;
      if (f.stream)
        stream_copy(to, result, n * sizeof(S));
      else
        memcpy(to, result, n * sizeof(S));
    }
  }
}

template <class E, class Op, bool Divided = false>
void fold(const Fold& f) {
  if constexpr (is_float<typename E::A>::value && (Divided || __is_same(Op, Sum))) {
    if (f.scale != 1.0 || f.scales != nullptr) return fold_blocks<E, Op, true, Divided>(f);
  }
  fold_blocks<E, Op, false, Divided>(f);
}

template <class E>
void fill_arithmetic(FoldKernel* row) {
  row[int(ReduceOp::sum)] = fold<E, Sum>;
  row[int(ReduceOp::avg)] = fold<E, Sum, true>;
  row[int(ReduceOp::prod)] = fold<E, Prod>;
  row[int(ReduceOp::min)] = fold<E, Min>;
  row[int(ReduceOp::max)] = fold<E, Max>;
}
template <class T>
void fill_integer(FoldKernel* row) {
  fill_arithmetic<Plain<T>>(row);
  row[int(ReduceOp::band)] = fold<Plain<T>, Band>;
  row[int(ReduceOp::bor)] = fold<Plain<T>, Bor>;
  row[int(ReduceOp::bxor)] = fold<Plain<T>, Bxor>;
}
// Truth values: sum and max are "any", prod and min are "all", as in torch's NCCL group. There is no average.
void fill_boolean(FoldKernel* row) {
  row[int(ReduceOp::sum)] = row[int(ReduceOp::max)] = row[int(ReduceOp::bor)] = fold<Plain<uint8_t>, Bor>;
  row[int(ReduceOp::prod)] = row[int(ReduceOp::min)] = row[int(ReduceOp::band)] = fold<Plain<uint8_t>, Band>;
  row[int(ReduceOp::bxor)] = fold<Plain<uint8_t>, Bxor>;
}

uint64_t digest_block(const unsigned char* bytes, size_t words, const uint64_t* weights) {
  uint64_t sum = 0;
  for (size_t i = 0; i < words; ++i) {
    uint64_t word;
    memcpy(&word, bytes + 8 * i, 8);
    sum += (word ^ (word >> 31)) * weights[i];
  }
  return sum;
}

// Blocks of f32 in 8 bits an element, as the OCP's Microscaling Formats (v1.0): a block of 32 shares the scale 2^(E - 127),
// with E in a byte. E is the smallest by which the block's largest magnitude fits the codes, and at least 1, so that no
// scale is subnormal. A scale that is a power of two multiplies exactly: what a block is worth is what it is worth again
// when that is encoded. A block that has a NaN, an infinity or a sum beyond what codes can be worth is NaN throughout
// (E = 255), and nothing of it is fed back.
constexpr size_t kCodeBlock = 32;
constexpr uint8_t kCodeNaN = 255;
constexpr uint32_t kInfinity = 0x7f800000u;

// Chosen by a mask: a branch would keep the compiler from using vectors.
inline uint32_t either(bool first, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - uint32_t(first);
  return (a & mask) | (b & ~mask);
}

struct Int8Code {  // -127 to 127
  static constexpr uint32_t exponent = 6, above = 0x1ffffu;  // a magnitude beyond 1.984375 carries into the next one
  static uint8_t encode(float y) { return uint8_t(to_bits(y + 0x1.8p23f)); }  // the adder rounds, to nearest even
  static float decode(uint8_t c) { return float(int8_t(c)); }
};
struct E4M3Code {  // of float8_e4m3fn, -448 to 448
  static constexpr uint32_t exponent = 8, above = 0x1fffffu;  // 448 is 1.75 * 2^8
  static uint8_t encode(float y) {
    const uint32_t u = to_bits(y), sign = (u >> 24) & 0x80u, a = u & 0x7fffffffu;
    const uint32_t normal = (a + 0x7ffffu + ((a >> 20) & 1u) - 0x3c000000u) >> 20;
    const uint32_t subnormal = to_bits(from_bits(a) + 0x1p14f) - 0x46800000u;  // one step, 2^-9, is the last bit
    return uint8_t(sign | either(a < 0x3c800000u, subnormal, normal));
  }
  static float decode(uint8_t c) {
    const uint32_t sign = uint32_t(c & 0x80u) << 24, body = c & 0x7fu;
    const uint32_t normal = (body << 20) + 0x3c000000u, subnormal = to_bits(float(int32_t(body)) * 0x1p-9f);
    return from_bits(sign | either(body < 8u, subnormal, normal));
  }
};

inline float code_scale(uint32_t exponent) { return from_bits(exponent << 23); }

template <class Code, bool FedBack>
void encode_block(const float* src, uint8_t* codes, uint8_t* scale, float* residual, float* back) {
  alignas(64) float x[kCodeBlock];
  uint32_t most = 0;
  for (size_t i = 0; i < kCodeBlock; ++i) {
    x[i] = FedBack ? src[i] + residual[i] : src[i];
    const uint32_t magnitude = to_bits(x[i]) & 0x7fffffffu;
    most = most < magnitude ? magnitude : most;
  }
  if (most + Code::above >= kInfinity) {
    *scale = kCodeNaN;
    for (size_t i = 0; i < kCodeBlock; ++i) {
      codes[i] = 0;
      back[i] = from_bits(0x7fc00000u);
      if (FedBack) residual[i] = 0.0f;
    }
    return;
  }
  const int32_t fits = int32_t((most + Code::above) >> 23) - int32_t(Code::exponent);
  const uint32_t e = uint32_t(fits < 1 ? 1 : fits);
  const float up = code_scale(254 - e), down = code_scale(e);
  *scale = uint8_t(e);
#pragma GCC ivdep
  for (size_t i = 0; i < kCodeBlock; ++i) {
    const uint8_t code = Code::encode(x[i] * up);
    const float worth = Code::decode(code) * down;
    codes[i] = code;
    back[i] = worth;
    if (FedBack) residual[i] = x[i] - worth;
  }
}

template <class Code, bool FedBack>
void encode_blocks(const BlockCode& b) {
  size_t at = 0;
  for (; at + kCodeBlock <= b.count; at += kCodeBlock)
    encode_block<Code, FedBack>(b.src + at, b.codes + at, b.scales + at / kCodeBlock, FedBack ? b.residual + at : nullptr,
                                b.back + at);
  if (const size_t n = b.count - at) {  // the last one is filled up with zeros
    float x[kCodeBlock] = {}, residual[kCodeBlock] = {}, back[kCodeBlock];
    uint8_t codes[kCodeBlock];
    memcpy(x, b.src + at, 4 * n);
    if (FedBack) memcpy(residual, b.residual + at, 4 * n);
    encode_block<Code, FedBack>(x, codes, b.scales + at / kCodeBlock, residual, back);
    memcpy(b.codes + at, codes, n);
    memcpy(b.back + at, back, 4 * n);
    if (FedBack) memcpy(b.residual + at, residual, 4 * n);
  }
}

template <class Code>
void encode(const BlockCode& b) {
  b.residual != nullptr ? encode_blocks<Code, true>(b) : encode_blocks<Code, false>(b);
}

template <class Code>
void decode(const uint8_t* codes, const uint8_t* scales, float* dst, size_t count) {
  for (size_t at = 0; at < count; at += kCodeBlock) {
    const uint8_t e = scales[at / kCodeBlock];
    const float down = from_bits(e == kCodeNaN ? 0x7fc00000u : uint32_t(e) << 23);
    const uint8_t* from = codes + at;
    float* to = dst + at;
    if (at + kCodeBlock <= count) {
#pragma GCC ivdep
      for (size_t i = 0; i < kCodeBlock; ++i) to[i] = Code::decode(from[i]) * down;
    } else {
      for (size_t i = 0; i < count - at; ++i) to[i] = Code::decode(from[i]) * down;
    }
  }
}

}  // namespace

KernelTable RINGSIDE_TABLE() {
  KernelTable t{};
  t.name = RINGSIDE_TABLE_NAME;
  fill_arithmetic<Plain<float>>(t.fold[int(DType::f32)]);
  fill_arithmetic<Plain<double>>(t.fold[int(DType::f64)]);
  fill_arithmetic<Half>(t.fold[int(DType::f16)]);
  fill_arithmetic<Brain>(t.fold[int(DType::bf16)]);
  fill_integer<int8_t>(t.fold[int(DType::i8)]);
  fill_integer<uint8_t>(t.fold[int(DType::u8)]);
  fill_integer<int16_t>(t.fold[int(DType::i16)]);
  fill_integer<int32_t>(t.fold[int(DType::i32)]);
  fill_integer<int64_t>(t.fold[int(DType::i64)]);
  fill_boolean(t.fold[int(DType::boolean)]);
  t.widen_f16 = widen_f16;
  t.widen_bf16 = widen_bf16;
  t.narrow_f16 = narrow_f16;
  t.narrow_bf16 = narrow_bf16;
  t.encode_int8 = encode<Int8Code>;
  t.encode_e4m3 = encode<E4M3Code>;
  t.decode_int8 = decode<Int8Code>;
  t.decode_e4m3 = decode<E4M3Code>;
  t.stream_copy = stream_copy;
  t.stream_pair = stream_pair;
  t.digest_block = digest_block;
  return t;
}

}  // namespace ringside
