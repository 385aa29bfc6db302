// The four ways to carry out an all-reduce without a program: alone, one-shot, push, staged. A reduce goes the same ways,
// except that only the root's tensor is written.
#include <algorithm>
#include <cstring>

#include "communicator.hpp"

namespace ringside {

namespace {

constexpr size_t kSweepBytes = 128 * 1024;
constexpr size_t kStreamBytes = 1 << 20;  // before a rank looks whether the others have given up

}  // namespace

Status Communicator::finish(Status status) {
  me().done.value.store(seq_, std::memory_order_release);
  return status;
}

void Communicator::begin_alone(const Request& r) {
  ++seq_;
  kind_ = r.kind;
  entered_ = ready_ = now_ns();
  submitted_ = r.stamp_ns != 0 ? r.stamp_ns : entered_;
  me().arrival[seq_ & 1].stamp_ns = submitted_;
}

Status Communicator::local(const Request& r) {
  begin_alone(r);
  if (r.own_scale && r.op == ReduceOp::avg) {
    failure_ = Failure{Status::no_weight, {}, {}, seq_, 0};
    if (!(r.scale > 0)) return Status::no_weight;
  } else if (r.scale != 1.0) {
    const void* src = r.data;
    void* dst = r.data;
    fold(&src, 1, &dst, 1, r.count, false, r.scale, ReduceOp::sum, r.dtype);
  }
  note(Path::local);
  return finish(Status::ok);
}

Status Communicator::one_shot(const Request& r) {
  // Larger payloads go in pieces; each piece is a meeting of its own.
  const size_t item = size_of(r.dtype), room = kInlineBytes / item;
  size_t at = 0;
  do {
    const size_t n = std::min(room, r.count - at);
    unsigned char* data = r.data + at * item;
    Status s = meet(r.kind, r, describe(r, Algorithm::one_shot), data, n * item, Turn::last);
    if (s == Status::ok) s = weigh(r);
    if (s != Status::ok) return s;
    fold_payloads(r, data, n);
    at += n;
  } while (at < r.count);
  note(Path::one_shot);
  return finish(Status::ok);
}

void Communicator::fold_payloads(const Request& r, void* to, size_t n) const {
  const void* src[kMaxRanks];
  for (int q = 0; q < ranks_; ++q) src[q] = arrival(q).payload;
  if (n != 0 && (r.root < 0 || r.root == rank_)) fold_all(src, &to, 1, n, false, r);
}

Status Communicator::take_one_shot(const Request& r) {
  fold_payloads(r, r.data, r.count);
  note(Path::one_shot);
  return finish(Status::ok);
}

// Slice k of `count` elements, cut at cache lines so that no two owners write to the same one.
static void slice_of(size_t count, size_t item, int ranks, int k, size_t* from, size_t* n) {
  const size_t per = round_up((count + size_t(ranks) - 1) / size_t(ranks) * item, 64) / item;
  *from = std::min(count, per * size_t(k));
  *n = std::min(count - *from, per);
}

Status Communicator::push(const Request& r) {
  const size_t item = size_of(r.dtype);
  size_t from, n;
  slice_of(r.count, item, ranks_, rank_, &from, &n);
  if (n != 0) {
    void* at[kMaxRanks];
    for (int q = 0; q < ranks_; ++q) at[q] = tensors_[q] + from * item;
    if (!fold_in_blocks(r, at, n, bytes_ * size_t(ranks_) >= settings_.stream_bytes)) return failure_.status;
  }
  return exit(Path::push);
}

// The last synchronisation where nothing else says that everybody has finished.
Status Communicator::exit(Path path) {
  signal(me().done, seq_, view_.header().exit, &RankBlock::done);
  if (!wait_all(&RankBlock::done, seq_, view_.header().exit, Turn::last)) return failure_.status;
  note(path);
  return Status::ok;
}

// Fold the own slice block by block, from its start in one collective and from its end in the next: of a slice that is
// as large as a cache, what was touched last is still in it, and a sweep in the same direction would evict all of it.
// (Where results bypass the caches, it always begins at the start.) False: it failed, because the others have given up.
bool Communicator::fold_in_blocks(const Request& r, void* const* slice, size_t n, bool stream) {
  const size_t item = size_of(r.dtype), block = (stream ? kStreamBytes : kSweepBytes) / item;
  const size_t blocks = (n + block - 1) / block;
  for (size_t i = 0; i < blocks; ++i) {
    if (given_up()) return fail_as_others([](int) { return true; }, entered_);
    MAY_STOP_HERE();
    const size_t from = block * (stream || seq_ % 2 == 0 ? i : blocks - 1 - i);
    void* at[kMaxRanks];
    for (int q = 0; q < ranks_; ++q) at[q] = static_cast<unsigned char*>(slice[q]) + from * item;
    fold_all(at, r.root < 0 ? at : at + r.root, r.root < 0 ? ranks_ : 1, std::min(block, n - from), stream, r);
  }
  return true;
}

// The private-buffer path. Per segment: copy everybody else's slices in, reduce the own slice, copy the others' out;
// the copying in of the next segment overlaps the waiting for this one. 5N−2 bytes move per payload byte.
Status Communicator::staged(const Request& r) {
  const size_t item = size_of(r.dtype);
  const size_t per = std::min(settings_.segment_bytes, stride()) / item;
  const size_t total = (r.count + per - 1) / per;
  const uint64_t base = segments_;
  segments_ += total;
  Header& h = view_.header();

  const auto length = [&](size_t s) { return std::min(per, r.count - s * per); };
  const auto stage = [&](int rank, size_t s) {
    return view_.stage(rank) + size_t((base + s) % kStageBuffers) * stride();
  };
  const auto copy_in = [&](size_t s) {
    if (s >= kStageBuffers && !wait_all(&RankBlock::copied, base + s - kStageBuffers + 1, h.copied)) return false;
    size_t from, n;
    slice_of(length(s), item, ranks_, rank_, &from, &n);
    const unsigned char* x = r.data + s * per * item;
    unsigned char* to = stage(rank_, s);
    memcpy(to, x, from * item);
    const size_t rest = from + n;
    memcpy(to + rest * item, x + rest * item, (length(s) - rest) * item);
    signal(me().staged, base + s + 1, h.staged, &RankBlock::staged);
    return true;
  };
  const auto reduce = [&](size_t s) {
    if (!wait_all(&RankBlock::staged, base + s + 1, h.staged)) return false;
    size_t from, n;
    slice_of(length(s), item, ranks_, rank_, &from, &n);
    if (n != 0) {
      const void* src[kMaxRanks];
      unsigned char* own = r.data + (s * per + from) * item;
      for (int q = 0; q < ranks_; ++q) src[q] = q == rank_ ? own : stage(q, s) + from * item;
      void* dst[2] = {own, stage(rank_, s) + from * item};
      const bool writes = r.root < 0 || r.root == rank_, hands_on = r.root != rank_;
      fold_all(src, writes ? dst : dst + 1, int(writes) + int(hands_on), n, false, r);
    }
    signal(me().reduced, base + s + 1, h.reduced, &RankBlock::reduced);
    return true;
  };
  const auto copy_out = [&](size_t s) {
    const Turn turn = s + 1 == total ? Turn::last : Turn::middle;
    if (!wait_all(&RankBlock::reduced, base + s + 1, h.reduced, turn)) return false;
    for (int q = 0; q < ranks_; ++q) {
      if (q == rank_ || (r.root >= 0 && r.root != rank_)) continue;
      size_t from, n;
      slice_of(length(s), item, ranks_, q, &from, &n);
      memcpy(r.data + (s * per + from) * item, stage(q, s) + from * item, n * item);
    }
    signal(me().copied, base + s + 1, h.copied, &RankBlock::copied);
    return true;
  };

  if (total == 0) return exit(Path::staged);
  bool fine = copy_in(0);
  for (size_t s = 0; fine && s < total; ++s) {
    fine = (s + 1 == total || copy_in(s + 1)) && reduce(s) && (s == 0 || copy_out(s - 1));
  }
  fine = fine && copy_out(total - 1);
  if (!fine) return failure_.status;
  note(Path::staged);
  return finish(Status::ok);
}

void Communicator::fold(const void* const* src, int nsrc, void* const* dst, int ndst, size_t count,
                        bool stream, double scale, ReduceOp op, DType dtype) const {
  const Fold f{src, nsrc, dst, ndst, count, scale, divisor_, stream};
  kernels().fold[int(dtype)][int(op)](f);
#if defined(__x86_64__)
  if (stream) __builtin_ia32_sfence();
#endif
}

// Every rank's contribution, each with its own scale where they may differ.
void Communicator::fold_all(const void* const* src, void* const* dst, int ndst, size_t count, bool stream,
                            const Request& r) const {
  const Fold f{src, ranks_, dst, ndst, count, r.scale, divisor_, stream, r.own_scale ? scales_ : nullptr};
  kernels().fold[int(r.dtype)][int(r.op)](f);
#if defined(__x86_64__)
  if (stream) __builtin_ia32_sfence();
#endif
}

}  // namespace ringside
