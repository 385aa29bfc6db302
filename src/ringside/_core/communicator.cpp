// A communicator's life, its waiting, and the entry that every collective shares.
#include "communicator.hpp"

#include <algorithm>
#include <cstring>
#include <poll.h>
#include <pthread.h>

namespace ringside {
namespace {

constexpr int64_t kNapNs = 10 * 1000000;  // how long a sleeper goes without looking for dead peers

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
  const Status arrived = arrive(kind, request, call, payload, bytes);
  return arrived == Status::ok ? await() : arrived;
}

Status Communicator::arrive(Kind kind, const Request& request, const Call& call, const void* payload, size_t bytes) {
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
  Gate& gate = view_.header().entry;
  if (gate.anyone_sleeps()) {
    int r = 0;
    while (r < ranks_ && has_arrived(r)) ++r;
    if (r == ranks_) gate.open();
  }
  return Status::ok;
}

bool Communicator::has_arrived(int rank) const { return arrival(rank).seq.load(std::memory_order_acquire) >= seq_; }

Status Communicator::await() {
  if (!wait(view_.header().entry, [&](int r) { return has_arrived(r); })) return failure_.status;
  // Everybody arrived, but somebody may have given up since: what the others did not do, a late rank must not do alone.
  const auto holds_on = [&](int r) {
    const Life life = Life(view_.block(r).life.load(std::memory_order_acquire));
    return life == Life::joined || life == Life::closed;
  };
  for (int r = 0; r < ranks_; ++r)
    if (!holds_on(r) && !look_around(holds_on, entered_)) return failure_.status;
  ready_ = now_ns();
  return check_calls();
}

Status Communicator::check_calls() {
  // The fields that must agree come first in Call. (Where only some said `own_scale`, the hash differs.)
  const size_t agreed = arrival(rank_).call.own_scale ? offsetof(Call, scale) : offsetof(Call, offset);
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

std::vector<int> Communicator::absent() const {
  const auto at = [&](int r) {
    const Arrival* two = view_.block(r).arrival;
    return std::max(two[0].seq.load(std::memory_order_acquire), two[1].seq.load(std::memory_order_acquire));
  };
  std::vector<int> ranks;
  for (int r = 0; r < ranks_; ++r)
    if (at(r) < at(rank_)) ranks.push_back(r);
  return ranks;
}

const Call& Communicator::call_of(int rank) const { return arrival(rank).call; }
const int64_t* Communicator::dims_of(int rank) const { return arrival(rank).dims; }

std::vector<int64_t> Communicator::bounds_of(int rank) const {
  const Arrival& a = arrival(rank);
  if (a.call.kind != Kind::reduce_scatter_in_place && a.call.kind != Kind::all_gather_in_place) return {};
  std::vector<int64_t> bounds(size_t(ranks_) + 1);
  memcpy(bounds.data(), a.payload, bounds.size() * sizeof(int64_t));
  return bounds;
}

Call Communicator::describe(const Request& r, Algorithm algorithm) const {
  Call c{};
  c.kind = r.kind;
  c.dtype = r.dtype;
  c.op = r.op;
  c.algorithm = algorithm;
  c.shape_hash = hash_shape(r.dims, r.ndims) ^ r.tag;
  if (r.own_scale) c.shape_hash ^= 0x9e3779b9u;
  if (r.root >= 0) c.shape_hash ^= uint32_t(r.root + 1) * 0x85ebca6bu;
  if (r.bounds != nullptr) c.shape_hash ^= hash_shape(r.bounds, ranks_ + 1);
  if (algorithm == Algorithm::program) c.shape_hash ^= program(r.program)->hash;
  c.count = r.count;
  c.scale = r.scale;
  c.own_scale = r.own_scale;
  c.root = uint8_t(r.root);
  c.place = Place::hidden;
  uint64_t offset = r.offset;
  const int64_t region = r.region >= 0 ? r.region : find_region(r.data, extent(r, rank_), &offset);
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
  divisor_ = double(ranks_);
  if (ranks_ == 1) return local(r);
  const bool small = bytes_ <= settings_.one_shot_bytes;
  if (r.algorithm == Algorithm::one_shot || (r.algorithm == Algorithm::automatic && small)) return one_shot(r);
  return start(r);
}

// A small all-reduce in two parts: tell the others, without waiting for anybody, and later wait and reduce. The tensor
// must be left alone in between, and no other collective may come.
Status Communicator::post(const Request& r) {
  std::lock_guard<std::mutex> lock(busy_);
  bytes_ = r.count * size_of(r.dtype);
  divisor_ = double(ranks_);
  pending_ = r;
  return arrive(r.kind, r, describe(r, Algorithm::one_shot), r.data, bytes_);
}

Status Communicator::finish_posted() {
  std::lock_guard<std::mutex> lock(busy_);
  if (!usable()) return broken_ ? failure_.status : Status::closed;
  patience_ = settings_.patience;
  const Status met = await();
  return met == Status::ok ? take_one_shot(pending_) : met;
}

// Meet without a payload and carry it out, unless some rank's memory must become known to the others first.
Status Communicator::start(const Request& r) {
  const Algorithm algorithm = r.algorithm == Algorithm::automatic ? Algorithm::direct : r.algorithm;
  const Status met = meet(r.kind, r, describe(r, algorithm), nullptr, 0);
  if (met != Status::ok) return met;
  const Status weighed = weigh(r);
  if (weighed != Status::ok) return weighed;
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
    if (!gives(r, q)) continue;
    const Call& c = arrival(q).call;
    all_mapped = all_mapped && c.place != Place::hidden && has_region(q, c.region, c.offset, extent(r, q));
  }
  const bool by_lanes = r.bounds != nullptr && !(r.kind == Kind::reduce_scatter_in_place && r.root >= 0);
  if (by_lanes) return all_mapped ? lanes_mapped(r) : lanes_staged(r);
  return all_mapped ? push(r) : staged(r);
}

// Read every rank's scale where they may differ; a mean over no weight at all is refused, by all ranks alike.
Status Communicator::weigh(const Request& r) {
  if (!r.own_scale) return Status::ok;
  double sum = 0;
  for (int q = 0; q < ranks_; ++q) sum += scales_[q] = arrival(q).call.scale;
  if (r.op != ReduceOp::avg) return Status::ok;
  divisor_ = sum;
  if (sum > 0) return Status::ok;
  failure_ = Failure{Status::no_weight, {}, {}, seq_, 0};
  return Status::no_weight;
}

}  // namespace ringside
