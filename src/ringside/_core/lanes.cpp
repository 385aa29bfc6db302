// Collectives in which every rank has a lane, a part of the tensor: reduce-scatter, all-gather and their relatives.
//
// There are three patterns, and `take` is what all of them come down to:
//
//   fold     a rank reduces its own lane of everybody's tensor    reduce_scatter, in place or not
//   spread   a rank copies everybody's lane                       all_gather, in place or not; broadcast, gather
//   deal     a rank copies its own lane of everybody's tensor     all_to_all, scatter
//
// A reduce-scatter in place of which one lane is all (reduce to one rank) goes the ways of all-reduce (paths.cpp), where
// every rank does a part of the work.
#include <algorithm>
#include <cstring>

#include "communicator.hpp"

namespace ringside {

namespace {

enum class Pattern { fold, spread, deal };

Pattern pattern_of(Kind kind) {
  switch (kind) {
    case Kind::all_gather_in_place:
    case Kind::split:
    case Kind::all_gather:
    case Kind::broadcast:
    case Kind::gather: return Pattern::spread;
    case Kind::scatter:
    case Kind::all_to_all: return Pattern::deal;
    default: return Pattern::fold;
  }
}

// The caller's tensor holds its own lane and nothing else.
bool is_lane_alone(Kind kind) { return kind == Kind::all_gather || kind == Kind::gather; }

size_t clipped(size_t length, size_t at, size_t most) { return at < length ? std::min(length - at, most) : 0; }

}  // namespace

// Tell whether anybody needs what `rank` has.
bool Communicator::gives(const Request& r, int rank) const {
  if (r.bounds == nullptr) return true;
  switch (pattern_of(r.kind)) {
    case Pattern::spread: return lane(rank) != 0;
    case Pattern::deal: return r.root < 0 || rank == r.root;
    default: return true;
  }
}

// How many bytes of `rank`'s tensor there are at the address it gave.
size_t Communicator::extent(const Request& r, int rank) const {
  return (r.bounds != nullptr && is_lane_alone(r.kind) ? lane(rank) : gives(r, rank) ? r.count : 0) * size_of(r.dtype);
}

// Nobody reads the next arrival slot any more; the bounds lie in it so that others can name them.
void Communicator::set_bounds(const int64_t* bounds) {
  bounds_.assign(bounds, bounds + ranks_ + 1);
  memcpy(next_arrival().payload, bounds, bounds_.size() * sizeof(int64_t));
}

bool Communicator::are_inline(size_t bytes) const {
  return bytes <= std::min(settings_.one_shot_bytes, kInlineBytes - header_bytes());
}

Status Communicator::lanes(const Request& r) {
  std::lock_guard<std::mutex> lock(busy_);
  if (!usable()) return broken_ ? failure_.status : Status::closed;
  set_bounds(r.bounds);
  bytes_ = r.count * size_of(r.dtype);
  divisor_ = double(ranks_);
  patience_ = r.background ? settings_.background : settings_.patience;
  if (ranks_ == 1) return lanes_alone(r);
  if (are_inline(bytes_)) return lanes_inline(r);
  Request whole = r;
  for (int q = 0; r.kind == Kind::reduce_scatter_in_place && q < ranks_; ++q) {
    if (lane(q) == 0 || lane(q) != size_t(bounds_.back() - bounds_.front())) continue;
    whole.root = q;
    whole.count = lane(q);
    whole.data += size_t(bounds_[size_t(q)]) * size_of(r.dtype);
    whole.offset += size_t(bounds_[size_t(q)]) * size_of(r.dtype);
  }
  return start(whole);
}

// Take elements [at, at + most) of the lanes this rank is given; `source(q)` is where those of rank q lie.
template <class Source>
void Communicator::take(const Request& r, size_t at, size_t most, const Source& source) const {
  const size_t item = size_of(r.dtype), own = size_t(bounds_[size_t(rank_)]);
  const auto begin = [&](int q) { return size_t(bounds_[size_t(q)]); };
  const Pattern pattern = pattern_of(r.kind);
  if (pattern == Pattern::fold) {
    const size_t n = clipped(lane(rank_), at, most);
    if (n == 0) return;
    const void* src[kMaxRanks];
    for (int q = 0; q < ranks_; ++q) src[q] = q == rank_ ? r.data + (own + at) * item : source(q);
    void* dst = r.out != nullptr ? r.out + at * item : r.data + (own + at) * item;
    fold_all(src, &dst, 1, n, bytes_ * size_t(ranks_) >= settings_.stream_bytes, r);
    return;
  }
  if (r.kind == Kind::gather && rank_ != r.root) return;
  const bool stream = bytes_ * size_t(ranks_) >= settings_.stream_bytes;
  for (int q = 0; q < ranks_; ++q) {
    const size_t n = gives(r, q) ? clipped(lane(pattern == Pattern::deal ? rank_ : q), at, most) : 0;
    if (n == 0 || (q == rank_ && r.out == nullptr)) continue;
    const unsigned char* mine = r.data + (pattern == Pattern::deal ? own + at : at) * item;  // of a lane alone, or dealt
    unsigned char* to = (r.out != nullptr ? r.out : r.data) + ((r.kind == Kind::scatter ? 0 : begin(q)) + at) * item;
    if (stream)
      kernels().stream_copy(to, q == rank_ ? mine : source(q), n * item);
    else
      memcpy(to, q == rank_ ? mine : source(q), n * item);
  }
#if defined(__x86_64__)
  if (stream) __builtin_ia32_sfence();
#endif
}

Status Communicator::lanes_alone(const Request& r) {
  begin_alone(r);
  if (pattern_of(r.kind) == Pattern::fold && r.own_scale && r.op == ReduceOp::avg) {
    failure_ = Failure{Status::no_weight, {}, {}, seq_, 0};
    if (!(r.scale > 0)) return Status::no_weight;
  }
  scales_[0] = divisor_ = 1.0;
  if (r.op != ReduceOp::avg) scales_[0] = r.scale;
  take(r, 0, r.count, [](int) -> const unsigned char* { return nullptr; });
  note(Path::local);
  return finish(Status::ok);
}

// Small: what others need of this rank's tensor travels next to the flag, after the bounds.
Status Communicator::lanes_inline(const Request& r) {
  place_inline(r);
  Status s = meet(r.kind, r, describe(r, Algorithm::one_shot), nullptr, 0, Turn::last);
  if (s == Status::ok) s = weigh(r);
  return s == Status::ok ? take_inline(r) : s;
}

void Communicator::place_inline(const Request& r) {
  if (!gives(r, rank_)) return;
  const size_t item = size_of(r.dtype), own = is_lane_alone(r.kind) ? 0 : size_t(bounds_[size_t(rank_)]);
  unsigned char* to = next_arrival().payload + header_bytes();
  if (pattern_of(r.kind) == Pattern::spread)
    memcpy(to, r.data + own * item, lane(rank_) * item);
  else
    memcpy(to, r.data, r.count * item);
}

Status Communicator::take_inline(const Request& r) {
  const size_t own = pattern_of(r.kind) == Pattern::spread ? 0 : size_t(bounds_[size_t(rank_)]) * size_of(r.dtype);
  const size_t from = header_bytes() + own;
  take(r, 0, r.count, [&](int q) -> const unsigned char* { return arrival(q).payload + from; });
  note(Path::one_shot);
  return finish(Status::ok);
}

// Whoever gives is mapped: every rank takes straight out of the others' memory, and nobody leaves before all have.
Status Communicator::lanes_mapped(const Request& r) {
  const size_t item = size_of(r.dtype);
  const auto from = [&](int q) -> const unsigned char* {
    const int which = pattern_of(r.kind) == Pattern::spread ? q : rank_;
    return tensors_[q] + (is_lane_alone(r.kind) ? 0 : size_t(bounds_[size_t(which)]) * item);
  };
  take(r, 0, r.count, from);
  return exit(Path::push);
}

// Some giver is private: through the arena, a piece of every lane at a time.
Status Communicator::lanes_staged(const Request& r) {
  const size_t item = size_of(r.dtype), room = std::min(settings_.segment_bytes, stride());
  const bool spread = pattern_of(r.kind) == Pattern::spread;
  size_t longest = 0, used = 0;
  std::vector<size_t> slot(size_t(ranks_), 0);  // of each lane within a segment, in steps
  for (int q = 0; q < ranks_; ++q) {
    longest = std::max(longest, lane(q));
    slot[size_t(q)] = used;
    used += lane(q) != 0 && !spread;
  }
  const size_t share = room / std::max<size_t>(used, 1);
  const size_t step = std::max<size_t>(share >= 64 ? share / 64 * 64 / item : share / item, 1);
  const size_t segments = (longest + step - 1) / step;

  const auto fill = [&](size_t s, unsigned char* to) {
    if (!gives(r, rank_)) return;
    for (int j = 0; j < ranks_; ++j) {
      if (spread ? j != rank_ : j == rank_) continue;
      const size_t from = is_lane_alone(r.kind) ? 0 : size_t(bounds_[size_t(j)]), n = clipped(lane(j), s * step, step);
      memcpy(to + slot[size_t(j)] * step * item, r.data + (from + s * step) * item, n * item);
    }
  };
  const auto use = [&](size_t s, const auto& stage) {
    take(r, s * step, step, [&](int q) -> const unsigned char* {
      return stage(q) + (spread ? 0 : slot[size_t(rank_)] * step * item);
    });
  };
  if (segments == 0) return exit(Path::staged);
  if (!relay(segments, fill, use)) return failure_.status;
  note(Path::staged);
  return finish(Status::ok);
}

// Per segment every rank fills its part of the arena and, when all have, uses everybody's; filling the next segment
// overlaps the waiting for this one.
template <class Fill, class Use>
bool Communicator::relay(size_t segments, const Fill& fill, const Use& use) {
  const uint64_t base = segments_;
  segments_ += segments;
  Header& h = view_.header();
  const auto begin = [&](size_t s) {
    if (s >= kStageBuffers && !wait_all(&RankBlock::copied, base + s - kStageBuffers + 1, h.copied)) return false;
    fill(s, view_.stage(rank_) + size_t((base + s) % kStageBuffers) * stride());
    signal(me().staged, base + s + 1, h.staged, &RankBlock::staged);
    return true;
  };
  bool fine = begin(0);
  for (size_t s = 0; fine && s < segments; ++s) {
    const Turn turn = s + 1 == segments ? Turn::last : Turn::middle;
    fine = (s + 1 == segments || begin(s + 1)) && wait_all(&RankBlock::staged, base + s + 1, h.staged, turn);
    if (!fine) break;
    use(s, [&](int q) { return view_.stage(q) + size_t((base + s) % kStageBuffers) * stride(); });
    signal(me().copied, base + s + 1, h.copied, &RankBlock::copied);
  }
  return fine;
}

}  // namespace ringside
