// Runs any schedule, compiled to this rank's instructions: pulls chunks from its sources' work space and folds them.
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

Status Communicator::run_program(const Request& r) {
  const std::shared_ptr<const Program> kept = program(r.program);
  const Program& program = *kept;
  const DType work = work_dtype(r.dtype);
  const size_t room = size_t(view_.header().stage_bytes) / size_of(work);
  Request piece = r;
  for (size_t at = 0; at < r.count; at += room) {
    piece.data = r.data + at * size_of(r.dtype);
    piece.count = std::min(room, r.count - at);
    const uint64_t base = rounds_;
    rounds_ += uint64_t(program.rounds) + 1;  // round 0 of the flags: the work space is loaded
    in_program_ = true;
    const bool fine = run_rounds(program, piece, work, base);
    in_program_ = false;
    if (!fine) return failure_.status;
  }
  note(Path::program);
  return finish(Status::ok);
}

bool Communicator::run_rounds(const Program& program, const Request& piece, DType work, uint64_t base) {
  Header& h = view_.header();
  const size_t item = size_of(work);
  const auto begin = [&](int chunk) { return piece.count * size_t(chunk) / size_t(program.chunks); };
  const auto flag = [&](int round) { return base + 1 + uint64_t(round); };  // value meaning "all before `round` is done"
  scratch_.resize(std::max(scratch_.size(), size_t(h.stage_bytes)));

  load_work(piece, work);
  publish(me().stored, flag(0), h.stored);
  size_t i = 0;
  for (int round = 0; round < program.rounds; ++round) {
    const size_t first = i;
    for (; i < program.instructions.size() && program.instructions[i].round == round; ++i) {
      const Instruction& in = program.instructions[i];
      const size_t from = begin(in.chunk), n = begin(in.chunk + 1) - from;
      const void* src[kMaxRanks];
      int nsrc = 0;
      for (int s : in.sources) {
        if (s != rank_ && !wait_for(s, &RankBlock::stored, flag(round), h.stored)) return false;
        src[nsrc++] = view_.stage(s) + from * item;
      }
      if (!in.scratch) {
        for (const auto& w : in.stored)
          if (!wait_for(w.first, &RankBlock::stored, flag(w.second + 1), h.stored)) return false;
      }
      void* dst = in.scratch ? scratch_.data() + from * item : view_.stage(rank_) + from * item;
      fold(src, nsrc, &dst, 1, n, false, 1.0, piece.op == ReduceOp::avg ? ReduceOp::sum : piece.op, work);
    }
    publish(me().fetched, flag(round + 1), h.fetched);
    for (size_t k = first; k < i; ++k) {
      const Instruction& in = program.instructions[k];
      if (!in.scratch) continue;
      for (const auto& w : in.stored)
        if (!wait_for(w.first, &RankBlock::stored, flag(w.second + 1), h.stored)) return false;
      for (const auto& w : in.fetched)
        if (!wait_for(w.first, &RankBlock::fetched, flag(w.second + 1), h.fetched)) return false;
      const size_t from = begin(in.chunk), n = begin(in.chunk + 1) - from;
      memcpy(view_.stage(rank_) + from * item, scratch_.data() + from * item, n * item);
    }
    publish(me().stored, flag(round + 1), h.stored);
  }
  // Nobody may load the next piece over chunks that others still read.
  if (!wait_all(&RankBlock::stored, flag(program.rounds), h.stored)) return false;
  store_work(piece, work);
  return true;
}

void Communicator::load_work(const Request& p, DType work) {
  unsigned char* to = view_.stage(rank_);
  if (p.dtype == work) {
    const void* src = p.data;
    void* dst = to;
    fold(&src, 1, &dst, 1, p.count, false, p.scale, ReduceOp::sum, work);
    return;
  }
  float* wide = reinterpret_cast<float*>(to);
  (p.dtype == DType::f16 ? kernels().widen_f16 : kernels().widen_bf16)(p.data, wide, p.count);
  if (p.scale != 1.0)
    for (size_t i = 0; i < p.count; ++i) wide[i] *= float(p.scale);
}

void Communicator::store_work(const Request& p, DType work) {
  unsigned char* from = view_.stage(rank_);
  const void* src = from;
  void* dst = p.dtype == work ? p.data : from;
  if (p.dtype == work || p.op == ReduceOp::avg)
    fold(&src, 1, &dst, 1, p.count, false, 1.0, p.op == ReduceOp::avg ? ReduceOp::avg : ReduceOp::max, work);
  if (p.dtype != work)
    (p.dtype == DType::f16 ? kernels().narrow_f16 : kernels().narrow_bf16)(reinterpret_cast<float*>(from), p.data, p.count);
}

}  // namespace ringside
