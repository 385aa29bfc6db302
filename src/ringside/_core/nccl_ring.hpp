// The ring in shared memory that the NCCL plugin of a process writes and the monitor reads
// (src/ringside/monitor/nccl/ring.py says the same for NumPy):
//
//   Ring | Communicator[kCommunicators] | Record[kRecords]
//
// Any thread of the process writes records, one reader takes them out. Record n lies at n modulo kRecords, and is whole
// once its `sequence` is n + 1. Communicator n lies at n modulo kCommunicators, and is whole while its `made` is n + 1: the
// next one in its place is n + kCommunicators, and comes there only once it is closed and the reader has taken out every
// record that was begun before. The reader looks at who is new before it says what it has taken out (`tail`).
//
// Who changes a layout changes the last character of kRingMagic.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ringside::nccl {

constexpr uint64_t kRingMagic = 0x334c43434e474e52ull;  // "RNGNCCL3"
constexpr uint32_t kCommunicators = 1024;               // at a time
constexpr uint32_t kNumbers = 1u << 31;                 // of communicators; then they begin again
constexpr uint32_t kRecords = 32 * 1024;

struct alignas(4096) Ring {
  std::atomic<uint64_t> magic;  // written last
  uint64_t process_started;     // clock ticks after boot: tells processes of one number apart
  int64_t unix_ns;              // what Unix time is more than the monotonic clock
  int32_t pid;
  int32_t global_rank;  // torchrun's; -1: not known
  std::atomic<uint32_t> interface;      // the version that NCCL has chosen
  std::atomic<uint32_t> communicators;  // ever made; counted once they are whole
  uint32_t records;                     // there is room for
  alignas(64) std::atomic<uint64_t> head;     // records ever begun
  alignas(64) std::atomic<uint64_t> tail;     // records taken out; the reader's
  alignas(64) std::atomic<uint64_t> dropped;  // events for which there was no room
};
static_assert(offsetof(Ring, pid) == 24 && offsetof(Ring, interface) == 32 && offsetof(Ring, records) == 40);
static_assert(offsetof(Ring, head) == 64 && offsetof(Ring, tail) == 128 && offsetof(Ring, dropped) == 192);
static_assert(sizeof(Ring) == 4096);

constexpr uint64_t kOpen = 1ull << 63;

struct Communicator {
  std::atomic<uint64_t> made;   // its number plus one; 0: none, or it is being made
  std::atomic<uint64_t> first;  // the ring's `head` when it was made
  std::atomic<uint64_t> last;   // and when it was closed, 0 if nothing was recorded between; while it is open kOpen | made
  uint64_t id;
  int32_t ranks;
  int32_t rank;
  char name[88];
};
static_assert(sizeof(Communicator) == 128 && offsetof(Communicator, last) == 16 && offsetof(Communicator, id) == 24);
static_assert(offsetof(Communicator, ranks) == 32 && offsetof(Communicator, name) == 40);

// What an event is of; the lowest bits of its handle. Other bits of it are the number of its first record, plus one.
enum Kind : uint8_t { kNoKind, kCollective, kMessage, kKernelChannel, kProxyOperation, kProxyNetworkStep, kCall };
constexpr int kKindBits = 3;

enum What : uint8_t { kStarted, kChanged, kStopped };
enum Flags : uint32_t {
  kSends = 1,
  kForeign = 2,   // a proxy works for another process
  kCaptured = 4,  // the call was captured into a graph
  kCalled = 8,    // `host_ns` is when the API was called; else the kernel may have been launched by then
};

// An event's start, a state that it has come to, or its end.
struct Record {
  std::atomic<uint64_t> sequence;
  uint64_t host_ns;  // monotonic
  uint64_t handle;   // of the event to which this one belongs; of itself, where it changes or stops
  uint64_t gpu_ns;   // the GPU's clock; 0: none
  uint64_t number;   // a collective's sequence number, a step's number
  uint64_t count;    // elements; bytes of a proxy's step or chunk
  uint32_t communicator;
  int32_t peer;  // or a collective's root
  uint32_t flags;
  uint8_t kind;
  uint8_t what;
  uint8_t state;
  uint8_t channel;
  uint8_t channels;
  char protocol[15];
  char func[16];
  char datatype[16];
  char algorithm[16];
};
static_assert(sizeof(Record) == 128 && offsetof(Record, kind) == 60 && offsetof(Record, func) == 80);

struct Memory {
  Ring ring;
  Communicator communicators[kCommunicators];
  Record records[kRecords];
};

}  // namespace ringside::nccl
