// The core as Python sees it. Addresses, counts and codes come in; a status comes out. engine/shm/communicator.py is the
// only caller and turns statuses into errors.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "communicator.hpp"
#include "digest.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace ringside;

namespace {

[[noreturn]] void raise_errno(const char* what) {
  errno = errno ? errno : EIO;
  PyErr_SetFromErrnoWithFilename(PyExc_OSError, what);
  throw nb::python_error();
}

int dims_of(nb::handle shape, int64_t* dims) {
  const Py_ssize_t n = PyTuple_Size(shape.ptr());
  if (n < 0) throw nb::python_error();
  const int kept = n < kMaxDims ? int(n) : kMaxDims;
  for (int i = 0; i < kept; ++i) dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape.ptr(), i));
  return kept;
}

// The address of a C-contiguous, writable object's buffer; 0 where it is neither.
uintptr_t writable_buffer(nb::handle object) {
  Py_buffer view;
  if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) != 0) {
    PyErr_Clear();
    return 0;
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(view.buf);
  PyBuffer_Release(&view);
  return address;
}

int create_arena(int ranks, size_t stage_bytes) {
  const size_t bytes = ArenaView::bytes(ranks, stage_bytes);
  const int fd = make_memfd("ringside-arena", bytes);
  if (fd < 0) raise_errno("memfd_create");
  const auto map = Mapping::of(fd, bytes);
  if (!map) raise_errno("mmap of the arena");
  Header& h = *reinterpret_cast<Header*>(map->base());  // a new memfd is zero: flags and gates need nothing else
  h.magic = kArenaMagic;
  h.version = kArenaVersion;
  h.ranks = uint32_t(ranks);
  h.stage_bytes = stage_bytes;
  return fd;
}

std::shared_ptr<Communicator> open_communicator(int arena_fd, size_t stage_bytes, int rank, int ranks,
                                                std::vector<int> pidfds, std::pair<int, int> patience,
                                                std::pair<int, int> background, double timeout_s,
                                                size_t one_shot_bytes, size_t segment_bytes, size_t stream_bytes) {
  const auto map = Mapping::of(arena_fd, ArenaView::bytes(ranks, stage_bytes));
  if (!map) raise_errno("mmap of the arena");
  const Header& h = *reinterpret_cast<const Header*>(map->base());
  if (h.magic != kArenaMagic || h.version != kArenaVersion || h.ranks != uint32_t(ranks) || h.stage_bytes != stage_bytes)
    throw std::runtime_error("the arena was made by another version of ringside");
  Settings s;
  s.patience = {patience.first, patience.second};
  s.background = {background.first, background.second};
  s.timeout_ns = uint64_t(std::min(timeout_s, 1e9) * 1e9);
  s.one_shot_bytes = one_shot_bytes < kInlineBytes ? one_shot_bytes : kInlineBytes;
  s.segment_bytes = segment_bytes;
  s.stream_bytes = stream_bytes;
  auto c = std::make_shared<Communicator>(map, rank, ranks, std::move(pidfds), s);
  c->interrupted = [] {
    nb::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;  // the error stays set on this thread and is raised when the call returns
  };
  return c;
}

int code(Status s) {
  if (PyErr_Occurred()) throw nb::python_error();  // Ctrl-C; where it came too late to end the collective, that is finished
  return int(s);
}

int all_reduce(Communicator& c, uintptr_t data, size_t count, int dtype, int op, int algorithm, double scale,
               nb::handle shape, uint64_t stamp_ns, int64_t region, uint64_t offset, bool fresh, int program, bool background) {
  int64_t dims[kMaxDims];
  Request r;
  r.data = reinterpret_cast<unsigned char*>(data);
  r.count = count;
  r.dtype = DType(dtype);
  r.op = ReduceOp(op);
  r.algorithm = Algorithm(algorithm);
  r.scale = scale;
  r.dims = dims;
  r.ndims = dims_of(shape, dims);
  r.stamp_ns = stamp_ns;
  r.region = region;
  r.offset = offset;
  r.fresh = fresh;
  r.program = program;
  r.background = background;
  Status s;
  {
    nb::gil_scoped_release release;
    s = c.all_reduce(r);
  }
  return code(s);
}

// The first part of a small all-reduce; waits for nobody, so the interpreter's lock is kept.
int post(Communicator& c, uintptr_t data, size_t count, int dtype, int op, double scale, nb::handle shape) {
  if (count * size_of(DType(dtype)) > kInlineBytes) throw std::invalid_argument("too large to be posted");
  int64_t dims[kMaxDims];
  Request r;
  r.data = reinterpret_cast<unsigned char*>(data);
  r.count = count;
  r.dtype = DType(dtype);
  r.op = ReduceOp(op);
  r.scale = scale;
  r.dims = dims;
  r.ndims = dims_of(shape, dims);
  return code(c.post(r));
}

// The same of a small all-gather, of `lane` elements from every rank; `unsuited` where it is not small.
int post_all_gather(Communicator& c, uintptr_t data, uintptr_t out, size_t lane, int dtype) {
  int64_t bounds[kMaxRanks + 1];
  for (int q = 0; q <= c.ranks(); ++q) bounds[q] = int64_t(lane) * q;
  const int64_t dims = int64_t(lane);
  Request r;
  r.kind = Kind::all_gather;
  r.data = reinterpret_cast<unsigned char*>(data);
  r.out = reinterpret_cast<unsigned char*>(out);
  r.count = lane * size_t(c.ranks());
  r.dtype = DType(dtype);
  r.bounds = bounds;
  r.dims = &dims;
  r.ndims = 1;
  return code(c.post(r));
}

// Every other collective that moves data; `kind` tells which, `bounds` is empty where it has no lanes.
int collective(Communicator& c, int kind, uintptr_t data, uintptr_t out, size_t count, int dtype, int op, int algorithm,
               double scale, bool own_scale, int root, uint32_t tag, std::vector<int64_t> bounds, nb::handle shape,
               uint64_t stamp_ns, int64_t region, uint64_t offset, bool fresh, int program, bool background) {
  int64_t dims[kMaxDims];
  Request r;
  r.kind = Kind(kind);
  r.data = reinterpret_cast<unsigned char*>(data);
  r.out = reinterpret_cast<unsigned char*>(out);
  r.count = count;
  r.dtype = DType(dtype);
  r.op = ReduceOp(op);
  r.algorithm = Algorithm(algorithm);
  r.scale = scale;
  r.own_scale = own_scale;
  r.root = root;
  r.tag = tag;
  r.dims = dims;
  r.ndims = dims_of(shape, dims);
  r.stamp_ns = stamp_ns;
  r.region = region;
  r.offset = offset;
  r.fresh = fresh;
  r.program = program;
  r.background = background;
  const bool by_lanes = !bounds.empty();
  if (by_lanes) {
    int64_t last = 0;
    for (int64_t b : bounds) {
      if (b < last || size_t(b) > count) throw std::invalid_argument("bounds must ascend from 0 to the element count");
      last = b;
    }
    if (bounds.size() != size_t(c.ranks()) + 1) throw std::invalid_argument("there must be one bound more than ranks");
    r.bounds = bounds.data();
  }
  Status s;
  {
    nb::gil_scoped_release release;
    s = by_lanes ? c.lanes(r) : c.all_reduce(r);
  }
  return code(s);
}

// The code of a NumPy dtype by its buffer format; -1 for those that take the long way.
int dtype_of_format(const char* format, Py_ssize_t item) {
  if (format == nullptr || format[0] == 0 || format[1] != 0) return -1;
  switch (format[0]) {
    case 'f': return int(DType::f32);
    case 'd': return int(DType::f64);
    case 'e': return int(DType::f16);
    case 'b': return int(DType::i8);
    case 'B': return int(DType::u8);
    case 'h': return int(DType::i16);
    case 'i':
    case 'l':
    case 'q': return item == 4 ? int(DType::i32) : int(DType::i64);
    default: return -1;
  }
}

// A buffer of an array that the short ways can take: C-contiguous, aligned, of few dimensions and a plain dtype.
class Array {
 public:
  Array(nb::handle array, bool writes) {
    is_open_ = PyObject_GetBuffer(array.ptr(), &view, (writes ? PyBUF_WRITABLE : 0) | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0;
    if (!is_open_) {
      PyErr_Clear();
      return;
    }
    dtype = dtype_of_format(view.format, view.itemsize);
    is_plain = dtype >= 0 && view.ndim <= kMaxDims && reinterpret_cast<uintptr_t>(view.buf) % uintptr_t(view.itemsize) == 0;
    if (is_plain) std::copy(view.shape, view.shape + view.ndim, dims);
  }
  Array(const Array&) = delete;
  ~Array() {
    if (is_open_) PyBuffer_Release(&view);
  }

  Py_buffer view;
  int dtype = -1;
  bool is_plain = false;
  int64_t dims[kMaxDims];

 private:
  bool is_open_;
};

// The short way for NumPy arrays and arithmetic reductions.
int all_reduce_array(Communicator& c, nb::handle array, int op, int algorithm, int program) {
  const Array x(array, true);
  if (!x.is_plain) return int(Status::unsuited);
  Request r;
  r.data = static_cast<unsigned char*>(x.view.buf);
  r.count = size_t(x.view.len / x.view.itemsize);
  r.dtype = DType(x.dtype);
  r.op = ReduceOp(op);
  r.algorithm = Algorithm(algorithm);
  r.dims = x.dims;
  r.ndims = x.view.ndim;
  r.program = program;
  Status s;
  {
    nb::gil_scoped_release release;
    s = c.all_reduce(r);
  }
  return code(s);
}

// Whether a result of so many rows is what the collective makes of the input: all other dimensions are equal.
bool fits(Kind kind, int ranks, const int64_t* x, int ndims, const int64_t* out, int out_ndims) {
  if (ndims < 1 || out_ndims != ndims || !std::equal(x + 1, x + ndims, out + 1)) return false;
  if (kind == Kind::all_gather) return out[0] == x[0] * ranks;
  return x[0] % ranks == 0 && out[0] == (kind == Kind::reduce_scatter ? x[0] / ranks : x[0]);
}

// The short way of a collective whose ranks have equal shares, or one of which gives or gets everything.
int equal_shares(Communicator& c, Kind kind, uintptr_t data, uintptr_t out, int dtype, int op, int root,
                 const int64_t* dims, int ndims, const int64_t* out_dims, int out_ndims) {
  const bool is_apart = kind == Kind::reduce_scatter || kind == Kind::all_gather || kind == Kind::all_to_all;
  if (is_apart && !fits(kind, c.ranks(), dims, ndims, out_dims, out_ndims)) return int(Status::unsuited);
  size_t count = 1;
  for (int i = 0; i < ndims; ++i) count *= size_t(dims[i]);
  const size_t ranks = size_t(c.ranks()), bytes = count * size_of(DType(dtype));
  const size_t out_bytes = kind == Kind::all_gather ? bytes * ranks : kind == Kind::reduce_scatter ? bytes / ranks : bytes;
  // They overlap, or have no memory: a result at 0 would be one in place.
  if (is_apart && out < data + bytes && data < out + out_bytes) return int(Status::unsuited);
  if ((data == 0 && bytes != 0) || (is_apart && out == 0)) return int(Status::unsuited);
  int64_t bounds[kMaxRanks + 1];
  const size_t lane = kind == Kind::all_gather ? count : count / ranks;
  for (int q = 0; q <= c.ranks(); ++q) bounds[q] = kind == Kind::broadcast ? int64_t(q > root ? count : 0) : int64_t(lane) * q;
  Request r;
  r.kind = kind;
  r.data = reinterpret_cast<unsigned char*>(data);
  r.out = reinterpret_cast<unsigned char*>(is_apart ? out : 0);
  r.count = kind == Kind::all_gather ? count * ranks : count;
  r.dtype = DType(dtype);
  r.op = ReduceOp(op);
  r.root = root;
  r.dims = dims;
  r.ndims = ndims;
  const bool by_lanes = kind != Kind::reduce && kind != Kind::all_reduce;
  r.bounds = by_lanes ? bounds : nullptr;
  Status s;
  {
    nb::gil_scoped_release release;
    s = by_lanes ? c.lanes(r) : c.all_reduce(r);
  }
  return code(s);
}

// The same of NumPy arrays; `out` is None where the result is in place.
int collective_of_arrays(Communicator& c, int kind, nb::handle array, nb::handle result, int op, int root) {
  const Array x(array, result.is_none() && (Kind(kind) == Kind::reduce) == (root == c.rank()));
  if (!x.is_plain) return int(Status::unsuited);
  const uintptr_t data = reinterpret_cast<uintptr_t>(x.view.buf);
  if (result.is_none())
    return equal_shares(c, Kind(kind), data, 0, x.dtype, op, root, x.dims, x.view.ndim, nullptr, 0);
  const Array out(result, true);
  if (!out.is_plain || out.dtype != x.dtype) return int(Status::unsuited);
  const uintptr_t to = reinterpret_cast<uintptr_t>(out.view.buf);
  return equal_shares(c, Kind(kind), data, to, x.dtype, op, root, x.dims, x.view.ndim, out.dims, out.view.ndim);
}

// The same of tensors of which Python has asked where they lie; `result_shape` is None where the result is in place.
int collective_of_tensors(Communicator& c, int kind, uintptr_t data, uintptr_t out, int dtype, int op, int root,
                          nb::handle shape, nb::handle result_shape) {
  int64_t dims[kMaxDims], out_dims[kMaxDims];
  if (PyTuple_Size(shape.ptr()) > kMaxDims) return int(Status::unsuited);
  if (!result_shape.is_none() && PyTuple_Size(result_shape.ptr()) > kMaxDims) return int(Status::unsuited);
  const int ndims = dims_of(shape, dims);
  const int out_ndims = result_shape.is_none() ? 0 : dims_of(result_shape, out_dims);
  return equal_shares(c, Kind(kind), data, out, dtype, op, root, dims, ndims, out_dims, out_ndims);
}

int agree_on_empty(Communicator& c, size_t bytes, int dtype, nb::handle shape) {
  int64_t dims[kMaxDims];
  const int n = dims_of(shape, dims);
  Status s;
  {
    nb::gil_scoped_release release;
    s = c.agree_on_empty(bytes, DType(dtype), dims, n);
  }
  return code(s);
}

template <Status (Communicator::*Call)()>
int blocking(Communicator& c) {
  Status s;
  {
    nb::gil_scoped_release release;
    s = (c.*Call)();
  }
  return code(s);
}

// Details of the last collective that did not return ok.
nb::dict failure(const Communicator& c) {
  const Failure& f = c.failure();
  nb::dict d;
  d["status"] = int(f.status);
  d["ranks"] = f.ranks;
  d["missing"] = f.missing;
  d["seq"] = f.seq;
  d["waited_s"] = double(f.waited_ns) * 1e-9;
  nb::list calls;
  for (int r = 0; f.status == Status::mismatch && r < c.ranks(); ++r) {
    const Call& k = c.call_of(r);
    nb::list dims;
    for (int i = 0; i < std::min<int>(k.dims_known, kMaxDims); ++i) dims.append(c.dims_of(r)[i]);
    calls.append(nb::make_tuple(int(k.kind), int(k.dtype), int(k.op), int(k.algorithm), k.count, k.scale, nb::tuple(dims),
                                int(k.root), bool(k.own_scale), c.bounds_of(r)));
  }
  d["calls"] = calls;
  return d;
}

// New symmetric memory of this rank: (file descriptor, to be sent to the peers, not closed; region; bytes as a NumPy array).
nb::tuple new_region(Communicator& c, size_t bytes) {
  struct Owner {
    std::shared_ptr<Mapping> map;
    std::shared_ptr<std::atomic<bool>> alive;
    int fd = -1;
    ~Owner() {
      if (alive) alive->store(false);
      if (fd >= 0) close(fd);
    }
  };
  const size_t whole = round_up(bytes ? bytes : 1, kPage);
  auto owner = std::make_unique<Owner>();
  owner->fd = make_memfd("ringside-symmetric", whole);
  if (owner->fd < 0) raise_errno("memfd_create");
  owner->map = Mapping::of(owner->fd, whole);
  if (!owner->map || !owner->map->populate()) {
    const int why = errno;
    owner.reset();
    errno = why;
    raise_errno("symmetric memory");
  }
  unsigned char* base = owner->map->base();
  const int fd = owner->fd;
  const int64_t id = c.adopt_region(base, whole, true, fd, owner->map, &owner->alive);
  nb::capsule keeper(owner.release(), [](void* p) noexcept { delete static_cast<Owner*>(p); });
  nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> array(base, {whole}, keeper);
  return nb::make_tuple(fd, id, nb::cast(array, nb::rv_policy::reference));
}

bool map_region(Communicator& c, int rank, uint32_t id, int fd, size_t bytes) {
  auto map = Mapping::of(fd, bytes);
  if (!map) return false;
  map->prefault(0, map->bytes());
  unsigned char* base = map->base();
  c.add_region(rank, id, base, bytes, std::move(map), false);
  return true;
}

nb::bytes drain(Communicator& c) {
  const std::vector<uint64_t> rows = c.drain();
  return nb::bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(uint64_t));
}

// The log summed up and drained: (rows, sync ns, wire ns, last wait ns, bytes, rows by path), as engine/shm/log.py tells.
nb::tuple drain_totals(Communicator& c) {
  const std::vector<uint64_t> rows = c.drain();
  const size_t width = c.log_width();
  int64_t sync = 0, wire = 0, wait = 0;
  uint64_t bytes = 0;
  std::vector<int64_t> paths(size_t(Path::count), 0);
  for (size_t at = 0; at < rows.size(); at += width) {
    const uint64_t submitted = rows[at + 4], done = rows[at + 7];
    const uint64_t last = *std::max_element(rows.begin() + at + 8, rows.begin() + at + width);
    sync += int64_t(done - submitted);
    wire += int64_t(done - last);
    wait = std::max<int64_t>(int64_t(last - submitted), 0);
    bytes += rows[at + 3];
    ++paths[rows[at + 2]];
  }
  return nb::make_tuple(rows.size() / width, sync, wire, wait, bytes, paths);
}

// rows: (round, chunk, overwrite, scratch, sources, stored [(rank, round)], fetched [(rank, round)])
int add_program(Communicator& c, uint32_t hash, int rounds, int chunks, nb::list rows) {
  Program p{hash, rounds, chunks, {}};
  for (nb::handle row : rows) {
    const nb::tuple t = nb::cast<nb::tuple>(row);
    p.instructions.push_back(Instruction{nb::cast<int>(t[0]), nb::cast<int>(t[1]), nb::cast<bool>(t[2]),
                                         nb::cast<bool>(t[3]), nb::cast<std::vector<int>>(t[4]),
                                         nb::cast<std::vector<std::pair<int, int>>>(t[5]),
                                         nb::cast<std::vector<std::pair<int, int>>>(t[6])});
  }
  return c.add_program(std::move(p));
}

const KernelTable& table_of(const std::string& isa) {
  const KernelTable* t = isa.empty() ? &kernels() : kernels_named(isa.c_str());
  if (t == nullptr) throw std::invalid_argument("this processor cannot run " + isa);
  return *t;
}

bool can_fold(int dtype, int op) {
  return dtype >= 0 && dtype < int(DType::count) && op >= 0 && op < int(ReduceOp::count) &&
         kernels().fold[dtype][op] != nullptr;
}

// One fold by address: for messages between hosts, and for tests against the NumPy twins.
void fold(std::vector<uintptr_t> src, std::vector<uintptr_t> dst, size_t count, int dtype, int op, double scale,
          double divisor, bool stream, const std::string& isa, std::vector<double> scales) {
  if (!can_fold(dtype, op)) throw std::invalid_argument("no kernel for this dtype and operation");
  if (!scales.empty() && scales.size() != src.size()) throw std::invalid_argument("one scale per source");
  const Fold f{reinterpret_cast<const void* const*>(src.data()), int(src.size()),
               reinterpret_cast<void* const*>(dst.data()), int(dst.size()), count, scale, divisor, stream,
               scales.empty() ? nullptr : scales.data()};
  table_of(isa).fold[dtype][op](f);
}

// f32 elements as halves, rounded to nearest even, and, where `back` is given, what they are then worth as f32.
void narrow(uintptr_t src, uintptr_t dst, size_t count, bool bf16, uintptr_t back) {
  (bf16 ? kernels().narrow_bf16 : kernels().narrow_f16)(reinterpret_cast<const float*>(src),
                                                        reinterpret_cast<void*>(dst), count);
  if (back != 0)
    (bf16 ? kernels().widen_bf16 : kernels().widen_f16)(reinterpret_cast<const void*>(dst),
                                                        reinterpret_cast<float*>(back), count);
}

void widen(uintptr_t src, uintptr_t dst, size_t count, bool bf16) {
  (bf16 ? kernels().widen_bf16 : kernels().widen_f16)(reinterpret_cast<const void*>(src),
                                                      reinterpret_cast<float*>(dst), count);
}

// f32 elements as blocks of 8-bit codes; what they are then worth replaces them (kernels_impl.hpp).
void encode_blocks(uintptr_t data, uintptr_t codes, uintptr_t scales, size_t count, bool e4m3, uintptr_t residual,
                   const std::string& isa) {
  float* x = reinterpret_cast<float*>(data);
  const BlockCode block{x, reinterpret_cast<uint8_t*>(codes), reinterpret_cast<uint8_t*>(scales), count,
                        reinterpret_cast<float*>(residual), x};
  const KernelTable& table = table_of(isa);
  (e4m3 ? table.encode_e4m3 : table.encode_int8)(block);
}

void decode_blocks(uintptr_t codes, uintptr_t scales, uintptr_t dst, size_t count, bool e4m3, const std::string& isa) {
  const KernelTable& table = table_of(isa);
  (e4m3 ? table.decode_e4m3 : table.decode_int8)(reinterpret_cast<const uint8_t*>(codes),
                                                 reinterpret_cast<const uint8_t*>(scales),
                                                 reinterpret_cast<float*>(dst), count);
}

uint64_t digest_at(uintptr_t data, size_t bytes, uint64_t start) {
  return digest(reinterpret_cast<const void*>(data), bytes, start);
}

void stream_pair(uintptr_t a, uintptr_t b, uintptr_t x, uintptr_t y, size_t bytes, const std::string& isa) {
  table_of(isa).stream_pair(reinterpret_cast<void*>(a), reinterpret_cast<void*>(b), reinterpret_cast<void*>(x),
                            reinterpret_cast<void*>(y), bytes / 64 * 64);
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Ringside's native core: shared memory, waiting, reduction kernels, the schedule interpreter.";
  nb::set_leak_warnings(false);  // a communicator that a script still holds when the interpreter ends is no leak
  // Functions take and return them as ints: casts of enums look a table up, in every call.
  nb::enum_<DType>(m, "DType", nb::is_arithmetic())
#define DTYPE(member, name) .value(name, DType::member)
#include "enums.def"
      ;
  nb::enum_<ReduceOp>(m, "ReduceOp", nb::is_arithmetic())
#define REDUCE_OP(member, name) .value(name, ReduceOp::member)
#include "enums.def"
      ;
  nb::enum_<Algorithm>(m, "Algorithm", nb::is_arithmetic())
#define ALGORITHM(member, name) .value(name, Algorithm::member)
#include "enums.def"
      ;
  nb::enum_<Kind>(m, "Kind", nb::is_arithmetic())
#define KIND(member, name) .value(name, Kind::member)
#include "enums.def"
      ;
  nb::enum_<Status>(m, "Status", nb::is_arithmetic())
#define STATUS(member, name) .value(name, Status::member)
#include "enums.def"
      ;
  nb::enum_<Path>(m, "Path", nb::is_arithmetic())
#define PATH(member, name) .value(name, Path::member)
#include "enums.def"
      ;
  m.attr("MAX_RANKS") = kMaxRanks;
  m.attr("INLINE_BYTES") = kInlineBytes;
  m.attr("STAGE_BUFFERS") = kStageBuffers;
#if defined(__clang__)
  m.attr("compiler") = __VERSION__;  // begins with "Clang"
#else
  m.attr("compiler") = "GCC " __VERSION__;
#endif
  m.def("instruction_set", [] { return std::string(kernels().name); });
  m.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const char* n : {"baseline", "avx2", "avx512"})
      if (const KernelTable* t = kernels_named(n)) names.push_back(t->name);
    return names;
  });
  m.def("now_ns", &now_ns);
  m.def("writable_buffer", &writable_buffer);
  m.def("create_arena", &create_arena, "ranks"_a, "stage_bytes"_a);
  m.def("can_fold", &can_fold, "dtype"_a, "op"_a);
  m.def("fold", &fold, "src"_a, "dst"_a, "count"_a, "dtype"_a, "op"_a, "scale"_a = 1.0, "divisor"_a = 1.0,
        "stream"_a = false, "isa"_a = "",
        "scales"_a = std::vector<double>(), nb::call_guard<nb::gil_scoped_release>());
  m.def("narrow", &narrow, "src"_a, "dst"_a, "count"_a, "bf16"_a, "back"_a = 0,
        nb::call_guard<nb::gil_scoped_release>());
  m.def("encode_blocks", &encode_blocks, "data"_a, "codes"_a, "scales"_a, "count"_a, "e4m3"_a, "residual"_a = 0,
        "isa"_a = "", nb::call_guard<nb::gil_scoped_release>());
  m.def("decode_blocks", &decode_blocks, "codes"_a, "scales"_a, "dst"_a, "count"_a, "e4m3"_a, "isa"_a = "",
        nb::call_guard<nb::gil_scoped_release>());
  m.def("widen", &widen, "src"_a, "dst"_a, "count"_a, "bf16"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("digest", &digest_at, "data"_a, "bytes"_a, "start"_a = 0, nb::call_guard<nb::gil_scoped_release>());
  m.def("stream_pair", &stream_pair, "a"_a, "b"_a, "x"_a, "y"_a, "bytes"_a, "isa"_a = "",
        nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Communicator>(m, "Communicator")
      .def("all_reduce", &all_reduce)
      .def("collective", &collective)
      .def("all_reduce_array", &all_reduce_array)
      .def("collective_of_arrays", &collective_of_arrays, "kind"_a, "array"_a, "result"_a.none(), "op"_a, "root"_a)
      .def("collective_of_tensors", &collective_of_tensors, "kind"_a, "data"_a, "out"_a, "dtype"_a, "op"_a, "root"_a,
           "shape"_a, "result_shape"_a.none())
      .def("resume", &blocking<&Communicator::resume>)
      .def("post", &post)
      .def("post_all_gather", &post_all_gather)
      .def("finish_posted", &blocking<&Communicator::finish_posted>)
      .def("barrier", &blocking<&Communicator::barrier>)
      .def("agree_on_empty", &agree_on_empty)
      .def("close", &Communicator::close)
      .def("set_timeout", [](Communicator& c, double s) { c.set_timeout(uint64_t(std::min(s, 1e9) * 1e9)); })
      .def("map_all", &Communicator::map_all, nb::call_guard<nb::gil_scoped_release>())
      .def("pidfds", &Communicator::pidfds)
      .def("absent", &Communicator::absent)
      .def("give_up", [](Communicator& c, int status, std::vector<int> ranks) {
        nb::gil_scoped_release release;
        c.give_up(Status(status), std::move(ranks));
      })
      .def("failure", &failure)
      .def("new_region", &new_region)
      .def("adopt_region",
           [](Communicator& c, uintptr_t base, size_t bytes, int fd) {
             return c.adopt_region(reinterpret_cast<unsigned char*>(base), bytes, false, fd);
           })
      .def("retire_region", &Communicator::retire_region)
      .def("take_dead_regions", &Communicator::take_dead_regions)
      .def("map_region", &map_region)
      .def("drop_region", &Communicator::drop_region)
      .def("add_program", &add_program)
      .def("drain", &drain)
      .def("drain_totals", &drain_totals)
      .def("log_width", &Communicator::log_width)
      .def("dropped_rows", &Communicator::dropped_rows)
      .def("seq", &Communicator::seq);
  m.def("open_communicator", &open_communicator, "arena_fd"_a, "stage_bytes"_a, "rank"_a, "ranks"_a, "pidfds"_a,
        "patience"_a, "background"_a, "timeout_s"_a, "one_shot_bytes"_a, "segment_bytes"_a, "stream_bytes"_a);
}
