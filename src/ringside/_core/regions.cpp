// Which memory of which rank is mapped where, and the log of what was carried out.
#include <algorithm>

#include "communicator.hpp"

namespace ringside {

namespace {

constexpr size_t kLogRows = 4096;

}  // namespace

void Communicator::add_region(int rank, uint32_t id, unsigned char* base, size_t bytes, std::shared_ptr<Mapping> mapping,
                              bool find) {
  std::lock_guard<std::mutex> guard(regions_guard_);
  auto& table = regions_[size_t(rank)];
  if (table.size() <= id) table.resize(size_t(id) + 1);
  table[id] = Region{base, bytes, std::move(mapping), find, std::make_shared<std::atomic<bool>>(true)};
}

uint32_t Communicator::adopt_region(unsigned char* base, size_t bytes, bool find, std::shared_ptr<std::atomic<bool>>* alive) {
  std::lock_guard<std::mutex> guard(regions_guard_);
  auto& table = regions_[size_t(rank_)];
  table.push_back(Region{base, bytes, nullptr, find, std::make_shared<std::atomic<bool>>(true)});
  if (alive != nullptr) *alive = table.back().alive;
  return uint32_t(table.size() - 1);
}

void Communicator::retire_region(uint32_t id) {
  std::lock_guard<std::mutex> guard(regions_guard_);
  regions_[size_t(rank_)].at(id).alive->store(false);
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

bool Communicator::has_region(int rank, uint32_t id, uint64_t offset, size_t bytes) const {
  std::lock_guard<std::mutex> guard(regions_guard_);
  const auto& table = regions_[size_t(rank)];
  if (id >= table.size() || table[id].base == nullptr) return false;
  return offset <= table[id].bytes && bytes <= table[id].bytes - offset;
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
