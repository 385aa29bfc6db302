// A digest of bytes as they lie in memory: equal bytes give equal digests, and nothing is converted or rounded.
//
// The bytes are words of 64 bits (the last one filled up with zeros) in blocks of 1,024. A word is xored
// with itself shifted by 31 bits, so that a change of its highest bits moves lower ones too (2 · 2^63 is nothing; shifted
// by 32, the signs of two floats in one word would cancel), and multiplied by an odd weight of its place. The sum of a
// block extends a polynomial over the blocks. One changed word always changes the digest. Made for accidents, not for
// adversaries.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ringside {

constexpr size_t kDigestBlock = 1024;
constexpr uint64_t kDigestBase = 0xD6E8FEB86659FD93;

uint64_t digest(const void* data, size_t bytes, uint64_t start);

}  // namespace ringside
