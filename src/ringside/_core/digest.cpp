// Bound by memory, not by arithmetic: one multiplication per word, without a chain between words.
#include "digest.hpp"

#include <array>
#include <cstring>

#include "kernels.hpp"

namespace ringside {

namespace {

using Weights = std::array<uint64_t, kDigestBlock>;

// Odd numbers of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
Weights make_weights() {
  Weights weights;
  uint64_t state = 0;
  for (uint64_t& weight : weights) {
    uint64_t z = (state += 0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    weight = (z ^ (z >> 31)) | 1;
  }
  return weights;
}

}  // namespace

uint64_t digest(const void* data, size_t bytes, uint64_t start) {
  static const Weights weights = make_weights();
  const DigestKernel block_sum = kernels().digest_block;
  auto at = static_cast<const unsigned char*>(data);
  uint64_t value = start;
  while (bytes > 0) {
    const size_t words = bytes / 8 < kDigestBlock ? bytes / 8 : kDigestBlock;
    uint64_t sum = block_sum(at, words, weights.data());
    at += 8 * words;
    bytes -= 8 * words;
    if (words < kDigestBlock && bytes > 0) {
      uint64_t last = 0;
      memcpy(&last, at, bytes);
      sum += (last ^ (last >> 31)) * weights[words];
      bytes = 0;
    }
    value = value * kDigestBase + sum;
  }
  return value;
}

}  // namespace ringside
