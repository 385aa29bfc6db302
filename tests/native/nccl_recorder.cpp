// A profiler plugin that stands between NCCL and ours, passes every call on and writes each down: what NCCL really calls.
//
//   c++ -std=c++17 -O2 -fPIC -shared -Isrc/ringside/_core -Itests/native tests/native/nccl_recorder.cpp -o recorder.so
//
//   NCCL_PROFILER_PLUGIN      this library
//   RINGSIDE_RECORDED_PLUGIN  ours, which gets the calls
//   RINGSIDE_RECORD_DIR       where each process leaves a file, calls-vVERSION-rankRANK-PID.txt
//   RINGSIDE_RECORDED_MASK    events that NCCL is asked for besides those that ours wants; 4095: all of version 5
//
// The file has a line per call, in the order in which they came; the first one says what the file is. A call or a
// communicator is known by the line of its start or init, counted from 0; 0 is none, and -1 one of another process.
//
//   init     THREAD NS RESULT MASK ID NODES RANKS RANK NAME
//   start    THREAD NS GIVEN PARENT COMM RANK TYPE ...   what the union has of that type; GIVEN 0: ours gave no handle
//   stop     THREAD NS EVENT
//   state    THREAD NS EVENT STATE VALUE                 VALUE -: without arguments
//   finalize THREAD NS COMM
//   mask     THREAD NS MASK                              ours has changed what it wants
//   lost                                                 begun, and not written when the file was
//
// NCCL gets handles of ours for null exactly where ours gives none, unless the mask is wider: then it gets one for every
// event, so that what belongs to those that ours declines is seen too. Nothing is written to the disk until the last
// communicator is closed, or the process ends.
//
// NEWEST, a macro, is the newest version that is shown to NCCL: it speaks the older ones, too.
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <type_traits>

#include "nccl_published.hpp"
#include "nccl_ring.hpp"

#ifndef NEWEST
#define NEWEST 6
#endif

namespace {

// As many as the ring has room for, so that a recording can be played without anyone reading that.
constexpr uint32_t kMost = ringside::nccl::kRecords;

struct Call {
  std::atomic<bool> is_whole;
  void* handle;  // what ours gave for it
  char text[240];
};

Call calls[kMost];  // the first one stands for the file's first line
std::atomic<uint32_t> begun{1};

struct Opened {
  void* context;
  uint32_t at;
  bool is_open;
};

Opened opened[ringside::nccl::kCommunicators];
std::atomic<uint32_t> communicators{0};

std::mutex opening;
int version_of_nccl, owner, open_now, own_mask, wider;
std::atomic<int*> watched{nullptr};  // what ours writes its mask to
std::atomic<int> last_mask{0};
uint64_t begin_ns;

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1000000000 + uint64_t(now.tv_nsec) - begin_ns;
}

uint32_t thread_number() {
  static std::atomic<uint32_t> threads{0};
  thread_local const uint32_t number = threads.fetch_add(1);
  return number;
}

// The line of a call that begins; 0: there is no room.
uint32_t take() {
  const uint32_t at = begun.fetch_add(1);
  return at < kMost ? at : 0;
}

__attribute__((format(printf, 4, 5))) void write_down(uint32_t at, const char* what, uint64_t ns, const char* format, ...) {
  if (at == 0) return;
  Call& call = calls[at];
  const int begin = snprintf(call.text, sizeof call.text, "%s %u %llu ", what, thread_number(), (unsigned long long)ns);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(call.text + begin, sizeof call.text - size_t(begin), format, arguments);
  va_end(arguments);
  call.is_whole.store(true, std::memory_order_release);
}

// Handles of ours end with a kind, up to 6; those that NCCL gets, with 7. They name their process: under PXN some come from
// another one.
void* handle_of(uint32_t at) { return reinterpret_cast<void*>(uint64_t(at) << 32 | uint32_t(owner) << 3 | 7); }

long event_of(void* handle) {
  const auto number = reinterpret_cast<uint64_t>(handle);
  if (number == 0) return 0;
  const uint32_t at = uint32_t(number >> 32);
  return at > 0 && at < kMost && handle == handle_of(at) ? long(at) : -1;
}

void* ours_of(void* handle) {
  const long at = event_of(handle);
  return at > 0 ? calls[at].handle : handle;
}

long communicator_of(void* context) {
  if (context == nullptr) return 0;
  for (uint32_t at = communicators.load(std::memory_order_acquire); at-- > 0;)
    if (opened[at].context == context) return long(opened[at].at);
  return -1;
}

void note_mask() {
  int* const from = watched.load(std::memory_order_acquire);
  const int mask = from != nullptr ? __atomic_load_n(from, __ATOMIC_RELAXED) : 0;
  if (last_mask.load(std::memory_order_relaxed) == mask || last_mask.exchange(mask) == mask) return;
  write_down(take(), "mask", now_ns(), "%d", mask);
}

void write_file() {
  const char* const folder = getenv("RINGSIDE_RECORD_DIR");
  const char* const rank = getenv("RANK");
  if (folder == nullptr) return;
  const std::string path = std::string(folder) + "/calls-v" + std::to_string(version_of_nccl) + "-rank" +
                           (rank != nullptr ? rank : "") + "-" + std::to_string(owner) + ".txt";
  FILE* const file = fopen((path + ".part").c_str(), "we");
  if (file == nullptr) {
    perror(path.c_str());
    return;
  }
  const uint32_t all = begun.load(), kept = all < kMost ? all : kMost;
  fprintf(file, "nccl-calls 1 version %d wider %d left_out %u\n", version_of_nccl, wider, all - kept);
  for (uint32_t at = 1; at < kept; ++at)
    fprintf(file, "%s\n", calls[at].is_whole.load(std::memory_order_acquire) ? calls[at].text : "lost");
  if (fclose(file) != 0 || rename((path + ".part").c_str(), path.c_str()) != 0) perror(path.c_str());
}

__attribute__((destructor)) void at_exit() {
  if (owner == getpid() && begun.load() > 1) write_file();  // not in a forked child, which has its parent's calls
}

const char* shown(const char* text) { return text != nullptr && text[0] != 0 ? text : "-"; }

template <int version>
struct Recorder {
  using Profiler = std::conditional_t<version == 4, v4::Profiler, v5::Profiler>;
  using Descriptor = std::conditional_t<version == 4, v4::Descriptor, v5::Descriptor>;
  static inline Profiler* ours = nullptr;

  static bool find_ours(Logger log) {
    const char* const path = getenv("RINGSIDE_RECORDED_PLUGIN");
    void* const library = path != nullptr ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (library != nullptr) ours = static_cast<Profiler*>(dlsym(library, ("ncclProfiler_v" + std::to_string(version)).c_str()));
    if (ours == nullptr && log != nullptr)
      log(kWarn, 1, __func__, __LINE__, "PROFILER/Recorder: no plugin in RINGSIDE_RECORDED_PLUGIN=%s", shown(path));
    return ours != nullptr;
  }

  static int init(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks, int rank, Logger log) {
    const std::lock_guard<std::mutex> lock(opening);
    if (owner != getpid()) {  // the first one of a process, also of a forked one
      owner = getpid();
      version_of_nccl = version;
      begun.store(1);
      communicators.store(0);
      open_now = 0;
      for (Call& call : calls)
        if (call.is_whole.load()) call.is_whole.store(false);
      begin_ns = 0;
      begin_ns = now_ns();
      const char* const wanted = getenv("RINGSIDE_RECORDED_MASK");
      wider = wanted != nullptr ? atoi(wanted) : 0;
      Dl_info self;  // stays loaded, and so does what it has recorded: NCCL closes its plugin with the last communicator
      if (dladdr(calls, &self) != 0) dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
    }
    if (ours == nullptr && !find_ours(log)) return kSystemError;
    int* const written = wider != 0 && mask != nullptr ? &own_mask : mask;
    const uint32_t at = take();
    const uint64_t ns = now_ns();
    int result;
    if constexpr (version == 4)
      result = ours->init(context, written, name, id, nodes, ranks, rank, log);
    else
      result = ours->init(context, id, written, name, nodes, ranks, rank, log);
    const int wanted = written != nullptr ? __atomic_load_n(written, __ATOMIC_RELAXED) : 0;
    last_mask.store(wanted);
    watched.store(written, std::memory_order_release);
    if (written != mask) __atomic_store_n(mask, wanted | wider, __ATOMIC_RELAXED);
    const uint32_t number = communicators.load();
    if (result == kSuccess) {
      ++open_now;
      if (at != 0 && number < ringside::nccl::kCommunicators) {
        opened[number] = {*context, at, true};
        communicators.store(number + 1, std::memory_order_release);
      }
    }
    write_down(at, "init", ns, "%d %d %llu %d %d %d %s", result, wanted, (unsigned long long)id, nodes, ranks, rank,
               shown(name));
    return result;
  }

  static int init_v4(void** context, int* mask, const char* name, uint64_t id, int nodes, int ranks, int rank, Logger log) {
    return init(context, id, mask, name, nodes, ranks, rank, log);
  }

  static int start(void* context, void** handle, Descriptor* descriptor) {
    const uint32_t at = take();
    const uint64_t ns = now_ns();
    const int type = int(descriptor->type);
    const bool is_foreign = type == kProxyOp && descriptor->proxyOp.pid != owner;
    Descriptor sent = *descriptor;
    if (!is_foreign) sent.parentObj = ours_of(descriptor->parentObj);
    long group = 0;
    if constexpr (version > 4) {
      if (type == kColl) {
        group = event_of(sent.coll.parentGroup);
        sent.coll.parentGroup = ours_of(sent.coll.parentGroup);
      } else if (type == kP2p) {
        group = event_of(sent.p2p.parentGroup);
        sent.p2p.parentGroup = ours_of(sent.p2p.parentGroup);
      }
    }
    void* given = nullptr;
    const int result = ours->startEvent(context, &given, &sent);
    if (at != 0) calls[at].handle = given;
    *handle = at != 0 && (given != nullptr || wider != 0) ? handle_of(at) : given;
    char more[160] = "";
    describe(more, *descriptor, type, group);
    write_down(at, "start", ns, "%d %ld %ld %d %d%s", given != nullptr, is_foreign ? -1 : event_of(descriptor->parentObj),
               is_foreign ? -1 : communicator_of(context), descriptor->rank, type, more);
    note_mask();
    return result;
  }

  // What the union has of this type.
  template <size_t size>
  static void describe(char (&to)[size], const Descriptor& of, int type, long group) {
    const auto print = [&](auto... values) { snprintf(to, size, values...); };
    switch (type) {
      case kColl:
        print(" %llu %s %p %p %zu %d %s %d %d %s %s %ld", (unsigned long long)of.coll.seqNumber, shown(of.coll.func),
              of.coll.sendBuff, of.coll.recvBuff, of.coll.count, of.coll.root, shown(of.coll.datatype), of.coll.nChannels,
              of.coll.nWarps, shown(of.coll.algo), shown(of.coll.proto), group);
        break;
      case kP2p:
        print(" %s %p %zu %s %d %d %ld", shown(of.p2p.func), of.p2p.buff, of.p2p.count, shown(of.p2p.datatype), of.p2p.peer,
              of.p2p.nChannels, group);
        break;
      case kProxyOp:
        print(" %s %d %d %d %d %d", of.proxyOp.pid == owner ? "self" : "foreign", of.proxyOp.channelId, of.proxyOp.peer,
              of.proxyOp.nSteps, of.proxyOp.chunkSize, of.proxyOp.isSend);
        break;
      case kProxyStep:
        print(" %d", of.proxyStep.step);
        break;
      case kKernelCh:
        print(" %d %llu", of.kernelCh.channelId, (unsigned long long)of.kernelCh.pTimer);
        break;
      case kNetPlugin:
        print(" %lld", (long long)of.netPlugin.id);
        break;
    }
    if constexpr (version > 4) switch (type) {
        case kGroupApi:
          print(" %d %d", of.groupApi.graphCaptured, of.groupApi.groupDepth);
          break;
        case kCollApi:
          print(" %s %zu %s %d %p %d", shown(of.collApi.func), of.collApi.count, shown(of.collApi.datatype), of.collApi.root,
                of.collApi.stream, of.collApi.graphCaptured);
          break;
        case kP2pApi:
          print(" %s %zu %s %p %d", shown(of.p2pApi.func), of.p2pApi.count, shown(of.p2pApi.datatype), of.p2pApi.stream,
                of.p2pApi.graphCaptured);
          break;
        case kKernelLaunch:
          print(" %p", of.kernelLaunch.stream);
          break;
      }
  }

  static int stop(void* handle) {
    const uint32_t at = take();
    const uint64_t ns = now_ns();
    const int result = ours->stopEvent(ours_of(handle));
    write_down(at, "stop", ns, "%ld", event_of(handle));
    note_mask();
    return result;
  }

  static int state(void* handle, int state, v4::StateArgs* arguments) {
    const uint32_t at = take();
    const uint64_t ns = now_ns();
    const int result = ours->recordEventState(ours_of(handle), state, arguments);
    char value[24] = "-";
    if (arguments != nullptr && state >= kProxyCtrlIdle && state <= kProxyCtrlAppendEnd)
      snprintf(value, sizeof value, "%d", arguments->proxyCtrl.appendedProxyOps);
    else if (arguments != nullptr)  // bytes of a step, or the GPU's time
      snprintf(value, sizeof value, "%llu", (unsigned long long)arguments->kernelCh.pTimer);
    write_down(at, "state", ns, "%ld %d %s", event_of(handle), state, value);
    note_mask();
    return result;
  }

  static int finalize(void* context) {
    const uint32_t at = take();
    const uint64_t ns = now_ns();
    bool is_last = false;
    long closed;
    {  // before ours frees it: another thread's init may get the same pointer then
      const std::lock_guard<std::mutex> lock(opening);
      closed = communicator_of(context);
      for (uint32_t number = communicators.load(); number-- > 0;) {
        if (opened[number].context != context || !opened[number].is_open) continue;
        opened[number].is_open = false;
        is_last = --open_now == 0 && owner == getpid();  // a forked child may close what its parent has opened
      }
    }
    const int result = ours->finalize(context);
    write_down(at, "finalize", ns, "%ld", closed);
    const std::lock_guard<std::mutex> lock(opening);
    if (is_last) write_file();
    return result;
  }
};

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED v4::Profiler ncclProfiler_v4;
v4::Profiler ncclProfiler_v4{"Ringside-recorder", Recorder<4>::init_v4, Recorder<4>::start, Recorder<4>::stop,
                             Recorder<4>::state, Recorder<4>::finalize};
#if NEWEST >= 5
EXPORTED v5::Profiler ncclProfiler_v5;
v5::Profiler ncclProfiler_v5{"Ringside-recorder", Recorder<5>::init, Recorder<5>::start, Recorder<5>::stop,
                             Recorder<5>::state, Recorder<5>::finalize};
#endif
#if NEWEST >= 6
EXPORTED v5::Profiler ncclProfiler_v6;
v5::Profiler ncclProfiler_v6{"Ringside-recorder", Recorder<6>::init, Recorder<6>::start, Recorder<6>::stop,
                             Recorder<6>::state, Recorder<6>::finalize};
#endif
