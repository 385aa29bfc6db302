// What NCCL hands to a plugin, written down from its published headers (src/include/plugin/profiler/profiler_v4.h to _v6.h,
// nccl_profiler.h) and not from the plugin's: a layout or a value that is wrong there does not meet itself here.
#pragma once
#include <cstddef>
#include <cstdint>

enum Result : int { kSuccess = 0, kSystemError = 2 };
enum : int { kWarn = 2, kInfo = 3 };

constexpr int kGroup = 0x1, kColl = 0x2, kP2p = 0x4, kProxyOp = 0x8, kProxyStep = 0x10, kKernelCh = 0x40;
constexpr int kNetPlugin = 0x80, kGroupApi = 0x100, kCollApi = 0x200, kP2pApi = 0x400, kKernelLaunch = 0x800, kCeColl = 0x1000;

constexpr int kSendGpuWait = 8, kSendWait = 9, kRecvWait = 10, kProxyOpInProgress = 19, kSendPeerWait = 20, kKernelChStop = 22;
constexpr int kProxyCtrlIdle = 13, kProxyCtrlAppendEnd = 18;

using Logger = void (*)(int level, unsigned long flags, const char* file, int line, const char* format, ...);

// The same in every version.
struct ProxyOp {
  int pid;
  uint8_t channelId;
  int peer;
  int nSteps;
  int chunkSize;
  int isSend;
};

struct ProxyStep {
  int step;
};

struct KernelCh {
  uint8_t channelId;
  uint64_t pTimer;
};

struct NetPlugin {
  int64_t id;
  void* data;
};

namespace v4 {

struct Descriptor {
  uint8_t type;
  void* parentObj;
  int rank;
  union {
    struct {
      uint64_t seqNumber;
      const char* func;
      const void* sendBuff;
      void* recvBuff;
      size_t count;
      int root;
      const char* datatype;
      uint8_t nChannels;
      uint8_t nWarps;
      const char* algo;
      const char* proto;
    } coll;
    struct {
      const char* func;
      void* buff;
      const char* datatype;
      size_t count;
      int peer;
      uint8_t nChannels;
    } p2p;
    ProxyOp proxyOp;
    ProxyStep proxyStep;
    KernelCh kernelCh;
    NetPlugin netPlugin;
  };
};

union StateArgs {
  struct {
    size_t transSize;
  } proxyStep;
  struct {
    int appendedProxyOps;
  } proxyCtrl;
  struct {
    void* data;
  } netPlugin;
  struct {
    uint64_t pTimer;
  } kernelCh;
};

struct Profiler {
  const char* name;
  int (*init)(void** context, int* mask, const char* commName, uint64_t commHash, int nNodes, int nranks, int rank, Logger log);
  int (*startEvent)(void* context, void** handle, Descriptor* descriptor);
  int (*stopEvent)(void* handle);
  int (*recordEventState)(void* handle, int state, StateArgs* args);
  int (*finalize)(void* context);
};

}  // namespace v4

// Of version 6 too: what it adds, copy engines, is neither played nor recorded, and makes the union no larger.
namespace v5 {

struct Descriptor {
  uint64_t type;
  void* parentObj;
  int rank;
  union {
    struct {
      bool graphCaptured;
      int groupDepth;
    } groupApi;
    struct {
      const char* func;
      size_t count;
      const char* datatype;
      int root;
      void* stream;
      bool graphCaptured;
    } collApi;
    struct {
      const char* func;
      size_t count;
      const char* datatype;
      void* stream;
      bool graphCaptured;
    } p2pApi;
    struct {
      void* stream;
    } kernelLaunch;
    struct {
      uint64_t seqNumber;
      const char* func;
      const void* sendBuff;
      void* recvBuff;
      size_t count;
      int root;
      const char* datatype;
      uint8_t nChannels;
      uint8_t nWarps;
      const char* algo;
      const char* proto;
      void* parentGroup;
    } coll;
    struct {
      const char* func;
      void* buff;
      const char* datatype;
      size_t count;
      int peer;
      uint8_t nChannels;
      void* parentGroup;
    } p2p;
    ProxyOp proxyOp;
    ProxyStep proxyStep;
    KernelCh kernelCh;
    NetPlugin netPlugin;
  };
};

using StateArgs = v4::StateArgs;

struct Profiler {
  const char* name;
  int (*init)(void** context, uint64_t commId, int* mask, const char* commName, int nNodes, int nranks, int rank, Logger log);
  int (*startEvent)(void* context, void** handle, Descriptor* descriptor);
  int (*stopEvent)(void* handle);
  int (*recordEventState)(void* handle, int state, StateArgs* args);
  int (*finalize)(void* context);
};

}  // namespace v5
