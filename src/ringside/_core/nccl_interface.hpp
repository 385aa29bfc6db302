// What of NCCL's profiler interface we use, versions 4 (NCCL 2.27), 5 (2.28) and 6 (2.29).
//
// Layouts and values are facts of the published interface (github.com/NVIDIA/nccl, src/include/plugin/profiler and
// nccl_profiler.h); the declarations are our own. Version 6 adds members to the union for the copy engines, which are not
// asked for; what both have lies where it lies in version 5.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ringside::nccl {

enum Result : int { kSuccess = 0, kSystemError = 2 };

// Bits of the activation mask, and the `type` of an event.
enum Event : int {
  kGroup = 1 << 0,
  kColl = 1 << 1,
  kP2p = 1 << 2,
  kProxyOp = 1 << 3,
  kProxyStep = 1 << 4,
  kProxyCtrl = 1 << 5,
  kKernelCh = 1 << 6,
  kNetPlugin = 1 << 7,
  kGroupApi = 1 << 8,
  kCollApi = 1 << 9,
  kP2pApi = 1 << 10,
  kKernelLaunch = 1 << 11,
};

enum State : int {
  kSendGpuWait = 8,
  kSendWait = 9,
  kRecvWait = 10,
  kRecvFlushWait = 11,
  kRecvGpuWait = 12,
  kProxyOpInProgress = 19,
  kSendPeerWait = 20,
  kKernelChStop = 22,
};

enum LogLevel : int { kLogWarn = 2, kLogInfo = 3 };
constexpr unsigned long kLogInit = 1;  // NCCL's subsystem INIT
using Logger = void (*)(int level, unsigned long flags, const char* file, int line, const char* format, ...);

struct P2p {
  const char* func;
  void* buffer;
  const char* datatype;
  size_t count;
  int peer;
  uint8_t channels;
};

struct ProxyOp {
  int pid;  // of the process whose operation it is: under PXN another one than that of the proxy
  uint8_t channel;
  int peer;
  int steps;
  int chunk_size;
  int is_send;
};

struct KernelCh {
  uint8_t channel;
  uint64_t timer;  // the GPU's, nanoseconds
};

struct CollV4 {
  uint64_t sequence;  // per communicator and function
  const char* func;
  const void* send_buffer;
  void* recv_buffer;
  size_t count;
  int root;
  const char* datatype;
  uint8_t channels;
  uint8_t warps;
  const char* algorithm;
  const char* protocol;
};

struct CollV5 {
  CollV4 as_v4;
  void* parent_group;
};

struct CollApi {
  const char* func;
  size_t count;
  const char* datatype;
  int root;
  void* stream;
  bool is_captured;
};

struct P2pApi {
  const char* func;
  size_t count;
  const char* datatype;
  void* stream;
  bool is_captured;
};

struct DescriptorV4 {
  uint8_t type;
  void* parent;
  int rank;
  union {
    CollV4 coll;
    P2p p2p;
    ProxyOp proxy_op;
    int proxy_step;
    KernelCh kernel;
  };
};

struct DescriptorV5 {
  uint64_t type;
  void* parent;
  int rank;
  union {
    CollV4 coll;
    CollV5 whole_coll;
    CollApi coll_api;
    P2pApi p2p_api;
    P2p p2p;
    ProxyOp proxy_op;
    int proxy_step;
    KernelCh kernel;
  };
};

union StateArguments {
  uint64_t bytes;  // of a proxy step
  uint64_t timer;  // the GPU's, of a kernel's end
  void* data;
};

struct ProfilerV4 {
  const char* name;
  int (*init)(void** context, int* mask, const char* name, uint64_t id, int nodes, int ranks, int rank, Logger log);
  int (*start)(void* context, void** handle, DescriptorV4* descriptor);
  int (*stop)(void* handle);
  int (*record)(void* handle, int state, StateArguments* arguments);
  int (*finalize)(void* context);
};

struct ProfilerV5 {
  const char* name;
  int (*init)(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks, int rank, Logger log);
  int (*start)(void* context, void** handle, DescriptorV5* descriptor);
  int (*stop)(void* handle);
  int (*record)(void* handle, int state, StateArguments* arguments);
  int (*finalize)(void* context);
};

static_assert(sizeof(void*) == 8 && sizeof(size_t) == 8, "NCCL runs on 64 bits");
static_assert(sizeof(DescriptorV4) == 104 && sizeof(DescriptorV5) == 112 && sizeof(StateArguments) == 8);
static_assert(offsetof(DescriptorV4, parent) == 8 && offsetof(DescriptorV4, rank) == 16 && offsetof(DescriptorV4, coll) == 24);
static_assert(offsetof(DescriptorV5, parent) == 8 && offsetof(DescriptorV5, rank) == 16 && offsetof(DescriptorV5, coll) == 24);
static_assert(sizeof(CollV4) == 80 && sizeof(CollV5) == 88);
static_assert(offsetof(CollV4, func) == 8 && offsetof(CollV4, send_buffer) == 16 && offsetof(CollV4, recv_buffer) == 24);
static_assert(offsetof(CollV4, count) == 32 && offsetof(CollV4, root) == 40 && offsetof(CollV4, datatype) == 48);
static_assert(offsetof(CollV4, channels) == 56 && offsetof(CollV4, warps) == 57);
static_assert(offsetof(CollV4, algorithm) == 64 && offsetof(CollV4, protocol) == 72);
static_assert(sizeof(P2p) == 40 && offsetof(P2p, buffer) == 8 && offsetof(P2p, datatype) == 16);
static_assert(offsetof(P2p, count) == 24 && offsetof(P2p, peer) == 32 && offsetof(P2p, channels) == 36);
static_assert(sizeof(ProxyOp) == 24 && offsetof(ProxyOp, channel) == 4 && offsetof(ProxyOp, peer) == 8);
static_assert(offsetof(ProxyOp, steps) == 12 && offsetof(ProxyOp, chunk_size) == 16 && offsetof(ProxyOp, is_send) == 20);
static_assert(sizeof(KernelCh) == 16 && offsetof(KernelCh, timer) == 8);
static_assert(sizeof(CollApi) == 48 && offsetof(CollApi, count) == 8 && offsetof(CollApi, datatype) == 16);
static_assert(offsetof(CollApi, root) == 24 && offsetof(CollApi, stream) == 32 && offsetof(CollApi, is_captured) == 40);
static_assert(sizeof(P2pApi) == 40 && offsetof(P2pApi, stream) == 24 && offsetof(P2pApi, is_captured) == 32);
static_assert(sizeof(ProfilerV4) == 48 && sizeof(ProfilerV5) == 48);

}  // namespace ringside::nccl
