// One rank's end of a communicator in shared memory: arrives, waits, reduces, and notes when everybody arrived.
//
// Each collective has an entry (every rank tells what it called and where its tensor lies; `meet`), one of some ways to
// carry it out, and, unless the payload travelled with the arrival, an exit. All-reduce and reduce have four (paths.cpp,
// interpreter.cpp):
//
//   one_shot   every rank reads everybody's payload from the arrival slots: no exit, for small tensors
//   push       owner k reduces slice k of all tensors and writes the sum into all of them: all tensors are mapped
//   staged     the same through the arena in pipelined segments: at least one tensor is private
//   program    any schedule, compiled to one rank's instructions by engine/shm/program.py
//
// The collectives over lanes (lanes.cpp) have three, of the same names: the payload next to the flag; straight out of the
// others' memory, where it is mapped; through the arena.
//
// All ranks see the same arrivals, so all choose the same way. The last synchronisation of a collective decides whether it
// has succeeded, on all ranks alike (docs/design/0030-all-or-none.md). Nothing here throws: a `Status` other than ok
// leaves its details in `failure()`.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "arena.hpp"
#include "kernels.hpp"
#include "mapping.hpp"

namespace ringside {

struct Settings {
  Patience patience{0, 0};    // a thread that has nothing else to do
  Patience background{0, 0};  // a thread beside one that computes
  uint64_t timeout_ns = 600ull * 1000000000ull;
  size_t one_shot_bytes = 4096;   // largest payload that goes one-shot by itself; equal on all ranks
  size_t segment_bytes = 262144;  // of the private-buffer path; equal on all ranks
  size_t stream_bytes = 0;        // ranks × bytes from which results bypass the caches
};

struct Failure {
  Status status = Status::ok;
  std::vector<int> ranks;
  std::vector<int> missing;
  uint64_t seq = 0;
  uint64_t waited_ns = 0;
};

struct Request {
  Kind kind = Kind::all_reduce;
  unsigned char* data = nullptr;
  size_t count = 0;
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  Algorithm algorithm = Algorithm::automatic;
  double scale = 1.0;
  const int64_t* dims = nullptr;
  int ndims = 0;
  uint64_t stamp_ns = 0;     // 0: now
  int64_t region = -1;       // own region the tensor lies in; -1: look it up by address
  uint64_t offset = 0;       // bytes into the region
  bool fresh = false;        // a shareable tensor whose region the peers do not have yet
  int program = -1;
  bool background = false;
  bool own_scale = false;    // ranks may have different scales; avg then divides by their sum
  int root = -1;             // the only rank that gets (reduce, gather) or gives (broadcast, scatter); -1: all
  uint32_t tag = 0;          // whatever else must be equal on all ranks, as a hash
  // Collectives over lanes only:
  const int64_t* bounds = nullptr;  // ranks + 1 ascending element offsets: lane r is [bounds[r], bounds[r + 1])
  unsigned char* out = nullptr;     // where the result goes; null: in place
};

struct Instruction {  // one destination chunk in one round of a program
  int round;
  int chunk;
  bool overwrite;
  bool scratch;                       // somebody reads this chunk from me in this round
  std::vector<int> sources;           // ascending; contains this rank unless overwrite
  std::vector<std::pair<int, int>> stored;   // (rank, round) that must be stored before the chunk may change
  std::vector<std::pair<int, int>> fetched;  // (rank, round) that must be fetched before the chunk may change
};

struct Span {  // elements [from, from + n) of the tensor lie at `at` of the work space; n = 0: not in this pass
  size_t from = 0, n = 0, at = 0;
};

struct Program {
  uint32_t hash;
  int rounds;
  int chunks;
  std::vector<Instruction> instructions;  // by round
};

// In a test's build a rank can be stopped here, as the kernel may anywhere.
#ifdef STOPS_FOR_TESTS
#define MAY_STOP_HERE() (at_stop ? at_stop() : void())
#else
#define MAY_STOP_HERE() void()
#endif

// Which synchronisation of a collective is waited for: one in the middle, or the last, which decides.
enum class Turn { middle, last };

struct FileId {  // of the file behind a piece of memory
  uint64_t device = 0, inode = 0;
  bool operator==(const FileId& o) const { return device == o.device && inode == o.inode; }
};

constexpr int64_t kTaken = -2;  // of memory in use: it was made private

unsigned forks();

class Communicator {
 public:
  Communicator(std::shared_ptr<Mapping> arena, int rank, int ranks, std::vector<int> pidfds, Settings settings);
  ~Communicator();

  // Enter what the others have touched by now; called when all ranks have opened the arena.
  void map_all() const { arena_->prefault(0, arena_->bytes()); }
  const std::vector<int>& pidfds() const { return pidfds_; }  // by rank; other communicators may use them, too

  // Called every few milliseconds while waiting without progress; true ends the wait (Ctrl-C).
  std::function<bool()> interrupted;
#ifdef STOPS_FOR_TESTS
  std::function<void()> at_stop;
#endif

  Status all_reduce(const Request& request);  // and reduce, where the request has a root
  Status post(const Request& request);     // the first part of a small all-reduce or all-gather: waits for nobody
  Status finish_posted();                  // the second
  Status lanes(const Request& request);       // every other collective that moves data
  Status resume();                         // after Status::exchange, once the regions were added
  Status barrier();
  Status agree_on_empty(size_t bytes, DType dtype, const int64_t* dims, int ndims);
  void close();
  // What ranks do together outside the core went wrong: tell the peers, so that they do not wait for this rank.
  void give_up(Status status, std::vector<int> ranks);
  void set_timeout(uint64_t timeout_ns) { timeout_ns_ = timeout_ns; }  // on any thread

  int add_program(Program program);
  // Regions are numbered by their owner and the numbers are never used again. An own region is alive until its memory
  // goes away; `find` tells whether addresses in it identify it. Peers are told of dead ones at the next exchange.
  // `fd` is the file behind it. -1: a failure has made this memory private, so that it cannot be shared any more.
  int64_t adopt_region(unsigned char* base, size_t bytes, bool find, int fd, std::shared_ptr<const Mapping> kept = nullptr,
                       std::shared_ptr<std::atomic<bool>>* alive = nullptr);
  void retire_region(uint32_t id);
  std::vector<uint32_t> take_dead_regions();
  void add_region(int rank, uint32_t id, unsigned char* base, size_t bytes, std::shared_ptr<Mapping> mapping, bool find);
  void drop_region(int rank, uint32_t id);
  int64_t find_region(const unsigned char* data, size_t bytes, uint64_t* offset) const;

  const Failure& failure() const { return failure_; }
  const Call& call_of(int rank) const;       // what a rank called in the collective that failed
  const int64_t* dims_of(int rank) const;
  std::vector<int64_t> bounds_of(int rank) const;  // empty where its call had none
  std::vector<int> absent() const;  // who has not arrived where this rank waits; on any thread, at any time
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  uint64_t seq() const { return seq_; }

  // Drained log rows: seq, kind, path, bytes, submitted, entered, ready, done (ns), then each rank's arrival (ns).
  std::vector<uint64_t> drain();
  size_t log_width() const { return 8 + size_t(ranks_); }
  uint64_t dropped_rows() const { return dropped_; }

 private:
  struct Region {
    unsigned char* base = nullptr;
    size_t bytes = 0;
    std::shared_ptr<Mapping> mapping;
    bool find = false;
    std::shared_ptr<std::atomic<bool>> alive;
    std::weak_ptr<const Mapping> kept;  // of an own one that the core has mapped
    FileId file;                        // of an own one
    int fd = -1;
  };

  template <class Has>
  bool wait(Gate& gate, const Has& has, Turn turn);
  template <class Has>
  Patience patience_for(int from, const Has& has);
  template <class Ready>
  bool yield_until(const Ready& ready, int yields);
  void tell_cpu();
  bool look_around(const std::function<bool(int)>& has, uint64_t since, Turn turn);
  bool holds(Turn turn);
  bool settle(Turn turn);
  bool leave(Status status, std::vector<int> ranks, std::vector<int> missing, uint64_t since, Turn turn,
             const std::function<bool(int)>& has);
  bool given_up() const;
  bool fail(Status status, std::vector<int> ranks, std::vector<int> missing, uint64_t since);
  bool fail_as_others(const std::function<bool(int)>& has, uint64_t since);
  void blame(const std::vector<int>& ranks);
  void end(Life life);
  void withdraw_memory();
  bool forget_region(const Region& region, bool urgent);
  void take_region(const Region& region);
  bool is_wanted() const { const int64_t used = in_use_; return used >= 0 && used == wanted_; }
  Status release(Status status);
  void enlist();
  void retire();
  bool usable() const;
  std::vector<int> slowest(const std::vector<int>& missing) const;
  void signal(Flag& flag, uint64_t value, Gate& gate, Flag RankBlock::*which);
  void publish(Flag& flag, uint64_t value, Gate& gate);
  bool wait_all(Flag RankBlock::*which, uint64_t value, Gate& gate, Turn turn = Turn::middle);
  bool wait_for(int rank, Flag RankBlock::*which, uint64_t value, Gate& gate);

  Status meet(Kind kind, const Request& request, const Call& call, const void* payload, size_t payload_bytes, Turn turn);
  Status arrive(Kind kind, const Request& request, const Call& call, const void* payload, size_t payload_bytes);
  bool has_arrived(int rank) const;
  Status await(Turn turn);
  Status check_calls();
  Status weigh(const Request& request);
  Status carry_out(const Request& request);
  Status finish(Status status);
  Call describe(const Request& request, Algorithm algorithm) const;
  Status local(const Request& request);
  void begin_alone(const Request& request);
  Status start(const Request& request);
  Status start_with(const Request& request, Algorithm algorithm);
  bool locate(const Request& request);
  void use_region(Call* call);
  Status one_shot(const Request& request);
  void fold_payloads(const Request& request, void* to, size_t count) const;
  Status take_one_shot(const Request& request);
  Status push(const Request& request);
  bool fold_in_blocks(const Request& request, void* const* slice, size_t n, bool stream);
  Status exit(Path path);
  Status staged(const Request& request);
  Status run_program(const Request& request, bool all_mapped);
  std::shared_ptr<const Program> program(int id) const;
  bool run_pass(const Program& program, const Request& request, DType work, Turn turn);
  bool run_rounds(const Program& program, const Request& request, DType work, uint64_t base, Turn turn);
  void load_work(const Request& request, const Span& span, DType work);
  void store_work(const Request& request, const Span& span, DType work);
  void fold(const void* const* src, int nsrc, void* const* dst, int ndst, size_t count, bool stream, double scale,
            ReduceOp op, DType dtype) const;
  void fold_all(const void* const* src, void* const* dst, int ndst, size_t count, bool stream, const Request& r) const;

  // lanes.cpp
  Status lanes_alone(const Request& request);
  void set_bounds(const int64_t* bounds);
  bool are_inline(size_t bytes) const;  // lanes that travel next to the flags
  Status lanes_inline(const Request& request);
  void place_inline(const Request& request);
  Status take_inline(const Request& request);
  Status lanes_mapped(const Request& request);
  Status lanes_staged(const Request& request);
  bool gives(const Request& request, int rank) const;
  size_t extent(const Request& request, int rank) const;
  size_t lane(int rank) const { return size_t(bounds_[size_t(rank) + 1] - bounds_[size_t(rank)]); }
  size_t header_bytes() const { return round_up(sizeof(int64_t) * (size_t(ranks_) + 1), 64); }
  template <class Source>
  void take(const Request& request, size_t at, size_t most, const Source& source) const;
  template <class Fill, class Use>
  bool relay(size_t segments, const Fill& fill, const Use& use);
  size_t stride() const { return view_.stage_bytes / kStageBuffers / 64 * 64; }
  void note(Path path);
  Arrival& arrival(int rank) const { return view_.block(rank).arrival[seq_ & 1]; }
  RankBlock& me() const { return view_.block(rank_); }
  Arrival& next_arrival() const { return me().arrival[~seq_ & 1]; }

  std::shared_ptr<Mapping> arena_;
  ArenaView view_;
  const int rank_, ranks_;
  std::vector<int> pidfds_;
  Settings settings_;
  std::mutex busy_;
  uint64_t seq_ = 0;
  uint64_t segments_ = 0;  // of the private-buffer path, ever
  uint64_t rounds_ = 0;    // of programs, ever
  bool in_program_ = false;
  std::atomic<bool> broken_{false};
  std::atomic<bool> leaving_{false};  // close() was called while another thread waits
  std::atomic<int64_t> wanted_{-1};   // own region that another communicator has to make private: to be given up
  std::atomic<uint64_t> timeout_ns_;
  const unsigned forks_;              // of this process, when this was made: in a child it is not ours
  Patience patience_{0, 0};
  std::vector<int64_t> bounds_;  // of the lanes of the collective under way
  double divisor_ = 1.0;         // of its avg
  double scales_[kMaxRanks];     // of every rank's contribution, where they may differ
  int cpu_ = -1;                 // that this rank has told
  int waits_without_yield_ = 0;  // still to come: a yield took long
  bool in_place_ = false;        // the program under way works in the tensors
  unsigned char* tensors_[kMaxRanks];  // of every rank that gives, where `locate` has found all of them
  std::atomic<int64_t> in_use_{-1};    // own region that peers may be writing to; kTaken: it was taken from them
  Failure failure_;
  Request pending_;
  std::vector<std::vector<Region>> regions_;
  mutable std::mutex regions_guard_;
  std::vector<std::shared_ptr<const Program>> programs_;
  mutable std::mutex programs_guard_;
  std::vector<unsigned char> scratch_;
  std::vector<Span> spans_;  // of each chunk, in the pass of a program under way

  Kind kind_ = Kind::barrier;
  uint64_t bytes_ = 0, submitted_ = 0, entered_ = 0, ready_ = 0;
  std::mutex log_guard_;  // not busy_: the log can be read while a collective waits
  std::vector<uint64_t> log_;
  uint64_t dropped_ = 0;
};

}  // namespace ringside
