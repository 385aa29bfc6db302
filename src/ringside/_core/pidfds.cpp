#include "pidfds.hpp"

#include <unistd.h>

#include <cstdio>
#include <map>
#include <mutex>

namespace ringside {

namespace {

struct Held {
  long pid;
  int users;
};

std::mutex guard;
// By descriptor. Never destroyed: communicators may outlive what ends with the program.
std::map<int, Held>& held = *new std::map<int, Held>;

// The process that a pidfd is of; 0: it has ended, or the kernel does not say.
long process_of(int fd) {
  char path[48], line[128];
  snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
  FILE* const file = fopen(path, "re");
  if (file == nullptr) return 0;
  long pid = 0;
  while (fgets(line, sizeof line, file) != nullptr && sscanf(line, "Pid: %ld", &pid) != 1) {
  }
  fclose(file);
  return pid > 0 ? pid : 0;
}

}  // namespace

int share_pidfd(int fd) {
  const long pid = fd >= 0 ? process_of(fd) : 0;
  if (pid == 0) return fd;
  std::lock_guard<std::mutex> lock(guard);
  for (auto& [known, entry] : held) {
    // A number may come again; that of a process that has ended is not said any more.
    if (entry.pid != pid || process_of(known) != pid) continue;
    ++entry.users;
    ::close(fd);
    return known;
  }
  held[fd] = Held{pid, 1};
  return fd;
}

void release_pidfd(int fd) {
  if (fd < 0) return;
  std::lock_guard<std::mutex> lock(guard);
  const auto entry = held.find(fd);
  if (entry != held.end()) {
    if (--entry->second.users > 0) return;
    held.erase(entry);
  }
  ::close(fd);
}

}  // namespace ringside
