// Runs any schedule, compiled to this rank's instructions: pulls chunks from its sources' work space and folds them. The
// work space is the tensor itself where all ranks' are mapped and folded as they are, else the rank's stage.
#include <algorithm>
#include <cstring>

#include "communicator.hpp"

namespace ringside {

int Communicator::add_program(Program program) {
  std::lock_guard<std::mutex> guard(programs_guard_);
  programs_.push_back(std::make_shared<const Program>(std::move(program)));
  return int(programs_.size()) - 1;
}

std::shared_ptr<const Program> Communicator::program(int id) const {
  std::lock_guard<std::mutex> guard(programs_guard_);
  return programs_.at(size_t(id));
}

static DType work_dtype(DType d) { return d == DType::f16 || d == DType::bf16 ? DType::f32 : d; }

// The work space takes the whole tensor, or else the same part of every chunk: what a schedule gives must not depend on
// how much fits. Chunks know nothing of each other, so where not even a cache line of each fits, groups of them go in turn.
Status Communicator::run_program(const Request& r, bool all_mapped) {
  const std::shared_ptr<const Program> kept = program(r.program);
  const Program& program = *kept;
  const DType work = work_dtype(r.dtype);
  in_place_ = all_mapped && work == r.dtype && r.scale == 1.0 && !r.own_scale;  // alike on all ranks
  const size_t item = size_of(work), line = 64 / item, room = view_.stage_bytes / item;
  const size_t chunks = size_t(program.chunks);
  const auto begin = [&](size_t chunk) { return r.count * chunk / chunks; };
  spans_.assign(chunks, Span{});
  if (r.count <= room) {
    for (size_t c = 0; c < chunks; ++c) spans_[c] = Span{begin(c), begin(c + 1) - begin(c), begin(c)};
    if (r.count == 0) return exit(Path::program);
    if (!run_pass(program, r, work, Turn::last)) return failure_.status;
    note(Path::program);
    return finish(Status::ok);
  }
  const size_t group = std::min(chunks, room / line), step = room / group / line * line;
  const size_t longest = (r.count + chunks - 1) / chunks;
  for (size_t first = 0; first < chunks; first += group) {
    for (size_t at = 0; at < longest; at += step) {
      for (size_t c = 0; c < chunks; ++c) {
        const size_t length = begin(c + 1) - begin(c), n = at < length ? std::min(step, length - at) : 0;
        spans_[c] = c / group == first / group ? Span{begin(c) + at, n, (c - first) * step} : Span{};
      }
      const bool last = first + group >= chunks && at + step >= longest;
      if (!run_pass(program, r, work, last ? Turn::last : Turn::middle)) return failure_.status;
    }
  }
  note(Path::program);
  return finish(Status::ok);
}

bool Communicator::run_pass(const Program& program, const Request& r, DType work, Turn turn) {
  const uint64_t base = rounds_;
  rounds_ += uint64_t(program.rounds) + 1;  // round 0 of the flags: the work space is loaded
  in_program_ = true;
  const bool fine = run_rounds(program, r, work, base, turn);
  in_program_ = false;
  return fine;
}

bool Communicator::run_rounds(const Program& program, const Request& r, DType work, uint64_t base, Turn turn) {
  Header& h = view_.header();
  const size_t item = size_of(work);
  const ReduceOp op = r.op == ReduceOp::avg ? ReduceOp::sum : r.op;
  const auto flag = [&](int round) { return base + 1 + uint64_t(round); };  // value meaning "all before `round` is done"
  const auto may_change = [&](const auto& peers, Flag RankBlock::*which, Gate& gate) {
    return std::all_of(peers.begin(), peers.end(),
                       [&](const auto& w) { return wait_for(w.first, which, flag(w.second + 1), gate); });
  };
  const auto place = [&](int rank, const Span& s) {
    return in_place_ ? tensors_[rank] + s.from * item : view_.stage(rank) + s.at * item;
  };
  scratch_.resize(std::max(scratch_.size(), view_.stage_bytes));

  for (size_t c = 0; !in_place_ && c < spans_.size(); ++c) load_work(r, spans_[c], work);
  publish(me().stored, flag(0), h.stored);
  size_t i = 0;
  for (int round = 0; round < program.rounds; ++round) {
    const size_t first = i;
    for (; i < program.instructions.size() && program.instructions[i].round == round; ++i) {
      const Instruction& in = program.instructions[i];
      const Span& span = spans_[size_t(in.chunk)];
      if (span.n == 0) continue;
      const void* src[kMaxRanks];
      int nsrc = 0;
      for (int s : in.sources) {
        if (s != rank_ && !wait_for(s, &RankBlock::stored, flag(round), h.stored)) return false;
        src[nsrc++] = place(s, span);
      }
      if (!in.scratch && !may_change(in.stored, &RankBlock::stored, h.stored)) return false;
      void* dst = in.scratch ? scratch_.data() + span.at * item : place(rank_, span);
      fold(src, nsrc, &dst, 1, span.n, false, 1.0, op, work);
    }
    publish(me().fetched, flag(round + 1), h.fetched);
    for (size_t k = first; k < i; ++k) {
      const Instruction& in = program.instructions[k];
      const Span& span = spans_[size_t(in.chunk)];
      if (!in.scratch || span.n == 0) continue;
      if (!may_change(in.stored, &RankBlock::stored, h.stored)) return false;
      if (!may_change(in.fetched, &RankBlock::fetched, h.fetched)) return false;
      memcpy(place(rank_, span), scratch_.data() + span.at * item, span.n * item);
    }
    publish(me().stored, flag(round + 1), h.stored);
  }
  // Nobody may load the next part over chunks that others still read.
  if (!wait_all(&RankBlock::stored, flag(program.rounds), h.stored, turn)) return false;
  for (const Span& s : spans_) store_work(r, s, work);
  return true;
}

void Communicator::load_work(const Request& r, const Span& s, DType work) {
  if (s.n == 0) return;
  const unsigned char* from = r.data + s.from * size_of(r.dtype);
  unsigned char* to = view_.stage(rank_) + s.at * size_of(work);
  if (r.dtype == work) {
    const void* src = from;
    void* dst = to;
    fold(&src, 1, &dst, 1, s.n, false, r.scale, ReduceOp::sum, work);
    return;
  }
  float* wide = reinterpret_cast<float*>(to);
  (r.dtype == DType::f16 ? kernels().widen_f16 : kernels().widen_bf16)(from, wide, s.n);
  if (r.scale != 1.0)
    for (size_t i = 0; i < s.n; ++i) wide[i] *= float(r.scale);
}

void Communicator::store_work(const Request& r, const Span& s, DType work) {
  if (s.n == 0) return;
  unsigned char* to = r.data + s.from * size_of(r.dtype);
  unsigned char* from = in_place_ ? to : view_.stage(rank_) + s.at * size_of(work);
  const void* src = from;
  void* dst = r.dtype == work ? to : from;
  if (in_place_ ? r.op == ReduceOp::avg : r.dtype == work || r.op == ReduceOp::avg)
    fold(&src, 1, &dst, 1, s.n, false, 1.0, r.op == ReduceOp::avg ? ReduceOp::avg : ReduceOp::max, work);
  if (r.dtype != work)
    (r.dtype == DType::f16 ? kernels().narrow_f16 : kernels().narrow_bf16)(reinterpret_cast<float*>(from), to, s.n);
}

}  // namespace ringside
