#define RINGSIDE_TABLE kernel_table_avx512
#define RINGSIDE_TABLE_NAME "avx512"
#include "kernels_impl.hpp"
