// The layout of the memory that all ranks of a communicator share.
//
//   Header | RankBlock[ranks] | stage[ranks]
//
// Every field has one writer (the rank whose block it is in); all ranks write only the gates and the word that tells how a
// collective ended that somebody gave up.
#pragma once
#include "core.hpp"
#include "mapping.hpp"
#include "waiting.hpp"

namespace ringside {

constexpr uint64_t kArenaMagic = 0x52494e4753494445ull;  // "RINGSIDE"
constexpr uint32_t kArenaVersion = 5;
constexpr size_t kInlineBytes = 64 * 1024;  // payload that travels next to the arrival flag (one-shot)
constexpr int kStageBuffers = 3;            // segments of the private-buffer path in flight

// Where a rank's tensor lies. Peers may read and write it only if it is `mapped`.
enum class Place : uint8_t { hidden, mapped, fresh };

// What a rank has called: all ranks of a collective must agree on what comes before the caller's own tensor, except that
// each may have its own scale where `own_scale` says so. The hash covers the shape and whatever else must be the same.
struct Call {
  Kind kind;
  DType dtype;
  ReduceOp op;
  Algorithm algorithm;
  uint32_t shape_hash;
  uint64_t count;  // elements
  double scale;
  // The caller's own tensor; ranks may differ.
  uint64_t offset;  // bytes into its region
  uint32_t region;
  Place place;
  uint8_t dims_known;
  uint8_t own_scale;
  uint8_t root;  // for error messages
};
static_assert(sizeof(Call) == 40, "a call fits into the arrival line");

// A rank's arrival at a collective. Two are used in turn: a rank can be at most one collective ahead of its peers.
struct alignas(64) Arrival {
  std::atomic<uint64_t> seq;
  uint64_t stamp_ns;  // when this rank was ready, which may be before it arrived here
  Call call;
  int64_t dims[kMaxDims];  // for error messages; valid up to dims_known
  alignas(64) unsigned char payload[kInlineBytes];
};

enum class Life : uint32_t { joined, closed, failed, late };  // late: failed because others did not arrive in time

struct alignas(64) RankBlock {
  Arrival arrival[2];
  Flag done;      // collectives finished
  Flag staged;    // segments copied in, reduced, copied out: private-buffer path
  Flag reduced;
  Flag copied;
  Flag fetched;   // rounds of a program whose messages were taken, stored
  Flag stored;
  alignas(64) std::atomic<uint32_t> life;
  std::atomic<int32_t> cpu;         // where it was last seen; in a line that others need only when they wait
  uint64_t blamed[kMaxRanks / 64];  // whom a rank that failed or is late names, as bits; none: itself
};

// What ranks agree upon when somebody gives a collective up (docs/design/0030-all-or-none.md): it fails on all of them, or
// on none. As one word, so that a single compare-and-swap decides; 0: nobody gives up, or everybody had come after all.
struct Ending {
  enum Fate : uint64_t { none, leaving, failed };

  Fate fate;
  Life why;      // of `rank`, the one that has written this
  int rank;
  uint64_t seq;  // of the collective

  explicit Ending(uint64_t word)
      : fate(Fate(word & 3)), why(Life(word >> 2 & 3)), rank(int(word >> 8 & 255)), seq(word >> 16) {}
  static uint64_t word(Fate fate, Life why, int rank, uint64_t seq) {
    return uint64_t(fate) | uint64_t(why) << 2 | uint64_t(rank) << 8 | seq << 16;
  }
};
static_assert(kMaxRanks <= 256, "a rank fits into its byte");

struct alignas(kPage) Header {
  uint64_t magic;
  uint32_t version;
  uint32_t ranks;
  uint64_t stage_bytes;  // per rank
  alignas(64) std::atomic<uint64_t> ending;
  Gate entry;
  Gate exit;
  Gate staged;
  Gate reduced;
  Gate copied;
  Gate fetched;
  Gate stored;
};

inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

struct ArenaView {
  unsigned char* base = nullptr;
  int ranks = 0;           // kept here: what lies in shared memory is not asked where something is
  size_t stage_bytes = 0;

  static size_t blocks_bytes(int ranks) { return round_up(sizeof(Header) + sizeof(RankBlock) * size_t(ranks), kPage); }
  static size_t bytes(int ranks, size_t stage_bytes) { return blocks_bytes(ranks) + stage_bytes * size_t(ranks); }

  Header& header() const { return *reinterpret_cast<Header*>(base); }
  RankBlock& block(int rank) const { return reinterpret_cast<RankBlock*>(base + sizeof(Header))[rank]; }
  unsigned char* stage(int rank) const {
    return base + blocks_bytes(ranks) + stage_bytes * size_t(rank);
  }

  // A rank takes the pages of its own block and stage, so that they lie in the memory that is nearest to it: what it writes
  // first. (One page at either end may be its neighbour's.)
  void touch(const Mapping& map, int rank) const {
    map.prefault(size_t(reinterpret_cast<unsigned char*>(&block(rank)) - base), sizeof(RankBlock));
    map.prefault(size_t(stage(rank) - base), stage_bytes);
  }
};

}  // namespace ringside
