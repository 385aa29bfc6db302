// Anonymous shared memory: a memfd that vanishes with its last user, so that a SIGKILL leaks nothing.
#pragma once
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace ringside {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE
constexpr size_t kPage = 4096;
constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;  // whoever maps it is never hit by SIGBUS

inline bool has_sealed_size(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & kSizeSeals) == kSizeSeals;
}

// Make the kernel give every page as if it were written, without changing it; false and errno where there is no memory.
inline bool write_all_pages(void* base, size_t bytes) {
  if (madvise(base, bytes, kPopulateWrite) == 0) return true;
  if (errno != EINVAL) return false;
  for (size_t at = 0; at < bytes; at += 4096) {  // before Linux 5.14
    auto* byte = static_cast<unsigned char*>(base) + at;
    unsigned char now = __atomic_load_n(byte, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(byte, &now, now, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {}
  }
  return true;
}

// Replace memory that others have mapped, at its addresses, by a copy of this process's own: what they store from then on
// stays with them. With `fd`, the file that is mapped there, no store of another thread is lost meanwhile, because the
// kernel copies each page when it is first written, and here all of them are; without (-1) it is copied by hand.
inline bool make_private(void* base, size_t bytes, int fd) {
  constexpr int kWritable = PROT_READ | PROT_WRITE;
  if (fd >= 0)
    return mmap(base, bytes, kWritable, MAP_PRIVATE | MAP_FIXED, fd, 0) != MAP_FAILED && write_all_pages(base, bytes);
  void* copy = mmap(nullptr, bytes, kWritable, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return false;
  memcpy(copy, base, bytes);
  return mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, base) != MAP_FAILED;
}

class Mapping {
 public:
  // Map `bytes` of `fd` shared and writable; huge pages are asked for where they pay. errno tells why on failure.
  // Memory that could still shrink is refused.
  static std::shared_ptr<Mapping> of(int fd, size_t bytes) {
    struct stat s;
    if (fstat(fd, &s) != 0) return nullptr;
    if (size_t(s.st_size) < bytes || !has_sealed_size(fd)) {
      errno = EINVAL;  // mapping past the end would be a SIGBUS later
      return nullptr;
    }
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) return nullptr;
    if (bytes >= kHuge) madvise(p, bytes, MADV_HUGEPAGE);
    return std::shared_ptr<Mapping>(new Mapping(p, bytes));
  }

  // Take the pages now: running out of memory is an error here and would be a SIGBUS later.
  bool populate() { return write_all_pages(base_, bytes_); }

  // Enter pages into this process's page table. Those that are not there yet are made on the NUMA node of this CPU.
  void prefault(size_t from, size_t bytes) const {
    const size_t page = from / kPage * kPage;
    madvise(base() + page, bytes + (from - page), kPopulateWrite);
  }

  ~Mapping() { munmap(base_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  unsigned char* base() const { return static_cast<unsigned char*>(base_); }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kHuge = 2u << 20;

  Mapping(void* base, size_t bytes) : base_(base), bytes_(bytes) {}
  void* base_;
  size_t bytes_;
};

// Make an anonymous file whose size is and stays `bytes`; -1 and errno on failure.
inline int make_memfd(const char* name, size_t bytes) {
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd >= 0 && (ftruncate(fd, off_t(bytes)) != 0 || fcntl(fd, F_ADD_SEALS, kSizeSeals | F_SEAL_SEAL) != 0)) {
    const int why = errno;
    close(fd);
    errno = why;
    return -1;
  }
  return fd;
}

}  // namespace ringside
