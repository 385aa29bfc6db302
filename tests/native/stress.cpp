// Ranks as threads of one process, several groups at once, every kind of path in random order: for `make tsan` and
// `make asan`, which see all ranks' memory because all of them use one mapping.
//
//     stress [ranks] [groups] [rounds]
//
// Results are checked; beside them another thread drains every communicator's log, as the monitor does.
#include <cstdio>
#include <cstdlib>
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

}  // namespace

int main(int argc, char** argv) {
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
  return rows == size_t(ranks) * size_t(groups) * size_t(rounds) ? 0 : 1;
}
