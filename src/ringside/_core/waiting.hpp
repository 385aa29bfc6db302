// Waiting for other processes through shared memory: spin, then yield, then sleep on a futex.
//
// Whoever spins for a rank that is to run on the same CPU keeps it from coming. So every rank tells on which CPU it was last
// seen (`RankBlock::cpu`), and a waiting rank spins only if none of those it waits for was seen on its own.
// Whoever yields to another job's process waits for its whole slice: after a yield that took long, ranks sleep at once.
//
// A `Gate` is a futex word shared by all ranks. A condition over flags ("all ranks have reached k") is waited for with
// `Gate::sleep`; whoever makes it true calls `Gate::open`. The pair of sequentially consistent fences (after the flag
// store in the signaller, after `sleepers` was raised in the sleeper) makes sure that one of the two sees the other.
#pragma once
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ringside {

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000ull + uint64_t(t.tv_nsec);
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// How long to look before sleeping, where none of the ranks that are waited for shares the CPU.
struct Patience {
  int spins;   // loads of the flags with a pause between
  int yields;  // loads of the flags with sched_yield between
};

struct alignas(64) Flag {
  std::atomic<uint64_t> value;
};
static_assert(sizeof(Flag) == 64, "one flag, one cache line");

struct alignas(64) Gate {
  std::atomic<uint32_t> word;
  std::atomic<uint32_t> sleepers;

  bool anyone_sleeps() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return sleepers.load(std::memory_order_relaxed) != 0;
  }

  void open() {
    word.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Sleep until opened or `limit_ns` passed, unless `ready()` holds already.
  template <class Ready>
  void sleep(const Ready& ready, int64_t limit_ns) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = word.load(std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!ready()) {
      timespec limit{limit_ns / 1000000000, limit_ns % 1000000000};
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }
};

}  // namespace ringside
