#define RINGSIDE_TABLE kernel_table_baseline
#if defined(__aarch64__)
#define RINGSIDE_TABLE_NAME "neon"
#else
#define RINGSIDE_TABLE_NAME "baseline"
#endif
#include "kernels_impl.hpp"
