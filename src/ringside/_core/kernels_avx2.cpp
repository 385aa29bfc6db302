#define RINGSIDE_TABLE kernel_table_avx2
#define RINGSIDE_TABLE_NAME "avx2"
#include "kernels_impl.hpp"
