// Anonymous shared memory: a memfd that vanishes with its last user, so that a SIGKILL leaks nothing.
#pragma once
#include <cerrno>
#include <cstddef>
#include <memory>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace ringside {

class Mapping {
 public:
  // Map `bytes` of `fd` shared and writable; huge pages are asked for where they pay. errno tells why on failure.
  static std::shared_ptr<Mapping> of(int fd, size_t bytes) {
    struct stat s;
    if (fstat(fd, &s) != 0) return nullptr;
    if (size_t(s.st_size) < bytes) {
      errno = EINVAL;  // mapping past the end would be a SIGBUS later
      return nullptr;
    }
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) return nullptr;
    if (bytes >= kHuge) madvise(p, bytes, MADV_HUGEPAGE);
    return std::shared_ptr<Mapping>(new Mapping(p, bytes));
  }

  // Take the pages now: running out of memory is an error here and would be a SIGBUS later.
  bool populate() {
    if (madvise(base_, bytes_, kPopulateWrite) == 0) return true;
    if (errno != EINVAL) return false;
    for (size_t at = 0; at < bytes_; at += 4096) static_cast<volatile char*>(base_)[at] = 0;  // before Linux 5.14
    return true;
  }

  // Enter the pages (they exist already) into this process's page table.
  void prefault() { madvise(base_, bytes_, kPopulateWrite); }

  ~Mapping() { munmap(base_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  unsigned char* base() const { return static_cast<unsigned char*>(base_); }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kHuge = 2u << 20;
  static constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE

  Mapping(void* base, size_t bytes) : base_(base), bytes_(bytes) {}
  void* base_;
  size_t bytes_;
};

// Make an anonymous file of `bytes`; -1 and errno on failure.
inline int make_memfd(const char* name, size_t bytes) {
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd >= 0 && ftruncate(fd, off_t(bytes)) != 0) {
    const int why = errno;
    close(fd);
    errno = why;
    return -1;
  }
  return fd;
}

}  // namespace ringside
