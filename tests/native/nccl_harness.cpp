// Loads libnccl-profiler-ringside.so as NCCL does, and plays what NCCL calls: `nccl_harness LIBRARY MODE VERSION [NUMBER]`.
//
// What was played goes to stdout, a line for each: `comm ID RANKS RANK`, `call COMM FUNCTION NUMBER START STOP` (the GPU's
// clock; STOP 0: it never ended), and of a recording `sent COMM PEER IS_SEND STEPS BYTES` with the least and most nanoseconds
// that steps can have been in each of the states of `kWaits`. An expectation that fails ends with status 1.
#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "nccl_published.hpp"
#include "nccl_ring.hpp"

using ringside::nccl::Communicator;
using ringside::nccl::kCommunicators;
using ringside::nccl::kOpen;
using ringside::nccl::kRecords;
using ringside::nccl::Memory;
using ringside::nccl::Record;
using ringside::nccl::Ring;

#define EXPECT(what) \
  do { \
    if (!(what)) { \
      fprintf(stderr, "line %d: not so: %s\n", __LINE__, #what); \
      exit(1); \
    } \
  } while (0)

static std::mutex printing;
static int mask;
static int dies_at = -1;  // the process, at this call of the first that comes to it, or at this communicator
static void* const kNowhere = reinterpret_cast<void*>(uintptr_t(0xdead0000dead0000));  // of another process

static void log_line(int level, unsigned long, const char*, int, const char*, ...) { EXPECT(level == kWarn || level == kInfo); }

static uint64_t now_ns(clockid_t clock = CLOCK_MONOTONIC) {
  timespec now;
  clock_gettime(clock, &now);
  return uint64_t(now.tv_sec) * 1000000000 + uint64_t(now.tv_nsec);
}

// One communicator over one version of the interface.
struct Player {
  int version;
  v4::Profiler* old = nullptr;
  v5::Profiler* now = nullptr;
  void* context = nullptr;
  uint64_t id = 0;

  Player(void* library, int version) : version(version) {
    const std::string symbol = "ncclProfiler_v" + std::to_string(version);
    (version == 4 ? reinterpret_cast<void*&>(old) : reinterpret_cast<void*&>(now)) = dlsym(library, symbol.c_str());
    EXPECT(old != nullptr || now != nullptr);
  }
  int init(uint64_t of, int ranks, int rank, const char* name = "dp", int nodes = 2) {
    id = of;
    return old ? old->init(&context, &mask, name, id, nodes, ranks, rank, log_line)
               : now->init(&context, id, &mask, name, nodes, ranks, rank, log_line);
  }
  // An event of either version; `fill` sets the member of the union that it is of.
  template <typename Fill>
  void* start(int type, void* parent, void* of_context, Fill fill) {
    void* handle = kNowhere;
    const auto begin = [&](auto* profiler, auto descriptor) {
      memset(static_cast<void*>(&descriptor), 0xA5, sizeof descriptor);  // what it does not set means nothing
      descriptor.type = decltype(descriptor.type)(type);
      descriptor.parentObj = parent;
      descriptor.rank = 1;
      fill(descriptor);
      EXPECT(profiler->startEvent(of_context, &handle, &descriptor) == kSuccess);
    };
    old ? begin(old, v4::Descriptor{}) : begin(now, v5::Descriptor{});
    return handle;
  }
  void stop(void* handle) { EXPECT((old ? old->stopEvent(handle) : now->stopEvent(handle)) == kSuccess); }
  void state(void* handle, int state, uint64_t value, bool has_arguments = true) {
    v4::StateArgs args;
    if (state == kKernelChStop)
      args.kernelCh.pTimer = value;
    else
      args.proxyStep.transSize = value;
    v4::StateArgs* const given = has_arguments ? &args : nullptr;
    EXPECT((old ? old->recordEventState(handle, state, given) : now->recordEventState(handle, state, given)) == kSuccess);
  }
  void finalize() { EXPECT((old ? old->finalize(context) : now->finalize(context)) == kSuccess); }

  void* api(int type, bool is_captured = false) {
    return start(type, nullptr, context, [&](auto& descriptor) {
      if constexpr (sizeof(descriptor.type) > 1) {
        if (type == kCollApi)
          descriptor.collApi = {"AllReduce", 7, "ncclFloat32", 0, nullptr, is_captured};
        else
          descriptor.groupApi = {is_captured, 1};
      }
    });
  }
  void* collective(uint64_t number, int channels, void* parent) {
    return start(kColl, parent, context, [&](auto& descriptor) {
      auto& coll = descriptor.coll;
      coll.seqNumber = number;
      coll.func = "AllReduce";
      coll.sendBuff = coll.recvBuff = nullptr;
      coll.count = id;  // what the reader here knows it by
      coll.root = 0;
      coll.datatype = "ncclFloat32";
      coll.nChannels = uint8_t(channels);
      coll.nWarps = 16;
      coll.algo = "RING";
      coll.proto = "SIMPLE";
    });
  }
  void* message(int peer) {
    return start(kP2p, nullptr, context, [&](auto& descriptor) {
      auto& p2p = descriptor.p2p;
      p2p.func = "Send";
      p2p.buff = nullptr;
      p2p.datatype = "ncclBfloat16";
      p2p.count = 77;
      p2p.peer = peer;
      p2p.nChannels = 2;
    });
  }
  void* kernel(void* parent, int channel, uint64_t timer) {
    return start(kKernelCh, parent, context, [&](auto& descriptor) { descriptor.kernelCh = {uint8_t(channel), timer}; });
  }
  void* proxy(void* parent, int pid, int channel, int peer, bool sends) {
    return start(kProxyOp, parent, pid == getpid() ? context : kNowhere, [&](auto& descriptor) {
      descriptor.proxyOp = {pid, uint8_t(channel), peer, 2, 65536, sends};
    });
  }
  void* step(void* parent, int number) {
    return start(kProxyStep, parent, context, [&](auto& descriptor) { descriptor.proxyStep = {number}; });
  }
};

// A communicator's life on one thread: calls that overlap, ends out of order, some that never come. One of very many waits
// until there is room for it, and starts an event when it is closed already: to the peer that has its id for a number.
static void play(void* library, int version, uint64_t id, int calls, unsigned seed, bool is_of_many = false) {
  std::mt19937 random(seed);
  Player player(library, version);
  const int ranks = 2 + int(id % 3);
  while (player.init(id, ranks, 1) != kSuccess) {
    EXPECT(is_of_many && player.context == nullptr);
    usleep(100);
  }
  EXPECT((__atomic_load_n(&mask, __ATOMIC_RELAXED) & ~kProxyStep) == (kColl | kP2p | kKernelCh | kProxyOp));
  std::string told = "comm " + std::to_string(id) + " " + std::to_string(ranks) + " 1\n";
  std::vector<std::function<void()>> later;
  uint64_t gpu = 1000000 * id;
  void* call = nullptr;
  for (int number = 0; number < calls; ++number) {
    if (number == dies_at) raise(SIGKILL);
    const bool is_captured = number % 5 == 0 && version > 4;
    void* const group = player.api(kGroup);
    void* const api = version > 4 ? player.api(kCollApi, is_captured) : group;
    EXPECT(group != nullptr && api != nullptr);
    const int channels = 1 + int(random() % 4);
    call = player.collective(uint64_t(number), channels, api);
    EXPECT(call != nullptr);
    if (version > 4) player.stop(api);
    const bool ends = number % 7 != 3;
    uint64_t first = UINT64_MAX, last = 0;
    for (int channel = 0; channel < channels; ++channel) {
      const uint64_t started = gpu + random() % 500, stopped = started + 1000 + random() % 1000;
      void* const kernel = player.kernel(call, channel, started);
      void* const proxy = player.proxy(call, getpid(), channel, 0, true);
      EXPECT(kernel != nullptr && proxy != nullptr);
      player.state(proxy, kProxyOpInProgress, 0);
      void* const step = player.step(proxy, channel);
      player.state(step, kSendGpuWait, 0);
      player.state(step, kSendPeerWait, 0);
      player.state(step, kSendWait, 4096);
      first = std::min(first, started);
      last = std::max(last, stopped);
      later.push_back([&player, step, proxy] {
        player.stop(step);
        player.stop(proxy);
      });
      if (ends || channel > 0)
        later.push_back([&player, kernel, stopped] {
          player.state(kernel, kKernelChStop, stopped);
          player.stop(kernel);
        });
    }
    player.stop(call);  // enqueued
    player.stop(group);
    told += "call " + std::to_string(id) + " AllReduce " + std::to_string(number) + " " + std::to_string(first) + " " +
            std::to_string(ends ? last : 0) + "\n";
    // PXN: this process's proxy works for another one.
    void* const foreign = player.proxy(kNowhere, getpid() + 1, 0, 3, true);
    EXPECT(foreign != nullptr);
    player.stop(player.step(foreign, 0));
    player.stop(foreign);
    // what is not asked for, and null handles
    EXPECT(player.api(kKernelLaunch) == nullptr && player.api(kNetPlugin) == nullptr && player.api(kCeColl) == nullptr);
    EXPECT(player.kernel(nullptr, 0, 1) == nullptr && player.step(nullptr, 0) == nullptr);
    player.stop(nullptr);
    player.state(nullptr, kKernelChStop, 1);
    std::shuffle(later.begin(), later.end(), random);
    while (later.size() > 6) {
      later.back()();
      later.pop_back();
    }
    if (number % 4 == 0) player.stop(player.message(0));
    gpu += 5000;
  }
  const auto half = later.size() / 2;
  for (size_t i = 0; i < half; ++i) later[i]();
  player.finalize();  // with handles still open
  player.finalize();  // once more: another one may be in its place by now
  if (is_of_many) {
    void* const late = player.proxy(call, getpid(), 0, int(id), true);
    void* const step = player.step(late, 0);
    player.state(step, kSendWait, 4096);
    player.stop(step);
    player.stop(late);
  }
  for (size_t i = half; i < later.size(); ++i) later[i]();
  const std::lock_guard<std::mutex> lock(printing);
  fputs(told.c_str(), stdout);
  fflush(stdout);
}

// A rank of a job in which rank 1 comes last: its host calls late, or its GPU has had the call for long. All ranks begin at
// one moment of the monotonic clock, as processes of one host do.
static void work(void* library, int version, int calls, int rank, int ranks, bool is_gpu, uint64_t begin) {
  Player player(library, version);
  EXPECT(player.init(77, ranks, rank) == kSuccess);
  constexpr uint64_t kAhead = 5000000000, kEvery = 25000000, kLate = 10000000, kTogether = 1000000;
  const auto sleep_until = [](uint64_t then) {
    while (now_ns() < then) usleep(useconds_t((then - now_ns()) / 1000 + 1));
  };
  for (uint64_t number = 0; number < uint64_t(calls); ++number) {
    const uint64_t due = begin + number * kEvery, late = rank == 1 ? kLate : 0;
    sleep_until(due + (is_gpu ? 0 : late));
    void* const api = version > 4 ? player.api(kCollApi) : nullptr;
    void* const call = player.collective(number, 2, api);
    const uint64_t started = due + late + kAhead;
    void* const kernels[2] = {player.kernel(call, 0, started), player.kernel(call, 1, started + 100)};
    void* const proxy = player.proxy(call, getpid(), 0, (rank + 1) % ranks, true);
    void* const step = player.step(proxy, 0);
    player.state(step, kSendGpuWait, 0);
    player.state(step, kSendPeerWait, 0);
    player.state(step, kSendWait, 65536);
    usleep(rank == 2 ? 10000 : 200);  // its link is slow
    player.stop(step);
    player.stop(proxy);
    for (void* kernel : kernels) player.state(kernel, kKernelChStop, due + kLate + kTogether + kAhead);
  }
  player.finalize();
}

// This process's ring, where the plugin has mapped it first: the thread sanitizer knows memory by its address.
static Memory* find_ring() {
  char text[2048];
  FILE* const file = fopen("/proc/self/maps", "re");
  Memory* found = nullptr;
  while (found == nullptr && fgets(text, sizeof text, file) != nullptr)
    if (strstr(text, "/ringside-nccl-") != nullptr) found = reinterpret_cast<Memory*>(strtoull(text, nullptr, 16));
  fclose(file);
  EXPECT(found != nullptr);
  return found;
}

// Take all whole records out, as the monitor does; each collective names the communicator that has called it.
static void take(Memory* memory) {
  Ring& ring = memory->ring;
  uint64_t at = ring.tail.load(std::memory_order_relaxed);
  for (const uint64_t head = ring.head.load(std::memory_order_acquire); at < head; ++at) {
    const Record& record = memory->records[at % kRecords];
    if (record.sequence.load(std::memory_order_acquire) != at + 1) break;
    if (record.kind != ringside::nccl::kCollective) continue;
    const Communicator& caller = memory->communicators[record.communicator % kCommunicators];
    EXPECT(caller.made.load(std::memory_order_acquire) == uint64_t(record.communicator) + 1 && caller.id == record.count);
  }
  ring.tail.store(at, std::memory_order_release);
}

// Four threads make and close communicators in turn, two of them by another copy of the library; one stays open throughout.
static void remake(void* library, void* copy, int version, int count, bool reads) {
  Player lasting(library, version);
  EXPECT(lasting.init(1, 2, 0) == kSuccess);
  const auto call = [&](uint64_t number) {
    lasting.state(lasting.kernel(lasting.collective(number, 1, nullptr), 0, 5), kKernelChStop, 6);
    printf("call 1 AllReduce %d 5 6\n", int(number));
  };
  call(0);
  Memory* const memory = find_ring();
  std::atomic<bool> is_over{!reads};
  std::thread reader([&] {
    while (!is_over.load()) {
      take(memory);
      usleep(200);
    }
  });
  std::vector<std::thread> threads;
  for (int first = 0; first < 4; ++first)
    threads.emplace_back([=] {
      for (int id = 2 + first; id < 2 + count; id += 4) {
        if (id == dies_at) raise(SIGKILL);
        while (memory->ring.head.load() - memory->ring.tail.load() > kRecords / 2) usleep(100);
        play(first % 2 ? copy : library, version, uint64_t(id), 1, unsigned(id), true);
      }
    });
  for (auto& thread : threads) thread.join();
  is_over.store(true);
  reader.join();
  call(1);
  lasting.finalize();
}

// Nanoseconds an event, with several threads, while the ring is emptied.
static void cost(void* library, int version, uint64_t events, int threads) {
  Player first(library, version);
  EXPECT(first.init(1, 2, 0) == kSuccess);
  Ring* const ring = &find_ring()->ring;
  std::atomic<bool> is_over{false};
  std::thread reader([&] {
    while (!is_over.load()) {
      ring->tail.store(ring->head.load(), std::memory_order_release);
      usleep(200);
    }
  });
  std::vector<std::thread> writers;
  for (int at = 0; at < threads; ++at)
    writers.emplace_back([&] {
      Player player(library, version);
      EXPECT(player.init(2, 2, 0) == kSuccess);
      const uint64_t each = events / uint64_t(threads);
      const uint64_t wall = now_ns(), processor = now_ns(CLOCK_THREAD_CPUTIME_ID);
      for (uint64_t done = 0; done < each;) {
        void* const call = player.collective(done, 4, nullptr);
        void* kernels[4];
        for (int channel = 0; channel < 4; ++channel) kernels[channel] = player.kernel(call, channel, done);
        for (void* kernel : kernels) player.state(kernel, kKernelChStop, done);
        done += 9;
      }
      const uint64_t took = now_ns() - wall, ran = now_ns(CLOCK_THREAD_CPUTIME_ID) - processor;
      const std::lock_guard<std::mutex> lock(printing);
      printf("cost %.1f %.1f\n", double(took) / double(each), double(ran) / double(each));
    });
  for (auto& writer : writers) writer.join();
  is_over.store(true);
  reader.join();
  printf("dropped %llu\n", static_cast<unsigned long long>(ring->dropped.load()));
}

// A line of what nccl_recorder.cpp has written.
struct Line {
  std::string what;
  unsigned thread = 0;
  uint64_t ns = 0;
  std::vector<std::string> words;

  long number(size_t at) const { return strtol(words.at(at).c_str(), nullptr, 10); }
  uint64_t unsigned_number(size_t at) const { return strtoull(words.at(at).c_str(), nullptr, 10); }
  void* address(size_t at) const { return reinterpret_cast<void*>(strtoull(words.at(at).c_str(), nullptr, 16)); }
  const char* text(size_t at) const { return words.at(at) == "-" ? nullptr : words.at(at).c_str(); }
};

static std::vector<Line> read_recording(const char* file, int version) {
  std::ifstream in(file);
  std::string text;
  EXPECT(std::getline(in, text) && text.rfind("nccl-calls 1 version " + std::to_string(version) + " ", 0) == 0);
  std::vector<Line> lines(1);  // calls are known by their lines
  while (std::getline(in, text)) {
    std::istringstream words(text);
    Line line;
    words >> line.what >> line.thread >> line.ns;
    for (std::string word; words >> word;) line.words.push_back(word);
    lines.push_back(line);
  }
  return lines;
}

// Plays a recording: each thread's calls on a thread of its own, in the order in which all of them came, as fast as it goes
// or `speed` times as fast as they were.
class Replay {
 public:
  Replay(void* library, int version, std::vector<Line> of)
      : library(library),
        version(version),
        lines(std::move(of)),
        any(library, version),
        handles(lines.size()),
        times(lines.size()) {}

  void run(double speed) {
    std::map<unsigned, std::vector<size_t>> of_thread;
    std::vector<size_t> order;
    for (size_t at = 1; at < lines.size(); ++at)
      if (lines[at].what != "lost" && lines[at].what != "mask") order.push_back(at);  // masks are the plugin's own doing
    for (size_t turn = 0; turn < order.size(); ++turn) of_thread[lines[order[turn]].thread].push_back(turn);
    std::mutex playing;
    std::condition_variable played;
    size_t now = 0;
    const uint64_t begin = now_ns();
    std::vector<std::thread> threads;
    for (const auto& [thread, turns] : of_thread)
      threads.emplace_back([&, &turns = turns] {
        for (const size_t turn : turns) {
          std::unique_lock<std::mutex> lock(playing);
          played.wait(lock, [&] { return now == turn; });
          const size_t at = order[turn];
          const uint64_t due = speed > 0 ? begin + uint64_t(double(lines[at].ns) / speed) : 0;
          while (now_ns() < due) usleep(useconds_t((due - now_ns()) / 1000 + 1));
          times[at].first = now_ns();
          call(at);
          times[at].second = now_ns();
          ++now;
          played.notify_all();
        }
      });
    for (auto& thread : threads) thread.join();
  }

  // What a reader must find, from the recording alone.
  void print() const {
    struct Call {
      size_t at;
      int kernels = 0, open = 0;
      uint64_t first = UINT64_MAX, last = 0;
    };
    struct Sent {
      uint64_t steps = 0, bytes = 0, least[4] = {}, most[4] = {};
    };
    std::map<size_t, Call> calls;
    std::map<size_t, size_t> last_of_step;
    std::map<std::tuple<long, int, bool>, Sent> sent;  // communicator, peer
    const auto sent_by = [&](size_t step) -> Sent* {
      const long operation = lines[step].number(1);
      if (operation <= 0 || type_of(operation) != kProxyOp) return nullptr;
      const Line& line = lines[size_t(operation)];
      const bool is_foreign = line.words.at(5) == "foreign";
      const long call = line.number(1);
      if (!is_foreign && (call <= 0 || (type_of(call) != kColl && type_of(call) != kP2p))) return nullptr;
      return &sent[{is_foreign ? -1 : line.number(2), int(line.number(7)), line.number(10) != 0}];
    };
    const auto goes_on = [&](size_t step, size_t at) {  // from the last thing that was told of it
      Sent& to = *sent_by(step);
      const Line& before = lines[last_of_step.at(step)];
      const auto [begun, told] = times[last_of_step.at(step)];
      for (size_t wait = 0; wait < 4 && before.what == "state"; ++wait)
        if (before.number(1) == kWaits[wait]) {
          to.least[wait] += times[at].first - told;
          to.most[wait] += times[at].second - begun;
        }
      last_of_step[step] = at;
    };
    for (size_t at = 1; at < lines.size(); ++at) {
      const Line& line = lines[at];
      if (line.what == "init" && line.number(0) == kSuccess)
        printf("comm %s %s %s\n", line.words.at(2).c_str(), line.words.at(4).c_str(), line.words.at(5).c_str());
      const long of = line.what == "start" ? line.number(1) : line.what == "stop" || line.what == "state" ? line.number(0) : 0;
      const int type = type_of(line.what == "start" ? long(at) : of);
      if (line.what == "start" && type == kColl) calls[at].at = at;
      if (line.what == "start" && type == kKernelCh && calls.count(size_t(of))) {
        Call& call = calls[size_t(of)];
        ++call.kernels, ++call.open;
        call.first = std::min(call.first, line.unsigned_number(6));
      }
      if (line.what == "state" && type == kKernelCh && line.number(1) == kKernelChStop && line.text(2) != nullptr) {
        const auto call = calls.find(size_t(lines[size_t(of)].number(1)));
        if (call != calls.end()) {
          --call->second.open;
          call->second.last = std::max(call->second.last, line.unsigned_number(2));
        }
      }
      if (type != kProxyStep || sent_by(line.what == "start" ? at : size_t(of)) == nullptr) continue;
      if (line.what == "start") {
        ++sent_by(at)->steps;
        last_of_step[at] = at;
      } else {
        goes_on(size_t(of), at);
        if (line.what == "state" && (line.number(1) == kSendWait || line.number(1) == kRecvWait) && line.text(2) != nullptr)
          sent_by(size_t(of))->bytes += line.unsigned_number(2);
      }
    }
    for (const auto& [at, call] : calls) {
      const Line& line = lines[at];
      const bool has_ended = call.kernels > 0 && call.open <= 0 && call.kernels >= int(line.number(12));
      printf("call %s %s %s %llu %llu\n", id_of(line.number(2)), line.words.at(6).c_str(), line.words.at(5).c_str(),
             (unsigned long long)(call.kernels > 0 ? call.first : 0), (unsigned long long)(has_ended ? call.last : 0));
    }
    for (const auto& [key, of] : sent) {
      const auto [communicator, peer, is_send] = key;
      printf("sent %s %d %d %llu %llu", id_of(communicator), peer, is_send, (unsigned long long)of.steps,
             (unsigned long long)of.bytes);
      for (size_t wait = 0; wait < 4; ++wait)
        printf(" %llu %llu", (unsigned long long)of.least[wait], (unsigned long long)of.most[wait]);
      printf("\n");
    }
  }

 private:
  static constexpr int kWaits[4] = {kSendGpuWait, kSendPeerWait, kSendWait, kRecvWait};

  void* library;
  int version;
  std::vector<Line> lines;
  Player any;  // calls what names no communicator
  std::map<long, Player> players;
  std::vector<void*> handles;
  std::vector<std::pair<uint64_t, uint64_t>> times;  // just before and after each call

  int type_of(long at) const {  // 0: no event, or none that the plugin keeps
    const bool is_kept = at > 0 && lines[size_t(at)].what == "start" && lines[size_t(at)].number(0) != 0;
    return is_kept ? int(lines[size_t(at)].number(4)) : 0;
  }
  const char* id_of(long communicator) const {
    return communicator > 0 ? lines[size_t(communicator)].words.at(2).c_str() : "foreign";
  }
  void* handle_of(long event) const { return event < 0 ? kNowhere : handles[size_t(event)]; }
  void* context_of(long communicator) const {
    return communicator < 0 ? kNowhere : communicator == 0 ? nullptr : players.at(communicator).context;
  }

  void call(size_t at) {
    const Line& line = lines[at];
    if (line.what == "init") {
      Player& player = players.emplace(long(at), Player(library, version)).first->second;
      std::string name;
      for (size_t word = 6; word < line.words.size(); ++word) name += (word > 6 ? " " : "") + line.words[word];
      const int result = player.init(line.unsigned_number(2), int(line.number(4)), int(line.number(5)),
                                     name == "-" ? nullptr : name.c_str(), int(line.number(3)));
      EXPECT(result == line.number(0));
    } else if (line.what == "start") {
      start(at);
      EXPECT((handles[at] != nullptr) == (line.number(0) != 0));
    } else if (line.what == "stop") {
      any.stop(handle_of(line.number(0)));
    } else if (line.what == "state") {
      any.state(handle_of(line.number(0)), int(line.number(1)), line.unsigned_number(2), line.text(2) != nullptr);
    } else {
      EXPECT(line.what == "finalize");
      any.context = context_of(line.number(0));
      any.finalize();
    }
  }

  void start(size_t at) {
    const Line& line = lines[at];
    const int type = int(line.number(4));
    handles[at] = any.start(type, handle_of(line.number(1)), context_of(line.number(2)), [&](auto& descriptor) {
      descriptor.rank = int(line.number(3));
      constexpr bool is_v4 = sizeof descriptor.type == 1;
      if (type == kColl) {
        auto& coll = descriptor.coll;
        coll.seqNumber = line.unsigned_number(5), coll.func = line.text(6);
        coll.sendBuff = line.address(7), coll.recvBuff = line.address(8);
        coll.count = line.unsigned_number(9), coll.root = int(line.number(10)), coll.datatype = line.text(11);
        coll.nChannels = uint8_t(line.number(12)), coll.nWarps = uint8_t(line.number(13));
        coll.algo = line.text(14), coll.proto = line.text(15);
        if constexpr (!is_v4) coll.parentGroup = handle_of(line.number(16));
      } else if (type == kP2p) {
        auto& p2p = descriptor.p2p;
        p2p.func = line.text(5), p2p.buff = line.address(6), p2p.count = line.unsigned_number(7), p2p.datatype = line.text(8);
        p2p.peer = int(line.number(9)), p2p.nChannels = uint8_t(line.number(10));
        if constexpr (!is_v4) p2p.parentGroup = handle_of(line.number(11));
      } else if (type == kProxyOp) {
        const int pid = line.words.at(5) == "self" ? getpid() : getpid() + 1;
        descriptor.proxyOp = {pid,
                              uint8_t(line.number(6)),
                              int(line.number(7)),
                              int(line.number(8)),
                              int(line.number(9)),
                              int(line.number(10))};
      } else if (type == kProxyStep) {
        descriptor.proxyStep = {int(line.number(5))};
      } else if (type == kKernelCh) {
        descriptor.kernelCh = {uint8_t(line.number(5)), line.unsigned_number(6)};
      } else if (type == kNetPlugin) {
        descriptor.netPlugin = {line.number(5), nullptr};
      }
      if constexpr (!is_v4) {
        if (type == kGroupApi)
          descriptor.groupApi = {line.number(5) != 0, int(line.number(6))};
        else if (type == kCollApi)
          descriptor.collApi = {line.text(5), line.unsigned_number(6), line.text(7), int(line.number(8)), line.address(9),
                                line.number(10) != 0};
        else if (type == kP2pApi)
          descriptor.p2pApi = {line.text(5), line.unsigned_number(6), line.text(7), line.address(8), line.number(9) != 0};
        else if (type == kKernelLaunch)
          descriptor.kernelLaunch = {line.address(5)};
      }
    });
  }
};

int main(int argc, char** argv) {
  EXPECT(argc >= 4);
  const std::string path = argv[1], mode = argv[2];
  const int version = atoi(argv[3]), number = argc > 4 ? atoi(argv[4]) : 20;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  if (mode == "play") {
    play(library, version, 1, number, 1);
  } else if (mode == "threads" || mode == "killed") {
    if (mode == "killed") dies_at = number / 2;
    std::vector<std::thread> threads;
    for (unsigned id = 1; id <= 4; ++id) threads.emplace_back(play, library, version, id, number, id, false);
    for (auto& thread : threads) thread.join();
  } else if (mode == "again") {
    play(library, version, 1, number, 1);
    EXPECT(dlclose(library) == 0);
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    play(library, version, 2, number, 2);
    if (argc > 5) {  // another copy of it takes up the same ring
      void* const copy = dlopen(argv[5], RTLD_NOW | RTLD_LOCAL);
      EXPECT(copy != nullptr && copy != library);
      play(copy, version, 3, number, 3);
    }
  } else if (mode == "forked") {
    play(library, version, 1, number, 1);
    Player open(library, version);
    EXPECT(open.init(3, 2, 0) == kSuccess);
    const pid_t child = fork();
    if (child == 0) {
      open.finalize();  // it is the parent's: nothing comes of that, without a ring of its own and with one
      play(library, version, 2, number, 2);
      open.finalize();
      return 0;
    }
    int status = 0;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    EXPECT(find_ring()->communicators[1].last.load() & kOpen);
    open.finalize();
    EXPECT(!(find_ring()->communicators[1].last.load() & kOpen));
  } else if (mode == "refused") {
    Player player(library, version);
    EXPECT(player.init(1, 2, 0) == kSystemError && player.context == nullptr && mask == 0);
    EXPECT(player.collective(0, 1, nullptr) == nullptr);
    player.stop(nullptr);
    EXPECT(dlclose(library) == 0);
  } else if (mode == "full") {
    Player player(library, version);
    EXPECT(player.init(1, 2, 0) == kSuccess);
    void* const kernel = player.kernel(player.collective(0, 1, nullptr), 0, 5);
    for (uint64_t at = 2; at < kRecords; ++at) EXPECT(player.collective(at, 1, nullptr) != nullptr);
    for (uint64_t at = 0; at < 10; ++at) EXPECT(player.collective(at, 1, nullptr) == nullptr);
    player.state(kernel, kKernelChStop, 6);
    player.finalize();
    for (uint32_t at = 0; at < 2 * kCommunicators; ++at) {  // nothing is recorded of them: they wait for no reader
      Player more(library, version);
      EXPECT(more.init(2 + at, 2, 0) == kSuccess);
      more.finalize();
    }
  } else if (mode == "places") {
    std::vector<Player> players(kCommunicators, Player(library, version));
    for (auto& player : players) EXPECT(player.init(1, 2, 0) == kSuccess);
    Player next(library, version), last(library, version);
    EXPECT(next.init(2, 2, 0) == kSystemError && next.context == nullptr);
    players[9].finalize();
    EXPECT(next.init(2, 2, 0) == kSuccess && next.context != players[9].context);
    EXPECT(players[7].collective(0, 1, nullptr) != nullptr);
    players[7].finalize();
    EXPECT(last.init(3, 2, 0) == kSystemError);  // a record that was not taken out names it
    take(find_ring());
    EXPECT(last.init(3, 2, 0) == kSuccess && last.context != players[7].context);
  } else if (mode == "remade" || mode == "remade-killed") {
    if (mode == "remade-killed") dies_at = number;
    void* const copy = dlopen(argv[5], RTLD_NOW | RTLD_LOCAL);
    EXPECT(copy != nullptr && copy != library);
    remake(library, copy, version, number, argc > 6);
  } else if (mode == "mask") {
    Player player(library, version);
    EXPECT(player.init(1, 2, 0) == kSuccess && player.collective(0, 1, nullptr) != nullptr);
    player.stop(player.api(kKernelLaunch));  // the plugin asks for none, the recorder may
    printf("mask %d\n", mask);
  } else if (mode == "work") {
    work(library, version, number, atoi(argv[5]), atoi(argv[6]), strcmp(argv[7], "gpu") == 0,
         argc > 8 ? strtoull(argv[8], nullptr, 10) : now_ns());
  } else if (mode == "recorded") {  // VERSION FILE [SPEED]
    Replay replay(library, version, read_recording(argv[4], version));
    replay.run(argc > 5 ? atof(argv[5]) : 0);
    replay.print();
  } else if (mode == "cost") {
    cost(library, version, uint64_t(number), argc > 5 ? atoi(argv[5]) : 1);
  } else {
    EXPECT(!"a mode");
  }
  return 0;
}
