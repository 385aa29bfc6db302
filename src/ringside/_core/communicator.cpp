// A communicator's life, its waiting, and the entry that every collective shares.
#include "communicator.hpp"

#include <algorithm>
#include <cstring>
#include <poll.h>

#include "pidfds.hpp"

namespace ringside {
namespace {

constexpr int kYieldsToOthers = 4;             // before sleeping where others are to run on this CPU
constexpr uint64_t kLongYieldNs = 200 * 1000;  // longer than ranks take to go through a small collective
constexpr int kWaitsWithoutYield = 256;        // then a yield of a few ms costs each of them some 10 us
constexpr int64_t kNapNs = 10 * 1000000;       // how long a sleeper goes without looking for dead peers

uint32_t hash_shape(const int64_t* dims, int n) {
  uint64_t h = 0xcbf29ce484222325ull ^ uint64_t(n);
  for (int i = 0; i < n; ++i) h = (h ^ uint64_t(dims[i])) * 0x100000001b3ull, h ^= h >> 29;
  return uint32_t(h ^ (h >> 32));
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Mapping> arena, int rank, int ranks, std::vector<int> pidfds, Settings s)
    : arena_(std::move(arena)), rank_(rank), ranks_(ranks), pidfds_(std::move(pidfds)), settings_(s),
      timeout_ns_(s.timeout_ns), forks_(forks()), regions_(size_t(ranks)) {
  view_ = {arena_->base(), ranks, (arena_->bytes() - ArenaView::blocks_bytes(ranks)) / size_t(ranks)};
  enlist();
  patience_ = settings_.patience;
  view_.touch(*arena_, rank_);
  tell_cpu();
  for (int& fd : pidfds_) fd = share_pidfd(fd);
}

Communicator::~Communicator() {
  close();
  retire();
  if (forks_ != forks()) return;  // a forked child lets its parent's descriptors be
  for (int fd : pidfds_) release_pidfd(fd);
}

// ---------------------------------------------------------------------------------------------- waiting

// Tell the others where this thread runs. The kernel keeps that beside the thread: no call.
void Communicator::tell_cpu() {
  const int cpu = sched_getcpu();
  if (cpu == cpu_) return;
  cpu_ = cpu;
  me().cpu.store(cpu, std::memory_order_relaxed);
}

// How long to look for the ranks from `from` on before sleeping: not at all while one of them may need this very CPU. (In a
// program those that are waited for may wait for others, which are not known here.)
template <class Has>
Patience Communicator::patience_for(int from, const Has& has) {
  tell_cpu();
  for (int r = in_program_ ? 0 : from; r < ranks_; ++r) {
    if (r == rank_ || view_.block(r).cpu.load(std::memory_order_relaxed) != cpu_) continue;
    if (in_program_ || !has(r)) return {0, std::min(patience_.yields, kYieldsToOthers)};
  }
  return patience_;
}

// Leave the CPU to others until a condition holds, at most so often. Something else that computes here, such as another
// job's process, keeps the CPU for a slice of milliseconds at each yield, while a sleeper is woken before it: then sleep
// at once, this time and for a while.
template <class Ready>
bool Communicator::yield_until(const Ready& ready, int yields) {
  if (waits_without_yield_ > 0) {
    --waits_without_yield_;
    return false;
  }
  for (int i = 0; i < yields; ++i) {
    const uint64_t before = now_ns();
    sched_yield();
    if (now_ns() - before > kLongYieldNs) {
      waits_without_yield_ = kWaitsWithoutYield;
      return ready();
    }
    if (ready()) return true;
  }
  return false;
}

// Wait until `has` holds for every rank. False: the collective failed.
template <class Has>
bool Communicator::wait(Gate& gate, const Has& has, Turn turn) {
  int at = 0;  // flags only grow: a rank that was seen need not be looked at again
  const auto ready = [&] {
    while (at < ranks_ && has(at)) ++at;
    return at == ranks_;
  };
  MAY_STOP_HERE();
  bool come = ready();
  const Patience patience = come ? Patience{0, 0} : patience_for(at, has);
  for (int i = 0; !come && i < patience.spins; ++i) {
    pause_cpu();
    come = ready();
  }
  come = come || yield_until(ready, patience.yields);
  const uint64_t since = come ? 0 : now_ns();
  while (!come) {
    gate.sleep(ready, kNapNs);
    tell_cpu();
    come = ready();
    if (!come && !look_around(has, since, turn)) return false;
  }
  MAY_STOP_HERE();
  return holds(turn);
}

// Everybody has come where this rank waited. Did nobody give up before? This load comes after the loads of the flags, and
// the fence after this rank's own flag (`anyone_sleeps`) comes before both: whoever says later that it gives up, sees that
// everybody has come.
bool Communicator::holds(Turn turn) {
  return view_.header().ending.load(std::memory_order_seq_cst) == 0 || settle(turn);
}

// The same where somebody has: help whoever has not decided yet.
bool Communicator::settle(Turn turn) {
  std::atomic<uint64_t>& word = view_.header().ending;
  for (uint64_t seen = word.load();;) {
    MAY_STOP_HERE();
    const Ending e(seen);
    if (e.fate == Ending::none || e.seq > seq_) return true;  // who gives up a later one had finished this one
    if (e.fate == Ending::failed) return fail_as_others([](int) { return true; }, entered_);
    if (turn == Turn::middle || e.seq < seq_) return true;  // it waits for what this rank has still to do
    if (word.compare_exchange_strong(seen, 0)) return true;
  }
}

bool Communicator::given_up() const {
  const Ending e(view_.header().ending.load(std::memory_order_acquire));
  return e.fate == Ending::failed && e.seq <= seq_;
}

// Nothing moved for a while: is somebody gone, is it too late, was Ctrl-C pressed? False ends the wait.
bool Communicator::look_around(const std::function<bool(int)>& has, uint64_t since, Turn turn) {
  std::vector<pollfd> polls;
  for (int fd : pidfds_) polls.push_back({fd, POLLIN, 0});
  poll(polls.data(), polls.size(), 0);
  if (given_up()) return fail_as_others(has, since);
  if (leaving_.load(std::memory_order_relaxed)) return leave(Status::closed, {}, {}, since, turn, has);
  if (is_wanted()) return leave(Status::withdrawn, {}, {}, since, turn, has);
  // Whoever finished a collective has seen all that others need for it. So if somebody has left, and after that something
  // is missing still, it left in the middle: nobody can finish, even if the missing rank comes.
  std::vector<int> missing, gone;
  for (int r = 0; r < ranks_; ++r) {
    const bool dead = (polls[size_t(r)].revents & POLLIN) != 0;
    const Life life = Life(view_.block(r).life.load(std::memory_order_acquire));
    if (r != rank_ && (dead || life != Life::joined)) gone.push_back(r);
  }
  for (int r = 0; r < ranks_; ++r)
    if (r != rank_ && !has(r)) missing.push_back(r);
  if (missing.empty()) return true;
  if (!gone.empty()) return leave(Status::peer_lost, gone, missing, since, turn, has);
  if (now_ns() - since > timeout_ns_.load(std::memory_order_relaxed)) return leave(Status::deadline, slowest(missing), missing, since, turn, has);
  if (interrupted && interrupted()) return leave(Status::interrupted, {}, missing, since, turn, has);
  return true;
}

// This rank wants to give up what is under way. True: everybody has come after all, so it is finished instead.
//
// In the middle of a collective nobody can have finished it, because this rank has not. At its end somebody may have:
// then this rank says first that it is leaving, and looks once more. Whoever sees the last rank come later than that finds
// what was said here, and one compare-and-swap, by whom it may be, decides for all.
bool Communicator::leave(Status status, std::vector<int> ranks, std::vector<int> missing, uint64_t since, Turn turn,
                         const std::function<bool(int)>& has) {
  std::atomic<uint64_t>& word = view_.header().ending;
  const Life why = status == Status::deadline ? Life::late : status == Status::closed ? Life::closed : Life::failed;
  const uint64_t leaving = Ending::word(Ending::leaving, why, rank_, seq_);
  blame(ranks);
  bool said = false;  // that somebody is leaving this collective
  for (uint64_t seen = word.load();;) {
    MAY_STOP_HERE();
    const Ending e(seen);
    if (e.fate == Ending::none ? said : e.seq > seq_) return true;  // who took the word back has seen that everybody came
    if (e.fate == Ending::failed) {
      if (status == Status::peer_lost && !missing.empty()) return fail_as_others(has, since);  // they know more
      break;
    }
    if (turn == Turn::last) {
      if (e.fate != Ending::leaving || e.seq != seq_) {
        if (!word.compare_exchange_strong(seen, leaving)) continue;
        seen = leaving;
      }
      said = true;
      MAY_STOP_HERE();
      int r = 0;
      while (r < ranks_ && has(r)) ++r;
      MAY_STOP_HERE();
      if (r == ranks_) {
        if (word.compare_exchange_strong(seen, 0)) return true;
        continue;
      }
    }
    if (word.compare_exchange_strong(seen, Ending::word(Ending::failed, why, rank_, seq_))) break;
  }
  return fail(status, std::move(ranks), std::move(missing), since);
}

// Somebody has given up for all. Those who did know why: they name the culprit, and a deadline stays one. That they may have
// ended since is a consequence.
bool Communicator::fail_as_others(const std::function<bool(int)>& has, uint64_t since) {
  const Ending ending(view_.header().ending.load(std::memory_order_acquire));
  std::vector<int> ranks, missing;
  std::vector<bool> named(size_t(ranks_), false);
  bool only_late = true;
  for (int r = 0; r < ranks_; ++r) {
    if (r == rank_) continue;
    const RankBlock& block = view_.block(r);
    const Life life = r == ending.rank ? ending.why : Life(block.life.load(std::memory_order_acquire));
    bool itself = life == Life::failed || life == Life::late;
    for (int q = 0; (life == Life::failed || life == Life::late) && q < ranks_; ++q) {
      if ((block.blamed[q / 64] >> (q % 64) & 1) == 0) continue;
      named[size_t(q)] = true;
      itself = false;
    }
    if (itself || life == Life::closed) named[size_t(r)] = true;
    only_late = only_late && (life == Life::late || life == Life::joined);
    if (!has(r)) missing.push_back(r);
  }
  for (int r = 0; r < ranks_; ++r)
    if (named[size_t(r)]) ranks.push_back(r);
  blame(ranks);
  return fail(only_late ? Status::deadline : Status::peer_lost, std::move(ranks), std::move(missing), since);
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

// Write down whom this rank names; read by others once it has failed.
void Communicator::blame(const std::vector<int>& ranks) {
  for (uint64_t& bits : me().blamed) bits = 0;
  for (int r : ranks) me().blamed[r / 64] |= uint64_t(1) << (r % 64);
}

// It is decided: this communicator is of no more use.
bool Communicator::fail(Status status, std::vector<int> ranks, std::vector<int> missing, uint64_t since) {
  failure_ = Failure{status, std::move(ranks), std::move(missing), seq_, now_ns() - since};
  broken_ = true;
  end(status == Status::deadline ? Life::late : status == Status::closed ? Life::closed : Life::failed);
  MAY_STOP_HERE();
  withdraw_memory();
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
  if (!broken_) leave(status, std::move(ranks), {}, now_ns(), Turn::middle, [](int) { return false; });
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
    if (in_use_ >= 0) withdraw_memory();  // between start() and resume(): the others may be writing already
  }
  busy_.unlock();
}

bool Communicator::usable() const { return !broken_ && forks_ == forks(); }

// Raise this rank's flag; wake sleepers if that raised the minimum over all ranks.
void Communicator::signal(Flag& flag, uint64_t value, Gate& gate, Flag RankBlock::*which) {
  MAY_STOP_HERE();
  flag.value.store(value, std::memory_order_release);
  if (!gate.anyone_sleeps()) return;
  for (int r = 0; r < ranks_; ++r)
    if ((view_.block(r).*which).value.load(std::memory_order_acquire) < value) return;
  gate.open();
}

// The same where ranks wait for single peers: every move wakes the sleepers.
void Communicator::publish(Flag& flag, uint64_t value, Gate& gate) {
  MAY_STOP_HERE();
  flag.value.store(value, std::memory_order_release);
  if (gate.anyone_sleeps()) gate.open();
}

bool Communicator::wait_all(Flag RankBlock::*which, uint64_t value, Gate& gate, Turn turn) {
  return wait(gate, [&](int r) { return (view_.block(r).*which).value.load(std::memory_order_acquire) >= value; }, turn);
}

bool Communicator::wait_for(int rank, Flag RankBlock::*which, uint64_t value, Gate& gate) {
  return wait(gate, [&](int r) {
    return r != rank || (view_.block(r).*which).value.load(std::memory_order_acquire) >= value;
  }, Turn::middle);
}

// ---------------------------------------------------------------------------------------------- entry

// Tell everybody what this rank called, wait until all have told, and check that it is the same.
Status Communicator::meet(Kind kind, const Request& request, const Call& call, const void* payload, size_t bytes,
                          Turn turn) {
  const Status arrived = arrive(kind, request, call, payload, bytes);
  return arrived == Status::ok ? await(turn) : arrived;
}

Status Communicator::arrive(Kind kind, const Request& request, const Call& call, const void* payload, size_t bytes) {
  if (!usable()) return broken_ ? failure_.status : Status::closed;
  ++seq_;
  kind_ = kind;
  tell_cpu();
  Arrival& mine = arrival(rank_);
  if (bytes != 0) memcpy(mine.payload, payload, bytes);
  mine.call = call;
  const int dims = std::min(request.ndims, kMaxDims);
  for (int i = 0; i < dims; ++i) mine.dims[i] = request.dims[i];
  mine.call.dims_known = uint8_t(dims);
  entered_ = now_ns();
  submitted_ = request.stamp_ns != 0 ? request.stamp_ns : entered_;
  mine.stamp_ns = submitted_;
  MAY_STOP_HERE();
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

Status Communicator::await(Turn turn) {
  if (!wait(view_.header().entry, [&](int r) { return has_arrived(r); }, turn)) return failure_.status;
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
  const Status s = meet(Kind::barrier, Request{}, call, nullptr, 0, Turn::last);
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
  return meet(Kind::empty, r, call, nullptr, 0, Turn::last);
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

// A small all-reduce or all-gather in two parts: tell the others, without waiting for anybody, and later wait and reduce
// or copy. The tensors must be left alone in between, and no other collective may come. Other ranks may carry it out in
// one part: what lies in the arena is the same.
Status Communicator::post(const Request& r) {
  std::lock_guard<std::mutex> lock(busy_);
  bytes_ = r.count * size_of(r.dtype);
  divisor_ = double(ranks_);
  pending_ = r;
  if (r.bounds == nullptr) return arrive(r.kind, r, describe(r, Algorithm::one_shot), r.data, bytes_);
  if (!usable()) return broken_ ? failure_.status : Status::closed;
  if (!are_inline(bytes_)) return Status::unsuited;
  set_bounds(r.bounds);
  pending_.bounds = bounds_.data();
  place_inline(r);
  return arrive(r.kind, r, describe(r, Algorithm::one_shot), nullptr, 0);
}

Status Communicator::finish_posted() {
  std::lock_guard<std::mutex> lock(busy_);
  if (!usable()) return broken_ ? failure_.status : Status::closed;
  patience_ = settings_.patience;
  const Status met = await(Turn::last);
  if (met != Status::ok) return met;
  return pending_.bounds == nullptr ? take_one_shot(pending_) : take_inline(pending_);
}

// Meet without a payload and carry it out, unless some rank's memory must become known to the others first.
Status Communicator::start(const Request& r) {
  const Status s = start_with(r, r.algorithm == Algorithm::automatic ? Algorithm::direct : r.algorithm);
  return s == Status::exchange ? s : release(s);
}

Status Communicator::start_with(const Request& r, Algorithm algorithm) {
  Call call = describe(r, algorithm);
  use_region(&call);
  // Of two ranks each would copy half of its tensor for the other one and half of the result back: as many bytes go across
  // where each copies all of it and reduces all of it, and nobody waits a second time.
  const bool may_travel = ranks_ == 2 && r.bounds == nullptr && algorithm == Algorithm::direct && bytes_ <= kInlineBytes;
  const bool travels = may_travel && call.place == Place::hidden;
  const Status met = meet(r.kind, r, call, r.data, travels ? bytes_ : 0, Turn::middle);
  if (met != Status::ok) return met;
  const Status weighed = weigh(r);
  if (weighed != Status::ok) return weighed;
  if (travels && arrival(1 - rank_).call.place == Place::hidden) {
    fold_payloads(r, r.data, r.count);
    note(Path::staged);
    return finish(Status::ok);
  }
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
  if (in_use_ == kTaken) {
    leave(Status::withdrawn, {}, {}, now_ns(), Turn::middle, [](int) { return false; });
    return failure_.status;
  }
  return release(carry_out(pending_));
}

// Everybody arrived and called the same; every rank takes the same branch, because it looks at the same arrivals.
Status Communicator::carry_out(const Request& r) {
  const bool all_mapped = locate(r);
  if (r.algorithm == Algorithm::program) return run_program(r, all_mapped);
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
