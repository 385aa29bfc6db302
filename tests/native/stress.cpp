// Ranks as threads of one process: for `make tsan` and `make asan`, which see all ranks' arenas because all of them use one
// mapping, and for `make stops`.
//
//     stress [ranks] [groups] [rounds]   several groups at once, every kind of path in random order, then ranks that give up
//     stress stops [ranks]               one rank stopped at every point of every path while the others go on without it
//
// Results are checked; beside them another thread drains every communicator's log, as the monitor does. A collective that
// somebody gives up fails on all ranks or on none, and the memory of whoever failed is its own from then on.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <random>
#include <thread>

#include "communicator.hpp"

using namespace ringside;

namespace {

constexpr size_t kStageBytes = 3 * 4096;

std::shared_ptr<Mapping> make_arena(int ranks) {
  const size_t bytes = ArenaView::bytes(ranks, kStageBytes);
  const int fd = make_memfd("ringside-stress", bytes);
  auto map = Mapping::of(fd, bytes);
  close(fd);
  Header& h = *reinterpret_cast<Header*>(map->base());
  h.magic = kArenaMagic;
  h.version = kArenaVersion;
  h.ranks = uint32_t(ranks);
  h.stage_bytes = kStageBytes;
  return map;
}

void check(bool fine, const char* what) {
  if (fine) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

Request request_of(Kind kind, std::vector<float>& x) {
  Request r;
  r.kind = kind;
  r.data = reinterpret_cast<unsigned char*>(x.data());
  r.count = x.size();
  return r;
}

// Every rank holds rank + 1 in all elements.
void all_reduce(Communicator& c, size_t n, bool posted) {
  std::vector<float> x(n, float(c.rank() + 1));
  const Request r = request_of(Kind::all_reduce, x);
  const bool small = n * sizeof(float) <= kInlineBytes;
  Status s = posted && small ? c.post(r) : c.all_reduce(r);
  if (posted && small && s == Status::ok) s = c.finish_posted();
  check(s == Status::ok, "status of all_reduce");
  const float sum = float(c.ranks() * (c.ranks() + 1) / 2);
  for (float v : x) check(v == sum, "sum");
}

std::vector<int64_t> bounds_of(int ranks, size_t lane) {
  std::vector<int64_t> bounds;
  for (int r = 0; r <= ranks; ++r) bounds.push_back(int64_t(lane) * r);
  return bounds;
}

void all_gather(Communicator& c, size_t lane) {
  const auto bounds = bounds_of(c.ranks(), lane);
  std::vector<float> x(lane, float(c.rank())), out(lane * size_t(c.ranks()), -1.0f);
  Request r = request_of(Kind::all_gather, x);
  r.count = out.size();
  r.out = reinterpret_cast<unsigned char*>(out.data());
  r.bounds = bounds.data();
  check(c.lanes(r) == Status::ok, "status of all_gather");
  for (size_t i = 0; i < out.size(); ++i) check(out[i] == float(i / lane), "gathered");
}

void reduce_scatter(Communicator& c, size_t lane) {
  const auto bounds = bounds_of(c.ranks(), lane);
  std::vector<float> x(lane * size_t(c.ranks()), 1.0f), out(lane, -1.0f);
  Request r = request_of(Kind::reduce_scatter, x);
  r.out = reinterpret_cast<unsigned char*>(out.data());
  r.bounds = bounds.data();
  check(c.lanes(r) == Status::ok, "status of reduce_scatter");
  for (float v : out) check(v == float(c.ranks()), "scattered");
}

// All ranks draw the same numbers, so they call the same things.
void run(Communicator& c, int rounds, unsigned seed) {
  std::mt19937 draw(seed);
  for (int i = 0; i < rounds; ++i) {
    const unsigned what = draw() % 6;
    const size_t n = 1 + draw() % (draw() % 2 ? 200 : 9000);
    if (what == 0) check(c.barrier() == Status::ok, "status of barrier");
    if (what == 1 || what == 2) all_reduce(c, n, false);
    if (what == 3) all_reduce(c, n, true);
    if (what == 4) all_gather(c, n);
    if (what == 5) reduce_scatter(c, n);
  }
}

// ---------------------------------------------------------------------------------------------- giving up

constexpr size_t kElements = 64 * kInlineBytes / sizeof(float);    // several blocks of a rank's slice
constexpr size_t kSomeElements = 3 * kInlineBytes / sizeof(float);  // more than a payload
constexpr size_t kFewElements = kInlineBytes / 4 / sizeof(float);  // several segments

// One rank of a small job whose tensors the peers have mapped, each at addresses of its own.
struct Rank {
  std::shared_ptr<Communicator> core;
  int fd = -1;
  std::shared_ptr<Mapping> memory;
  Status status = Status::exchange;
  std::atomic<bool> ended{false};

  ~Rank() { close(fd); }
  float* tensor() const { return reinterpret_cast<float*>(memory->base()); }
};

using Job = std::vector<std::unique_ptr<Rank>>;

Job make_job(int ranks, const Settings& settings) {
  const auto arena = make_arena(ranks);
  const size_t bytes = kElements * sizeof(float);
  Job job;
  for (int r = 0; r < ranks; ++r) {
    job.push_back(std::make_unique<Rank>());
    Rank& rank = *job.back();
    rank.core = std::make_shared<Communicator>(arena, r, ranks, std::vector<int>(size_t(ranks), -1), settings);
    rank.fd = make_memfd("ringside-stress", bytes);
    rank.memory = Mapping::of(rank.fd, bytes);
    rank.core->adopt_region(rank.memory->base(), bytes, true, rank.fd, rank.memory);
    Program program{1, 1, 1, {}};  // everybody adds up everything
    Instruction all{0, 0, false, true, {}, {}, {}};
    for (int q = 0; q < ranks; ++q) {
      all.sources.push_back(q);
      if (q != r) all.fetched.push_back({q, 0});
    }
    program.instructions.push_back(all);
    rank.core->add_program(program);
  }
  for (auto& rank : job) {
    for (int q = 0; q < ranks; ++q) {
      if (q == rank->core->rank()) continue;
      auto theirs = Mapping::of(job[size_t(q)]->fd, bytes);
      unsigned char* base = theirs->base();
      rank->core->add_region(q, 0, base, bytes, std::move(theirs), false);
    }
  }
  return job;
}

const char* const kPaths[] = {"barrier", "one_shot", "posted",       "push",         "streamed",     "reduce",  "staged",
                              "program", "inline",   "mapped lanes", "staged lanes", "several shots", "nothing"};

// Carry a collective out over one of the paths; check what it gives where it returns ok.
Status collective(Rank& rank, const std::string& path) {
  Communicator& c = *rank.core;
  const int ranks = c.ranks();
  const bool mapped = path == "push" || path == "streamed" || path == "reduce" || path == "mapped lanes";
  const bool lanes = path == "inline" || path == "mapped lanes" || path == "staged lanes";
  size_t n = path == "one_shot" || path == "posted" || path == "inline" ? 60 : path == "nothing" ? 0 : kElements;
  if (path == "several shots") n = kSomeElements;
  if (path == "staged" || path == "program" || path == "staged lanes") n = kFewElements;
  if (lanes) n = n / size_t(ranks);
  std::vector<float> own(mapped ? 0 : n), out(lanes ? n * size_t(ranks) : 0);
  float* x = mapped ? rank.tensor() : own.data();
  std::fill(x, x + n, float(c.rank() + 1));
  const auto bounds = bounds_of(ranks, n);
  Request r;
  r.kind = Kind::all_reduce;
  r.data = reinterpret_cast<unsigned char*>(x);
  r.count = n;
  if (path == "barrier") return c.barrier();
  if (path == "posted") {
    const Status s = c.post(r);
    return s == Status::ok ? c.finish_posted() : s;
  }
  if (lanes) {
    r.kind = Kind::all_gather;
    r.count = out.size();
    r.out = reinterpret_cast<unsigned char*>(out.data());
    r.bounds = bounds.data();
    const Status s = c.lanes(r);
    for (size_t i = 0; s == Status::ok && i < out.size(); ++i) check(out[i] == float(i / n + 1), path.c_str());
    return s;
  }
  r.algorithm = path == "several shots" ? Algorithm::one_shot : path == "program" ? Algorithm::program : Algorithm::direct;
  if (path == "one_shot") r.algorithm = Algorithm::automatic;
  r.program = path == "program" ? 0 : -1;
  r.root = path == "reduce" ? 1 : -1;
  if (path == "reduce") r.kind = Kind::reduce;
  const Status s = c.all_reduce(r);
  for (size_t i = 0; s == Status::ok && (r.root < 0 || r.root == c.rank()) && i < n; ++i)
    check(x[i] == float(ranks * (ranks + 1) / 2), path.c_str());
  return s;
}

Settings hurried(const std::string& path, uint64_t timeout_ms) {
  Settings settings;
  settings.patience = settings.background = {20, 2};
  settings.segment_bytes = 4096;
  settings.stream_bytes = path == "streamed" ? 1 : ~size_t(0);
  settings.timeout_ns = timeout_ms * 1000000;
  return settings;
}

// All finished, or all failed; and what a rank wrote into its tensor after it had failed is still there.
void check_ends(const Job& job, const std::string& path) {
  for (const auto& rank : job) {
    if ((rank->status == Status::ok) != (job[0]->status == Status::ok)) {
      for (const auto& each : job) std::fprintf(stderr, "rank %d: status %d\n", each->core->rank(), int(each->status));
      check(false, ("some finished and some failed: " + path).c_str());
    }
    for (size_t i = 0; rank->status != Status::ok && i < kElements; ++i) check(rank->tensor()[i] == 7.0f, "a late write");
  }
}

void end(Rank& rank, Status status) {
  rank.status = status;
  if (status != Status::ok) std::fill(rank.tensor(), rank.tensor() + kElements, 7.0f);
  rank.ended = true;
}

void wait_for_others(const Job& job, int but) {
  for (const auto& rank : job)
    while (rank->core->rank() != but && !rank->ended) usleep(200);
}

// Stop rank `victim` at its `at`th point until all others have ended; they give up where they need it. With `hasty` it is the
// victim that gives up where it has to wait, and one of the others comes only when it has been stopped, or has ended.
// False: it has no such point.
bool stop_once(const std::string& path, int ranks, int victim, int at, bool hasty) {
  Job job = make_job(ranks, hurried(path, 20000));
  std::atomic<uint64_t> stopped{0};  // when
  Rank& one = *job[size_t(victim)];
  int points = 0;
  one.core->at_stop = [&] {
    if (++points != at) return;
    stopped = now_ns();
    wait_for_others(job, victim);
  };
  if (hasty) one.core->interrupted = [] { return true; };
  const int late = hasty ? (victim + 1) % ranks : -1;
  std::vector<std::thread> threads;
  for (const auto& rank : job) {
    if (rank->core->rank() != victim)
      rank->core->interrupted = [&] { return stopped != 0 && now_ns() > stopped + (hasty ? 15000000 : 0); };
    threads.emplace_back([&, r = rank.get()] {
      while (r->core->rank() == late && stopped == 0 && !one.ended) usleep(200);
      end(*r, collective(*r, path));
    });
  }
  for (auto& t : threads) t.join();
  check_ends(job, path);
  for (const auto& rank : job) rank->core->at_stop = nullptr;
  return stopped != 0;
}

int stop_everywhere(int ranks) {
  for (const std::string path : kPaths) {
    int cases = 0;
    for (int victim = 0; victim < ranks; ++victim)
      for (const bool hasty : {false, true})
        for (int at = 1; stop_once(path, ranks, victim, at, hasty); ++at) ++cases;
    std::printf("%s: stopped at %d points\n", path.c_str(), cases);
    check(cases >= ranks, "a path without points");
  }
  return 0;
}

// Ranks that dawdle anywhere and give up soon: each collective ends alike on all of them.
void give_up_at_random(int ranks, int episodes) {
  std::mt19937 draw(7);
  int failed = 0;
  for (int episode = 0; episode < episodes; ++episode) {
    const std::string path = kPaths[draw() % (sizeof kPaths / sizeof *kPaths)];
    Job job = make_job(ranks, hurried(path, 1 + draw() % 12));
    std::vector<std::thread> threads;
    for (const auto& rank : job) {
      rank->core->at_stop = [own = std::make_shared<std::mt19937>(draw())] {
        if ((*own)() % 8 == 0) usleep((*own)() % 6000);
      };
      rank->core->interrupted = [own = std::make_shared<std::mt19937>(draw())] { return (*own)() % 4 == 0; };
      threads.emplace_back([&path, r = rank.get()] { end(*r, collective(*r, path)); });
    }
    for (auto& t : threads) t.join();
    check_ends(job, path);
    failed += job[0]->status != Status::ok;
    for (const auto& rank : job) rank->core->at_stop = nullptr;
  }
  std::printf("%d of %d collectives were given up\n", failed, episodes);
  check(0 < failed && failed < episodes, "nothing to choose from");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "stops") == 0) return stop_everywhere(argc > 2 ? atoi(argv[2]) : 3);
  const int ranks = argc > 1 ? atoi(argv[1]) : 3, groups = argc > 2 ? atoi(argv[2]) : 2;
  const int rounds = argc > 3 ? atoi(argv[3]) : 400;
  std::vector<std::shared_ptr<Communicator>> all;
  std::vector<std::thread> threads;
  std::atomic<int> left{ranks * groups};
  for (int g = 0; g < groups; ++g) {
    const auto arena = make_arena(ranks);
    for (int r = 0; r < ranks; ++r) {
      Settings settings;
      settings.patience = settings.background = {20, 2};
      settings.segment_bytes = 4096;
      all.push_back(std::make_shared<Communicator>(arena, r, ranks, std::vector<int>(size_t(ranks), -1), settings));
      threads.emplace_back([c = all.back(), rounds, g, &left] {
        run(*c, rounds, unsigned(g));
        --left;
      });
    }
  }
  size_t rows = 0;
  while (left > 0) {
    for (const auto& c : all) rows += c->drain().size() / c->log_width();
    std::this_thread::yield();
  }
  for (auto& t : threads) t.join();
  for (const auto& c : all) rows += c->drain().size() / c->log_width();
  for (const auto& c : all) c->close();
  std::printf("%d ranks in %d groups, %d rounds: %zu rows in the logs\n", ranks, groups, rounds, rows);
  check(rows == size_t(ranks) * size_t(groups) * size_t(rounds), "rows of the log");
  give_up_at_random(ranks, rounds / 4);
  return 0;
}
