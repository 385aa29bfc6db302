#include "communicator.hpp"

#include <algorithm>
#include <cstring>
#include <poll.h>
#include <pthread.h>

namespace ringside {
namespace {

constexpr int64_t kNapNs = 10 * 1000000;  // how long a sleeper goes without looking for dead peers
constexpr size_t kLogRows = 4096;
constexpr size_t kSweepBytes = 128 * 1024;

uint32_t hash_shape(const int64_t* dims, int n) {
  uint64_t h = 0xcbf29ce484222325ull ^ uint64_t(n);
  for (int i = 0; i < n; ++i) h = (h ^ uint64_t(dims[i])) * 0x100000001b3ull, h ^= h >> 29;
  return uint32_t(h ^ (h >> 32));
}

// How often this process is a fork of another: a child must neither use nor close what its parent has open.
unsigned forks() {
  static std::atomic<unsigned> count{0};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++count; });
  (void)registered;
  return count.load(std::memory_order_relaxed);
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Mapping> arena, int rank, int ranks, std::vector<int> pidfds, Settings s)
    : arena_(std::move(arena)), rank_(rank), ranks_(ranks), pidfds_(std::move(pidfds)), settings_(s), forks_(forks()),
      regions_(size_t(ranks)) {
  view_.base = arena_->base();
  patience_ = settings_.patience;
}

Communicator::~Communicator() {
  close();
  for (int fd : pidfds_)
    if (fd >= 0) ::close(fd);
}

// ---------------------------------------------------------------------------------------------- waiting

template <class Has>
bool Communicator::wait(Gate& gate, const Has& has) {
  int at = 0;  // flags only grow: a rank that was seen need not be looked at again
  const auto ready = [&] {
    while (at < ranks_ && has(at)) ++at;
    return at == ranks_;
  };
  if (ready()) return true;
  for (int i = 0; i < patience_.spins; ++i) {
    pause_cpu();
    if (ready()) return true;
  }
  for (int i = 0; i < patience_.yields; ++i) {
    sched_yield();
    if (ready()) return true;
  }
  const uint64_t since = now_ns();
  for (;;) {
    gate.sleep(ready, kNapNs);
    if (ready()) return true;
    if (!look_around(has, since)) return false;
  }
}

// Nothing moved for a while: is somebody gone, is it too late, was Ctrl-C pressed? False ends the wait.
bool Communicator::look_around(const std::function<bool(int)>& has, uint64_t since) {
  std::vector<pollfd> polls;
  for (int fd : pidfds_) polls.push_back({fd, POLLIN, 0});
  poll(polls.data(), polls.size(), 0);
  if (leaving_.load(std::memory_order_relaxed)) return fail(Status::closed, {}, {}, since);
  // Whoever finished a collective has seen all that others need for it. So if somebody has left, and after that something
  // is missing still, it left in the middle: nobody can finish, even if the missing rank comes.
  std::vector<int> missing;
  std::vector<bool> named(size_t(ranks_), false);
  bool left = false, only_late = true;
  for (int r = 0; r < ranks_; ++r) {
    if (r == rank_) continue;
    const RankBlock& block = view_.block(r);
    const Life life = Life(block.life.load(std::memory_order_acquire));
    const bool dead = (polls[size_t(r)].revents & POLLIN) != 0;
    if (life == Life::failed || life == Life::late) {  // it knows why; that it may have ended since is a consequence
      bool itself = true;
      for (int q = 0; q < ranks_; ++q) {
        if ((block.blamed[q / 64] >> (q % 64) & 1) == 0) continue;
        named[size_t(q)] = true;
        itself = false;
      }
      if (itself) named[size_t(r)] = true;
    } else if (dead || life == Life::closed) {
      named[size_t(r)] = true;
    }
    only_late = only_late && (life == Life::late || (life == Life::joined && !dead));
    left = left || dead || life != Life::joined;
  }
  for (int r = 0; r < ranks_; ++r)
    if (r != rank_ && !has(r)) missing.push_back(r);
  if (missing.empty()) return true;
  if (left) {
    std::vector<int> ranks;
    for (int r = 0; r < ranks_; ++r)
      if (named[size_t(r)]) ranks.push_back(r);
    return fail(only_late ? Status::deadline : Status::peer_lost, ranks, missing, since);
  }
  if (now_ns() - since > settings_.timeout_ns) return fail(Status::deadline, slowest(missing), missing, since);
  if (interrupted && interrupted()) return fail(Status::interrupted, {}, missing, since);
  return true;
}

// In a program a missing rank may itself be waiting for another. Whoever waits needs more than the awaited rank has
// done, so the ranks that have done least wait for nobody: it is they who are late.
std::vector<int> Communicator::slowest(const std::vector<int>& missing) const {
  if (!in_program_) return missing;
  std::vector<int> ranks;
  uint64_t least = ~uint64_t(0);
  for (int r = 0; r < ranks_; ++r) {
    const RankBlock& block = view_.block(r);
    const uint64_t done = block.stored.value.load(std::memory_order_acquire) + block.fetched.value.load(std::memory_order_acquire);
    if (r == rank_ || done > least) continue;
    if (done < least) ranks.clear();
    least = done;
    ranks.push_back(r);
  }
  return ranks;
}

bool Communicator::fail(Status status, std::vector<int> ranks, std::vector<int> missing, uint64_t since) {
  failure_ = Failure{status, std::move(ranks), std::move(missing), seq_, now_ns() - since};
  broken_ = true;
  for (int r : failure_.ranks) me().blamed[r / 64] |= uint64_t(1) << (r % 64);
  end(status == Status::deadline ? Life::late : status == Status::closed ? Life::closed : Life::failed);
  return false;
}

// Tell the peers that this rank takes no further part; the first word counts.
void Communicator::end(Life life) {
  if (me().life.load(std::memory_order_relaxed) != uint32_t(Life::joined)) return;
  me().life.store(uint32_t(life), std::memory_order_release);
  Header& h = view_.header();
  for (Gate* g : {&h.entry, &h.exit, &h.staged, &h.reduced, &h.copied, &h.fetched, &h.stored}) g->open();
}

void Communicator::give_up(Status status, std::vector<int> ranks) {
  std::lock_guard<std::mutex> lock(busy_);
  if (!broken_) fail(status, std::move(ranks), {}, now_ns());
}

void Communicator::close() {
  if (forks_ != forks()) return;
  leaving_ = true;
  end(Life::closed);
  if (!busy_.try_lock()) return;  // another thread waits: it has been woken and ends by itself
  if (!broken_) {
    failure_ = Failure{};
    failure_.status = Status::closed;
    broken_ = true;
  }
  busy_.unlock();
}

bool Communicator::usable() const { return !broken_ && forks_ == forks(); }

// Raise this rank's flag; wake sleepers if that raised the minimum over all ranks.
void Communicator::signal(Flag& flag, uint64_t value, Gate& gate, Flag RankBlock::*which) {
  flag.value.store(value, std::memory_order_release);
  if (!gate.anyone_sleeps()) return;
  for (int r = 0; r < ranks_; ++r)
    if ((view_.block(r).*which).value.load(std::memory_order_acquire) < value) return;
  gate.open();
}

// The same where ranks wait for single peers: every move wakes the sleepers.
void Communicator::publish(Flag& flag, uint64_t value, Gate& gate) {
  flag.value.store(value, std::memory_order_release);
  if (gate.anyone_sleeps()) gate.open();
}

bool Communicator::wait_all(Flag RankBlock::*which, uint64_t value, Gate& gate) {
  return wait(gate, [&](int r) { return (view_.block(r).*which).value.load(std::memory_order_acquire) >= value; });
}

bool Communicator::wait_for(int rank, Flag RankBlock::*which, uint64_t value, Gate& gate) {
  return wait(gate, [&](int r) {
    return r != rank || (view_.block(r).*which).value.load(std::memory_order_acquire) >= value;
  });
}

// ---------------------------------------------------------------------------------------------- entry

// Tell everybody what this rank called, wait until all have told, and check that it is the same.
Status Communicator::meet(Kind kind, const Request& request, const Call& call, const void* payload, size_t bytes) {
  if (!usable()) return broken_ ? failure_.status : Status::closed;
  ++seq_;
  kind_ = kind;
  Arrival& mine = arrival(rank_);
  if (bytes != 0) memcpy(mine.payload, payload, bytes);
  mine.call = call;
  const int dims = std::min(request.ndims, kMaxDims);
  for (int i = 0; i < dims; ++i) mine.dims[i] = request.dims[i];
  mine.call.dims_known = uint8_t(dims);
  entered_ = now_ns();
  submitted_ = request.stamp_ns != 0 ? request.stamp_ns : entered_;
  mine.stamp_ns = submitted_;
  mine.seq.store(seq_, std::memory_order_release);
  const auto has = [&](int r) { return arrival(r).seq.load(std::memory_order_acquire) >= seq_; };
  Gate& gate = view_.header().entry;
  if (gate.anyone_sleeps()) {
    int r = 0;
    while (r < ranks_ && has(r)) ++r;
    if (r == ranks_) gate.open();
  }
  if (!wait(gate, has)) return failure_.status;
  ready_ = now_ns();
  return check_calls();
}

Status Communicator::check_calls() {
  // The fields that must agree come first in Call.
  constexpr size_t agreed = offsetof(Call, offset);
  bool same = true;
  for (int r = 0; r < ranks_; ++r) same = same && memcmp(&arrival(r).call, &arrival(rank_).call, agreed) == 0;
  if (same) return Status::ok;
  // The odd ones out are those who differ from the most common call; if there is no majority, everybody is.
  std::vector<int> votes(size_t(ranks_), 0);
  for (int r = 0; r < ranks_; ++r)
    for (int q = 0; q < ranks_; ++q) votes[size_t(r)] += memcmp(&arrival(r).call, &arrival(q).call, agreed) == 0;
  const int best = *std::max_element(votes.begin(), votes.end());
  failure_ = Failure{Status::mismatch, {}, {}, seq_, 0};
  for (int r = 0; r < ranks_; ++r)
    if (2 * best <= ranks_ || votes[size_t(r)] != best) failure_.ranks.push_back(r);
  return Status::mismatch;
}

const Call& Communicator::call_of(int rank) const { return arrival(rank).call; }
const int64_t* Communicator::dims_of(int rank) const { return arrival(rank).dims; }

Call Communicator::describe(const Request& r, Algorithm algorithm) const {
  Call c{};
  c.kind = Kind::all_reduce;
  c.dtype = r.dtype;
  c.op = r.op;
  c.algorithm = algorithm;
  c.shape_hash = hash_shape(r.dims, r.ndims);
  if (algorithm == Algorithm::program) c.shape_hash ^= program(r.program)->hash;
  c.count = r.count;
  c.scale = r.scale;
  c.place = Place::hidden;
  uint64_t offset = r.offset;
  const int64_t region = r.region >= 0 ? r.region : find_region(r.data, r.count * size_of(r.dtype), &offset);
  if (region >= 0) {
    c.place = r.fresh ? Place::fresh : Place::mapped;
    c.region = uint32_t(region);
    c.offset = offset;
  }
  return c;
}

// ---------------------------------------------------------------------------------------------- collectives

Status Communicator::barrier() {
  std::lock_guard<std::mutex> lock(busy_);
  Call call{};
  call.kind = Kind::barrier;
  call.scale = 1.0;
  bytes_ = 0;
  patience_ = settings_.patience;
  const Status s = meet(Kind::barrier, Request{}, call, nullptr, 0);
  if (s == Status::ok) note(Path::barrier);
  return s;
}

Status Communicator::agree_on_empty(size_t bytes, DType dtype, const int64_t* dims, int ndims) {
  std::lock_guard<std::mutex> lock(busy_);
  Request r;
  r.dims = dims;
  r.ndims = ndims;
  Call call{};
  call.kind = Kind::empty;
  call.dtype = dtype;
  call.count = bytes;
  call.scale = 1.0;
  call.shape_hash = hash_shape(dims, ndims);
  return meet(Kind::empty, r, call, nullptr, 0);
}

Status Communicator::all_reduce(const Request& r) {
  std::lock_guard<std::mutex> lock(busy_);
  if (!usable()) return broken_ ? failure_.status : Status::closed;
  bytes_ = r.count * size_of(r.dtype);
  patience_ = r.background ? settings_.background : settings_.patience;
  if (ranks_ == 1) return local(r);
  const bool small = bytes_ <= settings_.one_shot_bytes;
  if (r.algorithm == Algorithm::one_shot || (r.algorithm == Algorithm::automatic && small)) return one_shot(r);
  const Algorithm algorithm = r.algorithm == Algorithm::automatic ? Algorithm::direct : r.algorithm;
  const Status met = meet(Kind::all_reduce, r, describe(r, algorithm), nullptr, 0);
  if (met != Status::ok) return met;
  for (int q = 0; q < ranks_; ++q) {
    if (arrival(q).call.place == Place::fresh) {
      pending_ = r;
      pending_.algorithm = algorithm;
      return Status::exchange;
    }
  }
  return carry_out(r);
}

Status Communicator::resume() {
  std::lock_guard<std::mutex> lock(busy_);
  if (!usable()) return broken_ ? failure_.status : Status::closed;
  return carry_out(pending_);
}

// Everybody arrived and called the same; every rank takes the same branch, because it looks at the same arrivals.
Status Communicator::carry_out(const Request& r) {
  if (r.algorithm == Algorithm::program) return run_program(r);
  bool all_mapped = true;
  for (int q = 0; q < ranks_; ++q) {
    const Call& c = arrival(q).call;
    all_mapped = all_mapped && c.place != Place::hidden && has_region(q, c.region, c.offset, bytes_);
  }
  return all_mapped ? push(r) : staged(r);
}

Status Communicator::finish(Status status) {
  me().done.value.store(seq_, std::memory_order_release);
  return status;
}

Status Communicator::local(const Request& r) {
  ++seq_;
  kind_ = Kind::all_reduce;
  entered_ = ready_ = now_ns();
  submitted_ = r.stamp_ns != 0 ? r.stamp_ns : entered_;
  me().arrival[seq_ & 1].stamp_ns = submitted_;
  if (r.scale != 1.0) {
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
    const Status s = meet(Kind::all_reduce, r, describe(r, Algorithm::one_shot), data, n * item);
    if (s != Status::ok) return s;
    const void* src[kMaxRanks];
    for (int q = 0; q < ranks_; ++q) src[q] = arrival(q).payload;
    void* dst = data;
    if (n != 0) fold(src, ranks_, &dst, 1, n, false, r.scale, r.op, r.dtype);
    at += n;
  } while (at < r.count);
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
    {
      std::lock_guard<std::mutex> guard(regions_guard_);
      for (int q = 0; q < ranks_; ++q) {
        const Call& c = arrival(q).call;
        at[q] = q == rank_ ? r.data + from * item : regions_[size_t(q)][c.region].base + c.offset + from * item;
      }
    }
    const bool stream = bytes_ * size_t(ranks_) >= settings_.stream_bytes;
    if (stream)
      fold(at, ranks_, at, ranks_, n, true, r.scale, r.op, r.dtype);
    else
      fold_back_and_forth(r, at, n);
  }
  signal(me().done, seq_, view_.header().exit, &RankBlock::done);
  if (!wait_all(&RankBlock::done, seq_, view_.header().exit)) return failure_.status;
  note(Path::push);
  return Status::ok;
}

// Fold the own slice block by block, from its start in one collective and from its end in the next: of a slice that is
// as large as a cache, what was touched last is still in it, and a sweep in the same direction would evict all of it.
void Communicator::fold_back_and_forth(const Request& r, void* const* slice, size_t n) const {
  const size_t item = size_of(r.dtype), block = kSweepBytes / item, blocks = (n + block - 1) / block;
  for (size_t i = 0; i < blocks; ++i) {
    const size_t from = block * (seq_ % 2 == 0 ? i : blocks - 1 - i);
    void* at[kMaxRanks];
    for (int q = 0; q < ranks_; ++q) at[q] = static_cast<unsigned char*>(slice[q]) + from * item;
    fold(at, ranks_, at, ranks_, std::min(block, n - from), false, r.scale, r.op, r.dtype);
  }
}

// The private-buffer path. Per segment: copy everybody else's slices in, reduce the own slice, copy the others' out;
// the copying in of the next segment overlaps the waiting for this one. 5N−2 bytes move per payload byte.
Status Communicator::staged(const Request& r) {
  const size_t item = size_of(r.dtype);
  const size_t stride = size_t(view_.header().stage_bytes) / kStageBuffers / 64 * 64;
  const size_t per = std::min(settings_.segment_bytes, stride) / item;
  const size_t total = (r.count + per - 1) / per;
  const uint64_t base = segments_;
  segments_ += total;
  Header& h = view_.header();

  const auto length = [&](size_t s) { return std::min(per, r.count - s * per); };
  const auto stage = [&](int rank, size_t s) {
    return view_.stage(rank) + size_t((base + s) % kStageBuffers) * stride;
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
      fold(src, ranks_, dst, 2, n, false, r.scale, r.op, r.dtype);
    }
    signal(me().reduced, base + s + 1, h.reduced, &RankBlock::reduced);
    return true;
  };
  const auto copy_out = [&](size_t s) {
    if (!wait_all(&RankBlock::reduced, base + s + 1, h.reduced)) return false;
    for (int q = 0; q < ranks_; ++q) {
      if (q == rank_) continue;
      size_t from, n;
      slice_of(length(s), item, ranks_, q, &from, &n);
      memcpy(r.data + (s * per + from) * item, stage(q, s) + from * item, n * item);
    }
    signal(me().copied, base + s + 1, h.copied, &RankBlock::copied);
    return true;
  };

  bool fine = total == 0 || copy_in(0);
  for (size_t s = 0; fine && s < total; ++s) {
    fine = (s + 1 == total || copy_in(s + 1)) && reduce(s) && (s == 0 || copy_out(s - 1));
  }
  fine = fine && (total == 0 || copy_out(total - 1));
  if (!fine) return failure_.status;
  note(Path::staged);
  return finish(Status::ok);
}

// ---------------------------------------------------------------------------------------------- programs

int Communicator::add_program(Program program) {
  std::lock_guard<std::mutex> guard(programs_guard_);
  programs_.push_back(std::make_shared<const Program>(std::move(program)));
  return int(programs_.size()) - 1;
}

std::shared_ptr<const Program> Communicator::program(int id) const {
  std::lock_guard<std::mutex> guard(programs_guard_);
  return programs_.at(size_t(id));
}

static DType work_dtype(DType d) { return d == DType::f16 || d == DType::bf16 ? DType::f32 : d; }

Status Communicator::run_program(const Request& r) {
  const std::shared_ptr<const Program> kept = program(r.program);
  const Program& program = *kept;
  const DType work = work_dtype(r.dtype);
  const size_t room = size_t(view_.header().stage_bytes) / size_of(work);
  Request piece = r;
  for (size_t at = 0; at < r.count; at += room) {
    piece.data = r.data + at * size_of(r.dtype);
    piece.count = std::min(room, r.count - at);
    const uint64_t base = rounds_;
    rounds_ += uint64_t(program.rounds) + 1;  // round 0 of the flags: the work space is loaded
    in_program_ = true;
    const bool fine = run_rounds(program, piece, work, base);
    in_program_ = false;
    if (!fine) return failure_.status;
  }
  note(Path::program);
  return finish(Status::ok);
}

bool Communicator::run_rounds(const Program& program, const Request& piece, DType work, uint64_t base) {
  Header& h = view_.header();
  const size_t item = size_of(work);
  const auto begin = [&](int chunk) { return piece.count * size_t(chunk) / size_t(program.chunks); };
  const auto flag = [&](int round) { return base + 1 + uint64_t(round); };  // value meaning "all before `round` is done"
  scratch_.resize(std::max(scratch_.size(), size_t(h.stage_bytes)));

  load_work(piece, work);
  publish(me().stored, flag(0), h.stored);
  size_t i = 0;
  for (int round = 0; round < program.rounds; ++round) {
    const size_t first = i;
    for (; i < program.instructions.size() && program.instructions[i].round == round; ++i) {
      const Instruction& in = program.instructions[i];
      const size_t from = begin(in.chunk), n = begin(in.chunk + 1) - from;
      const void* src[kMaxRanks];
      int nsrc = 0;
      for (int s : in.sources) {
        if (s != rank_ && !wait_for(s, &RankBlock::stored, flag(round), h.stored)) return false;
        src[nsrc++] = view_.stage(s) + from * item;
      }
      if (!in.scratch) {
        for (const auto& w : in.stored)
          if (!wait_for(w.first, &RankBlock::stored, flag(w.second + 1), h.stored)) return false;
      }
      void* dst = in.scratch ? scratch_.data() + from * item : view_.stage(rank_) + from * item;
      fold(src, nsrc, &dst, 1, n, false, 1.0, piece.op == ReduceOp::avg ? ReduceOp::sum : piece.op, work);
    }
    publish(me().fetched, flag(round + 1), h.fetched);
    for (size_t k = first; k < i; ++k) {
      const Instruction& in = program.instructions[k];
      if (!in.scratch) continue;
      for (const auto& w : in.stored)
        if (!wait_for(w.first, &RankBlock::stored, flag(w.second + 1), h.stored)) return false;
      for (const auto& w : in.fetched)
        if (!wait_for(w.first, &RankBlock::fetched, flag(w.second + 1), h.fetched)) return false;
      const size_t from = begin(in.chunk), n = begin(in.chunk + 1) - from;
      memcpy(view_.stage(rank_) + from * item, scratch_.data() + from * item, n * item);
    }
    publish(me().stored, flag(round + 1), h.stored);
  }
  // Nobody may load the next piece over chunks that others still read.
  if (!wait_all(&RankBlock::stored, flag(program.rounds), h.stored)) return false;
  store_work(piece, work);
  return true;
}

void Communicator::load_work(const Request& p, DType work) {
  unsigned char* to = view_.stage(rank_);
  if (p.dtype == work) {
    const void* src = p.data;
    void* dst = to;
    fold(&src, 1, &dst, 1, p.count, false, p.scale, ReduceOp::sum, work);
    return;
  }
  float* wide = reinterpret_cast<float*>(to);
  (p.dtype == DType::f16 ? kernels().widen_f16 : kernels().widen_bf16)(p.data, wide, p.count);
  if (p.scale != 1.0)
    for (size_t i = 0; i < p.count; ++i) wide[i] *= float(p.scale);
}

void Communicator::store_work(const Request& p, DType work) {
  unsigned char* from = view_.stage(rank_);
  const void* src = from;
  void* dst = p.dtype == work ? p.data : from;
  if (p.dtype == work || p.op == ReduceOp::avg)
    fold(&src, 1, &dst, 1, p.count, false, 1.0, p.op == ReduceOp::avg ? ReduceOp::avg : ReduceOp::max, work);
  if (p.dtype != work)
    (p.dtype == DType::f16 ? kernels().narrow_f16 : kernels().narrow_bf16)(reinterpret_cast<float*>(from), p.data, p.count);
}

void Communicator::fold(const void* const* src, int nsrc, void* const* dst, int ndst, size_t count,
                        bool stream, double scale, ReduceOp op, DType dtype) const {
  const Fold f{src, nsrc, dst, ndst, count, scale, double(ranks_), stream};
  kernels().fold[int(dtype)][int(op)](f);
#if defined(__x86_64__)
  if (stream) __builtin_ia32_sfence();
#endif
}

// ---------------------------------------------------------------------------------------------- regions and log

void Communicator::add_region(int rank, uint32_t id, unsigned char* base, size_t bytes, std::shared_ptr<Mapping> mapping,
                              bool find) {
  std::lock_guard<std::mutex> guard(regions_guard_);
  auto& table = regions_[size_t(rank)];
  if (table.size() <= id) table.resize(size_t(id) + 1);
  table[id] = Region{base, bytes, std::move(mapping), find, std::make_shared<std::atomic<bool>>(true)};
}

uint32_t Communicator::adopt_region(unsigned char* base, size_t bytes, bool find, std::shared_ptr<std::atomic<bool>>* alive) {
  std::lock_guard<std::mutex> guard(regions_guard_);
  auto& table = regions_[size_t(rank_)];
  table.push_back(Region{base, bytes, nullptr, find, std::make_shared<std::atomic<bool>>(true)});
  if (alive != nullptr) *alive = table.back().alive;
  return uint32_t(table.size() - 1);
}

void Communicator::retire_region(uint32_t id) {
  std::lock_guard<std::mutex> guard(regions_guard_);
  regions_[size_t(rank_)].at(id).alive->store(false);
}

std::vector<uint32_t> Communicator::take_dead_regions() {
  std::lock_guard<std::mutex> guard(regions_guard_);
  std::vector<uint32_t> dead;
  auto& table = regions_[size_t(rank_)];
  for (size_t id = 0; id < table.size(); ++id) {
    if (table[id].base == nullptr || table[id].alive->load()) continue;
    table[id] = Region{};
    dead.push_back(uint32_t(id));
  }
  return dead;
}

void Communicator::drop_region(int rank, uint32_t id) {
  std::lock_guard<std::mutex> guard(regions_guard_);
  auto& table = regions_[size_t(rank)];
  if (id < table.size()) table[id] = Region{};
}

bool Communicator::has_region(int rank, uint32_t id, uint64_t offset, size_t bytes) const {
  std::lock_guard<std::mutex> guard(regions_guard_);
  const auto& table = regions_[size_t(rank)];
  if (id >= table.size() || table[id].base == nullptr) return false;
  return offset <= table[id].bytes && bytes <= table[id].bytes - offset;
}

int64_t Communicator::find_region(const unsigned char* data, size_t bytes, uint64_t* offset) const {
  std::lock_guard<std::mutex> guard(regions_guard_);
  const auto& table = regions_[size_t(rank_)];
  for (size_t id = 0; id < table.size(); ++id) {
    const Region& r = table[id];
    if (r.find && r.alive->load() && r.base != nullptr && data >= r.base && data + bytes <= r.base + r.bytes) {
      *offset = uint64_t(data - r.base);
      return int64_t(id);
    }
  }
  return -1;
}

void Communicator::note(Path path) {
  std::lock_guard<std::mutex> guard(log_guard_);
  if (log_.size() >= kLogRows * log_width()) {
    ++dropped_;
    return;
  }
  log_.insert(log_.end(), {seq_, uint64_t(kind_), uint64_t(path), bytes_, submitted_, entered_, ready_, now_ns()});
  for (int r = 0; r < ranks_; ++r) log_.push_back(ranks_ == 1 ? submitted_ : arrival(r).stamp_ns);
}

std::vector<uint64_t> Communicator::drain() {
  std::lock_guard<std::mutex> guard(log_guard_);
  std::vector<uint64_t> rows;
  rows.swap(log_);
  return rows;
}

}  // namespace ringside
