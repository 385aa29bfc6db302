// libnccl-profiler-ringside.so: NCCL's events go into a ring in shared memory (nccl_ring.hpp). NCCL opens it by itself
// where NCCL_PROFILER_PLUGIN says so; nothing of it knows of Python or CUDA.
//
// Every event of NCCL is a record of its own, and a handle is a number, not an address: nothing has to be kept until an
// event ends, which may never be, and the handles and contexts that come from another process (PXN) cannot be followed by
// mistake. After `init` there is no lock, no memory is asked for, and a full ring drops what is new and counts it.
//
// The library stays loaded after dlclose (it is linked with -z nodelete), so a late call finds its code, and what opens it
// again finds its state.
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "nccl_interface.hpp"
#include "nccl_ring.hpp"

namespace ringside::nccl {

namespace {

constexpr int kMask = kColl | kP2p | kKernelCh | kProxyOp;
constexpr uint64_t kSecond = 1000000000;
constexpr uint64_t kSampleEvery = 30;  // seconds; in one of so many the proxies' steps are recorded

pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
std::atomic<Memory*> memory{nullptr};
std::atomic<int*> mask{nullptr};  // NCCL's, which it reads for each call
std::atomic<bool> with_steps{false};
bool always_steps = false;

uint64_t clock_ns(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return uint64_t(now.tv_sec) * kSecond + uint64_t(now.tv_nsec);
}

// The 22nd field of a process's stat in /proc; 0: not known. A process is told by it and its number.
uint64_t process_started(const char* file) {
  char text[1024];
  const int fd = open(file, O_RDONLY | O_CLOEXEC);
  const ssize_t size = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
  if (fd >= 0) close(fd);
  text[size > 0 ? size : 0] = 0;
  const char* at = strrchr(text, ')');  // the second field is the program's name, in brackets
  for (int field = 2; at != nullptr && field < 22; ++field) at = strchr(at + 1, ' ');
  return at != nullptr ? strtoull(at + 1, nullptr, 10) : 0;
}

bool is_running(int pid, uint64_t started) {
  char file[64];
  snprintf(file, sizeof file, "/proc/%d/stat", pid);
  const uint64_t found = process_started(file);
  return found != 0 ? found == started : kill(pid, 0) == 0 || errno != ESRCH;
}

// Remove this user's rings of processes that have ended: in the default folder nothing else does.
void remove_dead(const char* folder) {
  DIR* const entries = opendir(folder);
  if (entries == nullptr) return;
  while (const dirent* const entry = readdir(entries)) {
    int pid = 0, end = 0;
    unsigned long long started = 0;
    struct stat status;
    if (sscanf(entry->d_name, "ringside-nccl-%d-%llu%n", &pid, &started, &end) != 2 || entry->d_name[end] != 0) continue;
    if (pid <= 0 || is_running(pid, started)) continue;
    if (fstatat(dirfd(entries), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (S_ISREG(status.st_mode) && status.st_uid == geteuid()) unlinkat(dirfd(entries), entry->d_name, 0);
  }
  closedir(entries);
}

// A number in a variable of the environment; -1: there is none.
int number_of(const char* name) {
  const char* const text = getenv(name);
  if (text == nullptr || text[0] == 0) return -1;
  char* end = nullptr;
  const long number = strtol(text, &end, 10);
  return *end == 0 && number >= 0 && number <= INT32_MAX ? int(number) : -1;
}

// Make this process's ring, or take up the one that another copy of this library has made; null: errno says why not.
Memory* map_ring() {
  const char* folder = getenv("RINGSIDE_NCCL_DIR");
  if (folder == nullptr || folder[0] == 0) {
    folder = "/dev/shm";
    remove_dead(folder);
  }
  const uint64_t started = process_started("/proc/self/stat");
  char path[512];
  if (snprintf(path, sizeof path, "%s/ringside-nccl-%d-%llu", folder, int(getpid()), (unsigned long long)started) >=
      int(sizeof path)) {
    errno = ENAMETOOLONG;
    return nullptr;
  }
  rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < sizeof(Memory)) {
    errno = EFBIG;  // to try would end the process
    return nullptr;
  }
  int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  const bool is_new = fd >= 0;
  if (!is_new && errno == EEXIST) fd = open(path, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return nullptr;
  int error = 0;
  struct stat status;
  struct statvfs space;
  if (is_new) {
    // Memory that is not there when it is written ends the process, so all of it is taken now; half of what is free is
    // left to others.
    if (fstatvfs(fd, &space) == 0 && space.f_bavail * space.f_frsize / 2 < sizeof(Memory)) error = ENOSPC;
    if (error == 0) error = posix_fallocate(fd, 0, sizeof(Memory));
  } else if (fstat(fd, &status) != 0 || status.st_uid != geteuid() || size_t(status.st_size) != sizeof(Memory)) {
    error = EEXIST;
  }
  void* mapped = MAP_FAILED;
  if (error == 0) {
    mapped = mmap(nullptr, sizeof(Memory), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) error = errno;
  }
  close(fd);
  if (error != 0 && is_new) unlink(path);
  if (error != 0) {
    errno = error;
    return nullptr;
  }
  auto* const made = static_cast<Memory*>(mapped);
  Ring& ring = made->ring;
  if (is_new) {
    ring.process_started = started;
    ring.unix_ns = int64_t(clock_ns(CLOCK_REALTIME) - clock_ns(CLOCK_MONOTONIC));
    ring.pid = getpid();
    ring.global_rank = number_of("RANK");
    ring.records = kRecords;
    ring.magic.store(kRingMagic, std::memory_order_release);
  } else if (ring.magic.load(std::memory_order_acquire) != kRingMagic || ring.pid != getpid()) {
    munmap(mapped, sizeof(Memory));
    errno = EEXIST;
    return nullptr;
  }
  return made;
}

template <size_t size>
void copy_text(char (&to)[size], const char* from) {
  if (from != nullptr) memcpy(to, from, strnlen(from, size - 1));
}

// Take the place of a communicator that is closed and no longer named by a record that the reader has yet to take out, or
// one that was never used; null: there is none. Copies of this library in one process do so beside each other.
Communicator* take_place(Memory* ring) {
  const uint64_t taken = ring->ring.tail.load(std::memory_order_acquire);
  const uint32_t begin = ring->ring.communicators.load(std::memory_order_relaxed);  // in turn: numbers last longer
  for (uint32_t at = 0; at < kCommunicators; ++at) {
    Communicator& place = ring->communicators[(begin + at) % kCommunicators];
    uint64_t last = place.last.load(std::memory_order_relaxed);
    if (last <= taken && place.last.compare_exchange_strong(last, kOpen, std::memory_order_acquire)) return &place;
  }
  return nullptr;
}

int init(uint32_t interface, void** context, uint64_t id, int* nccl_mask, const char* name, int ranks, int rank, Logger log) {
  pthread_mutex_lock(&init_lock);
  Memory* ring = memory.load(std::memory_order_relaxed);
  if (ring == nullptr || ring->ring.pid != getpid()) {  // a forked child has a ring of its own
    ring = map_ring();
    if (ring != nullptr) {
      const char* steps = getenv("RINGSIDE_NCCL_STEPS");
      always_steps = steps != nullptr && strcmp(steps, "1") == 0;
      memory.store(ring, std::memory_order_release);
    }
  }
  pthread_mutex_unlock(&init_lock);
  if (ring == nullptr) {
    if (log != nullptr)
      log(kLogWarn, kLogInit, __func__, __LINE__, "PROFILER/Ringside: no ring in shared memory: %s", strerror(errno));
    return kSystemError;
  }
  Communicator* const place = take_place(ring);
  if (place == nullptr) {
    if (log != nullptr)
      log(kLogWarn, kLogInit, __func__, __LINE__, "PROFILER/Ringside: no room: %u communicators are open or not read yet",
          kCommunicators);
    return kSystemError;
  }
  const uint64_t before = place->made.exchange(0, std::memory_order_acq_rel);  // whoever reads it meanwhile sees that
  const uint64_t number = before == 0 ? uint64_t(place - ring->communicators) : (before - 1 + kCommunicators) % kNumbers;
  place->first.store(ring->ring.head.load(std::memory_order_relaxed), std::memory_order_relaxed);
  place->last.store(kOpen | (number + 1), std::memory_order_relaxed);
  place->id = id;
  place->ranks = ranks;
  place->rank = rank;
  memset(place->name, 0, sizeof place->name);
  copy_text(place->name, name);
  place->made.store(number + 1, std::memory_order_release);
  ring->ring.communicators.fetch_add(1, std::memory_order_release);
  ring->ring.interface.store(interface, std::memory_order_relaxed);
  with_steps.store(always_steps, std::memory_order_relaxed);
  if (nccl_mask != nullptr) __atomic_store_n(nccl_mask, always_steps ? kMask | kProxyStep : kMask, __ATOMIC_RELAXED);
  mask.store(nccl_mask, std::memory_order_release);
  if (context != nullptr) *context = reinterpret_cast<void*>(uintptr_t(getpid()) << 32 | number);
  if (log != nullptr) log(kLogInfo, kLogInit, __func__, __LINE__, "PROFILER/Ringside: recording, interface v%u", interface);
  return kSuccess;
}

int init_v4(void** context, int* mask, const char* name, uint64_t id, int, int ranks, int rank, Logger log) {
  return init(4, context, id, mask, name, ranks, rank, log);
}

template <uint32_t version>
int init_v5(void** context, uint64_t id, int* mask, const char* name, int, int ranks, int rank, Logger log) {
  return init(version, context, id, mask, name, ranks, rank, log);
}

// Add a record; return its number plus one, 0: there is no room.
uint64_t add(Memory* ring, Record& record) {
  uint64_t at = ring->ring.head.load(std::memory_order_relaxed);
  do {
    // Below 0 where others have added, and the reader has taken out, since `at` was read: it is read again then.
    if (int64_t(at - ring->ring.tail.load(std::memory_order_acquire)) >= int64_t(kRecords)) {
      ring->ring.dropped.fetch_add(1, std::memory_order_relaxed);
      return 0;
    }
  } while (!ring->ring.head.compare_exchange_weak(at, at + 1, std::memory_order_relaxed));
  Record& slot = ring->records[at % kRecords];
  constexpr size_t kept = sizeof slot.sequence;
  memcpy(reinterpret_cast<char*>(&slot) + kept, reinterpret_cast<const char*>(&record) + kept, sizeof slot - kept);
  slot.sequence.store(at + 1, std::memory_order_release);
  return at + 1;
}

void* handle_of(uint64_t number, Kind kind) {
  return number == 0 ? nullptr : reinterpret_cast<void*>(uintptr_t(number << kKindBits | kind));
}

Kind kind_of(void* handle) { return Kind(reinterpret_cast<uintptr_t>(handle) & ((1 << kKindBits) - 1)); }

// In one second of so many NCCL is asked for the proxies' steps.
void sample_steps(uint64_t now) {
  const bool wanted = always_steps || now / kSecond % kSampleEvery == 0;
  if (wanted == with_steps.load(std::memory_order_relaxed)) return;
  with_steps.store(wanted, std::memory_order_relaxed);
  int* const nccl_mask = mask.load(std::memory_order_acquire);
  if (nccl_mask != nullptr) __atomic_store_n(nccl_mask, wanted ? kMask | kProxyStep : kMask, __ATOMIC_RELAXED);
}

template <class Descriptor>
int start(void* context, void** handle, Descriptor* descriptor) {
  *handle = nullptr;
  Memory* const ring = memory.load(std::memory_order_acquire);
  if (ring == nullptr || context == nullptr) return kSuccess;
  Record record{};
  const auto parent = reinterpret_cast<uintptr_t>(descriptor->parent);
  record.handle = parent;
  record.communicator = uint32_t(reinterpret_cast<uintptr_t>(context));
  record.what = kStarted;
  switch (int(descriptor->type)) {
    case kColl:
      record.kind = kCollective;
      record.handle = 0;
      record.number = descriptor->coll.sequence;
      record.count = descriptor->coll.count;
      record.peer = descriptor->coll.root;
      record.channels = descriptor->coll.channels;
      copy_text(record.func, descriptor->coll.func);
      copy_text(record.datatype, descriptor->coll.datatype);
      copy_text(record.algorithm, descriptor->coll.algorithm);
      copy_text(record.protocol, descriptor->coll.protocol);
      break;
    case kP2p:
      record.kind = kMessage;
      record.handle = 0;
      record.count = descriptor->p2p.count;
      record.peer = descriptor->p2p.peer;
      record.channels = descriptor->p2p.channels;
      copy_text(record.func, descriptor->p2p.func);
      copy_text(record.datatype, descriptor->p2p.datatype);
      break;
    case kKernelCh:
      record.kind = kKernelChannel;
      record.channel = descriptor->kernel.channel;
      record.gpu_ns = descriptor->kernel.timer;
      break;
    case kProxyOp:
      record.kind = kProxyOperation;
      record.channel = descriptor->proxy_op.channel;
      record.peer = descriptor->proxy_op.peer;
      record.count = uint64_t(descriptor->proxy_op.chunk_size);
      if (descriptor->proxy_op.is_send) record.flags |= kSends;
      if (descriptor->proxy_op.pid != ring->ring.pid) {  // its parent, and its context, are of that process
        record.flags |= kForeign;
        record.communicator = UINT32_MAX;
      }
      break;
    case kProxyStep:
      record.kind = kProxyNetworkStep;
      record.number = uint64_t(descriptor->proxy_step);
      break;
    // A call of the API has no record: its handle tells when it came. NCCL says of a collective that it starts when its
    // kernel is launched already, and of one in a captured graph at each launch of that.
    case kCollApi:
    case kP2pApi:
      if constexpr (std::is_same_v<Descriptor, DescriptorV5>) {
        const bool is_captured = descriptor->type == kCollApi ? descriptor->coll_api.is_captured : descriptor->p2p_api.is_captured;
        *handle = handle_of(clock_ns(CLOCK_MONOTONIC) << 1 | is_captured, kCall);
      }
      return kSuccess;
    case kGroup:  // NCCL numbers the collectives of a captured graph only where a group or call has a handle
    case kGroupApi:
      *handle = handle_of(1, kNoKind);
      return kSuccess;
    default:
      return kSuccess;
  }
  // What belongs to an event that was dropped is of no use.
  if (record.kind != kCollective && record.kind != kMessage && parent == 0 && !(record.flags & kForeign)) return kSuccess;
  record.host_ns = clock_ns(CLOCK_MONOTONIC);
  if (record.kind == kCollective || record.kind == kMessage) {
    sample_steps(record.host_ns);
    if (kind_of(descriptor->parent) == kCall && parent >> kKindBits & 1) {
      record.flags = kCaptured;
    } else if (kind_of(descriptor->parent) == kCall) {
      record.flags = kCalled;
      record.host_ns = parent >> (kKindBits + 1);
    }
  }
  *handle = handle_of(add(ring, record), Kind(record.kind));
  return kSuccess;
}

int add_change(void* handle, What what, int state, uint64_t gpu_ns, uint64_t count) {
  Memory* const ring = memory.load(std::memory_order_acquire);
  if (ring == nullptr) return kSuccess;
  Record record{};
  record.host_ns = clock_ns(CLOCK_MONOTONIC);
  record.handle = reinterpret_cast<uintptr_t>(handle);
  record.gpu_ns = gpu_ns;
  record.count = count;
  record.kind = kind_of(handle);
  record.what = what;
  record.state = uint8_t(state);
  add(ring, record);
  return kSuccess;
}

// A collective's or message's means that it is enqueued, and a kernel's is told by its state: only proxies stop.
int stop(void* handle) {
  const Kind kind = kind_of(handle);
  if (kind != kProxyOperation && kind != kProxyNetworkStep) return kSuccess;
  return add_change(handle, kStopped, 0, 0, 0);
}

int change(void* handle, int state, StateArguments* arguments) {
  const Kind kind = kind_of(handle);
  if (kind == kKernelChannel && state == kKernelChStop && arguments != nullptr)
    return add_change(handle, kStopped, state, arguments->timer, 0);
  if (kind == kProxyNetworkStep)
    return add_change(handle, kChanged, state, 0, arguments != nullptr ? arguments->bytes : 0);
  return kSuccess;
}

// Handles may still be open, and what comes for them is recorded: it names an earlier record, not the communicator. A start
// that comes late names a number that nobody else gets.
int finalize(void* context) {
  Memory* const ring = memory.load(std::memory_order_acquire);
  const auto of = reinterpret_cast<uintptr_t>(context);
  // A forked child has its parent's contexts, and at first the parent's ring: it closes nothing there.
  if (ring == nullptr || int(of >> 32) != getpid() || ring->ring.pid != getpid()) return kSuccess;
  Communicator& closed = ring->communicators[uint32_t(of) % kCommunicators];
  const uint64_t head = ring->ring.head.load(std::memory_order_relaxed);
  const uint64_t last = head == closed.first.load(std::memory_order_relaxed) ? 0 : head;
  uint64_t expected = kOpen | (uint64_t(uint32_t(of)) + 1);  // else it was closed before
  closed.last.compare_exchange_strong(expected, last, std::memory_order_acq_rel);
  return kSuccess;
}

}  // namespace

}  // namespace ringside::nccl

#define EXPORTED extern "C" __attribute__((visibility("default")))
using namespace ringside::nccl;
EXPORTED ProfilerV4 ncclProfiler_v4;
EXPORTED ProfilerV5 ncclProfiler_v5;
EXPORTED ProfilerV5 ncclProfiler_v6;
ProfilerV4 ncclProfiler_v4{"Ringside", init_v4, start<DescriptorV4>, stop, change, finalize};
ProfilerV5 ncclProfiler_v5{"Ringside", init_v5<5>, start<DescriptorV5>, stop, change, finalize};
ProfilerV5 ncclProfiler_v6{"Ringside", init_v5<6>, start<DescriptorV5>, stop, change, finalize};
