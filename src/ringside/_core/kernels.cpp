// Which kernels this processor runs: chosen once, when first asked for.
#include "kernels.hpp"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace ringside {

KernelTable kernel_table_baseline();
#if defined(__x86_64__)
KernelTable kernel_table_avx2();
KernelTable kernel_table_avx512();
#endif

const KernelTable* kernels_named(const char* name) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  static const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (strcmp(name, "avx512") == 0) {
    if (!has_avx512) return nullptr;
    static const KernelTable table = kernel_table_avx512();
    return &table;
  }
  if (strcmp(name, "avx2") == 0) {
    if (!has_avx2) return nullptr;
    static const KernelTable table = kernel_table_avx2();
    return &table;
  }
#endif
  static const KernelTable table = kernel_table_baseline();
  return strcmp(name, table.name) == 0 || strcmp(name, "baseline") == 0 ? &table : nullptr;
}

const KernelTable& kernels() {
  static const KernelTable* best = [] {
    const char* asked = std::getenv("RINGSIDE_ISA");
    if (asked != nullptr) {
      if (const KernelTable* t = kernels_named(asked)) return t;
    }
    for (const char* name : {"avx512", "avx2"}) {
      if (const KernelTable* t = kernels_named(name)) return t;
    }
    return kernels_named("baseline");
  }();
  return *best;
}

}  // namespace ringside
