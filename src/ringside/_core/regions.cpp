// Which memory of which rank is mapped where, and the log of what was carried out.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <pthread.h>

#include "communicator.hpp"

namespace ringside {

namespace {

constexpr size_t kLogRows = 4096;
constexpr int kLongestUseMs = 1000;  // that memory to be made private waits for another communicator's collective

// Memory may be known to several communicators of this process; what one makes private is private for all of them.
struct Process {
  std::mutex guard;
  std::vector<Communicator*> communicators;
  std::vector<FileId> withdrawn;  // files whose memory is made private here
  std::vector<FileId> privates;   // and those where that is done: once more would bring the file's bytes back
};

bool contains(const std::vector<FileId>& files, const FileId& file) {
  return std::find(files.begin(), files.end(), file) != files.end();
}

Process* process = new Process;

FileId file_of(int fd) {
  struct stat s;
  return fd >= 0 && fstat(fd, &s) == 0 ? FileId{uint64_t(s.st_dev), uint64_t(s.st_ino)} : FileId{};
}

// Tell whether [base, base + bytes) still shows that file: the memory's owner may have freed it a moment ago.
bool shows(const unsigned char* base, size_t bytes, const FileId& file) {
  FILE* maps = fopen("/proc/self/maps", "re");
  if (maps == nullptr) return false;
  uint64_t at = uint64_t(reinterpret_cast<uintptr_t>(base));
  const uint64_t end = at + bytes;
  char line[512];
  while (at < end && fgets(line, sizeof line, maps) != nullptr) {
    unsigned long long from, to, inode;
    if (sscanf(line, "%llx-%llx %*s %*x %*s %llu", &from, &to, &inode) != 3) continue;
    if (inode == file.inode && from <= at && at < to) at = to;
  }
  fclose(maps);
  return at >= end;
}

}  // namespace

// How often this process is a fork of another: a child must neither use nor close what its parent has open.
unsigned forks() {
  static std::atomic<unsigned> count{0};
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    ++count;
    process = new Process;  // another thread may have held the parent's, which knows communicators that are not ours
  });
  (void)registered;
  return count.load(std::memory_order_relaxed);
}

void Communicator::enlist() {
  std::lock_guard<std::mutex> guard(process->guard);
  process->communicators.push_back(this);
}

void Communicator::retire() {
  if (forks_ != forks()) return;
  std::lock_guard<std::mutex> guard(process->guard);
  auto& all = process->communicators;
  all.erase(std::remove(all.begin(), all.end(), this), all.end());
}

// A failed collective: whoever comes too late must not write into memory that this rank's program goes on with.
void Communicator::withdraw_memory() {
  in_use_ = -1;
  std::vector<Region> mine;
  {
    std::lock_guard<std::mutex> guard(regions_guard_);
    for (const Region& region : regions_[size_t(rank_)])
      if (region.base != nullptr && region.alive->load()) mine.push_back(region);
  }
  for (const Region& region : mine) {
    const std::shared_ptr<const Mapping> kept = region.kept.lock();  // nobody unmaps it meanwhile
    // First another communicator may finish what it is about in this memory. Then it is to give that up, on all its ranks,
    // which takes no longer than this process needs to look around. One that does not come to it, because it waits further
    // up on this very thread, finds that its memory was taken.
    for (int ms = 0;; ++ms) {
      std::unique_lock<std::mutex> guard(process->guard);
      if (ms == 0) process->withdrawn.push_back(region.file);
      bool busy = false;
      for (Communicator* c : process->communicators) busy = c->forget_region(region, ms >= kLongestUseMs) || busy;
      if (!busy || ms >= 2 * kLongestUseMs) {
        for (Communicator* c : process->communicators) c->take_region(region);
        const int fd = region.file == file_of(region.fd) ? region.fd : -1;
        if (!contains(process->privates, region.file) && (kept || shows(region.base, region.bytes, region.file))) {
          make_private(region.base, region.bytes, fd);
          process->privates.push_back(region.file);
        }
        break;
      }
      guard.unlock();
      usleep(1000);
    }
  }
}

// Use memory of this process no longer to share it; tell whether a collective under way does. If it is urgent, that one is
// to be given up; between start() and resume() no thread does anything for it, and resume() will refuse.
bool Communicator::forget_region(const Region& other, bool urgent) {
  std::lock_guard<std::mutex> guard(regions_guard_);
  auto& table = regions_[size_t(rank_)];
  bool busy = false;
  for (size_t id = 0; id < table.size(); ++id) {
    if (table[id].base == nullptr || !(table[id].file == other.file)) continue;
    table[id].alive->store(false);
    if (in_use_ != int64_t(id)) continue;
    busy = true;
    if (urgent) wanted_ = int64_t(id);
  }
  if (!busy || !urgent) return busy;
  std::unique_lock<std::mutex> idle(busy_, std::try_to_lock);
  return !idle.owns_lock();
}

// What peers store in this memory from now on is lost: a collective that uses it still has failed on this rank at least.
void Communicator::take_region(const Region& other) {
  std::lock_guard<std::mutex> guard(regions_guard_);
  const auto& table = regions_[size_t(rank_)];
  for (size_t id = 0; id < table.size(); ++id) {
    int64_t used = int64_t(id);
    if (table[id].base != nullptr && table[id].file == other.file) in_use_.compare_exchange_strong(used, kTaken);
  }
}

// A collective is over, and peers write no longer; unless the memory was taken from them meanwhile.
Status Communicator::release(Status status) {
  if (in_use_.exchange(-1) != kTaken || status != Status::ok) return status;
  fail(Status::withdrawn, {}, {}, entered_);
  return failure_.status;
}

void Communicator::add_region(int rank, uint32_t id, unsigned char* base, size_t bytes, std::shared_ptr<Mapping> mapping,
                              bool find) {
  std::lock_guard<std::mutex> guard(regions_guard_);
  auto& table = regions_[size_t(rank)];
  if (table.size() <= id) table.resize(size_t(id) + 1);
  table[id] = Region{base, bytes, std::move(mapping), find, std::make_shared<std::atomic<bool>>(true), {}, {}, -1};
}

int64_t Communicator::adopt_region(unsigned char* base, size_t bytes, bool find, int fd, std::shared_ptr<const Mapping> kept,
                                   std::shared_ptr<std::atomic<bool>>* alive) {
  const FileId file = file_of(fd);
  {
    std::lock_guard<std::mutex> guard(process->guard);
    if (contains(process->withdrawn, file)) return -1;
  }
  std::lock_guard<std::mutex> guard(regions_guard_);
  auto& table = regions_[size_t(rank_)];
  table.push_back(Region{base, bytes, nullptr, find, std::make_shared<std::atomic<bool>>(true), std::move(kept), file, fd});
  if (alive != nullptr) *alive = table.back().alive;
  return int64_t(table.size() - 1);
}

// When this returns, nobody is about to make that memory private: its owner may free it.
void Communicator::retire_region(uint32_t id) {
  std::lock_guard<std::mutex> withdrawing(process->guard);
  std::lock_guard<std::mutex> guard(regions_guard_);
  if (const auto& alive = regions_[size_t(rank_)].at(id).alive) alive->store(false);  // null: given up by all ranks
}

std::vector<uint32_t> Communicator::take_dead_regions() {
  std::lock_guard<std::mutex> guard(regions_guard_);
  std::vector<uint32_t> dead;
  auto& table = regions_[size_t(rank_)];
  for (size_t id = 0; id < table.size(); ++id) {
    if (table[id].base == nullptr || table[id].alive->load()) continue;
    table[id] = Region{};
    dead.push_back(uint32_t(id));
  }
  return dead;
}

void Communicator::drop_region(int rank, uint32_t id) {
  std::lock_guard<std::mutex> guard(regions_guard_);
  auto& table = regions_[size_t(rank)];
  if (id < table.size()) table[id] = Region{};
}

// Find where everybody's tensor lies, if all that give one have it in memory that is mapped here. What a peer told is read
// once, held against the size of its region, and not looked at again.
bool Communicator::locate(const Request& r) {
  std::lock_guard<std::mutex> guard(regions_guard_);
  for (int q = 0; q < ranks_; ++q) {
    if (!gives(r, q)) continue;
    const Call c = arrival(q).call;
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the compiler reads it once, too
    const auto& table = regions_[size_t(q)];
    if (c.place == Place::hidden || c.region >= table.size() || table[c.region].base == nullptr) return false;
    const size_t room = table[c.region].bytes, bytes = extent(r, q);
    if (c.offset > room || bytes > room - c.offset) return false;
    tensors_[q] = q == rank_ ? r.data : table[c.region].base + c.offset;
  }
  return true;
}

// From now on peers may write into the region that a call names, unless it was made private meanwhile.
void Communicator::use_region(Call* call) {
  if (call->place == Place::hidden) return;
  std::lock_guard<std::mutex> guard(regions_guard_);
  const auto& alive = regions_[size_t(rank_)][call->region].alive;
  if (alive && alive->load())  // null: a peer could not map it, or would not, so all ranks gave it up
    in_use_ = int64_t(call->region);
  else
    call->place = Place::hidden;
}

int64_t Communicator::find_region(const unsigned char* data, size_t bytes, uint64_t* offset) const {
  std::lock_guard<std::mutex> guard(regions_guard_);
  const auto& table = regions_[size_t(rank_)];
  for (size_t id = 0; id < table.size(); ++id) {
    const Region& r = table[id];
    if (r.find && r.alive->load() && r.base != nullptr && data >= r.base && data + bytes <= r.base + r.bytes) {
      *offset = uint64_t(data - r.base);
      return int64_t(id);
    }
  }
  return -1;
}

void Communicator::note(Path path) {
  std::lock_guard<std::mutex> guard(log_guard_);
  if (log_.size() >= kLogRows * log_width()) {
    ++dropped_;
    return;
  }
  log_.insert(log_.end(), {seq_, uint64_t(kind_), uint64_t(path), bytes_, submitted_, entered_, ready_, now_ns()});
  for (int r = 0; r < ranks_; ++r) log_.push_back(ranks_ == 1 ? submitted_ : arrival(r).stamp_ns);
}

std::vector<uint64_t> Communicator::drain() {
  std::lock_guard<std::mutex> guard(log_guard_);
  std::vector<uint64_t> rows;
  rows.swap(log_);
  return rows;
}

}  // namespace ringside
