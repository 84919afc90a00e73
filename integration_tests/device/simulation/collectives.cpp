// Collectives with NCCL's contract, over gloo, and the module for Python. What a collective writes is NaN until it is
// waited for; what it reads must be alive and unchanged until then; dtypes, strides and reductions are those of NCCL.
#include "device.h"

#include <torch/extension.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace sim {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Started = c10::intrusive_ptr<c10d::Work>;
using c10d::ReduceOp;

static bool is_freed(const Tensor& tensor) { return tensor.nbytes() > tensor.storage().nbytes(); }

static Tensor bytes_of(const Tensor& host) { return host.view(-1).view(at::kByte); }

static bool only_unwritten(const Tensor& host) { return !host.nbytes() || bytes_of(host).eq(UNWRITTEN).all().item<bool>(); }

// A collective under way.
struct Work final : c10d::Work {
  struct Part {
    Tensor device, host;
  };
  std::string name;
  std::vector<Started> steps;
  std::vector<Part> inputs, outputs;  // with what was read at the start; with what is written at the end
  std::function<void()> at_end;       // after the steps, before outputs are written
  bool done = false;

  explicit Work(std::string name) : c10d::Work(-1, c10d::OpType::UNKNOWN), name(std::move(name)) {}
  ~Work() override {
    if (!done && inputs.size() + outputs.size()) note("DROPPED", name);
  }

  // The values of an input for gloo, in the order of its memory.
  Tensor read(const Tensor& input) {
    Tensor host = on_host(input).clone(at::MemoryFormat::Contiguous);
    inputs.push_back({input, host});
    return host;
  }

  // A tensor on the host, whose values will be the output's.
  Tensor write(const Tensor& output) {
    Tensor host = at::empty(output.sizes(), output.options().device(at::kCPU));
    if (output.nbytes()) memset(output.mutable_data_ptr(), UNWRITTEN, output.nbytes());
    outputs.push_back({output, host});
    return host;
  }

  bool isCompleted() override {
    note("POLL", name);
    return std::all_of(steps.begin(), steps.end(), [](auto& step) { return step->isCompleted(); });
  }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (done) return true;
    done = true;
    for (auto& step : steps) step->wait(timeout);
    Below below;
    if (at_end) at_end();
    for (auto& [device, host] : inputs) {
      if (is_freed(device)) note("RACE", name + ": its input was freed before it was waited for");
      else if (!bytes_of(on_host(device)).equal(bytes_of(host)))
        note("RACE", name + ": its input was written before it was waited for");
    }
    for (auto& [device, host] : outputs) {
      if (is_freed(device)) {
        note("RACE", name + ": its output was freed before it was waited for");
        continue;
      }
      if (!only_unwritten(on_host(device))) note("RACE", name + ": its output was written before it was waited for");
      on_host(device).copy_(host);
    }
    return true;
  }
  std::vector<Tensor> result() override {
    Tensors tensors;
    for (auto& part : outputs) tensors.push_back(part.device);
    return tensors;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait();
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(result());
    return future;
  }
};

static void check(const Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == TYPE, "Tensors must be on the device and dense, got ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  switch (tensor.scalar_type()) {
    case at::kFloat: case at::kDouble: case at::kHalf: case at::kBFloat16: case at::kFloat8_e4m3fn: case at::kFloat8_e5m2:
    case at::kInt: case at::kLong: case at::kChar: case at::kByte: case at::kBool:
      return;
    default:
      TORCH_CHECK_TYPE(false, "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
  }
}

static void check(const ReduceOp& op, const Tensor& tensor) {
  TORCH_CHECK_VALUE(
      op.op_ != ReduceOp::BAND && op.op_ != ReduceOp::BOR && op.op_ != ReduceOp::BXOR, "Cannot use a bitwise ReduceOp with NCCL");
  TORCH_CHECK_TYPE(op.op_ != ReduceOp::AVG || tensor.scalar_type() != at::kBool, "Cannot use ReduceOp.AVG with boolean inputs");
}

// rows: (ranks, elements)
static Tensor reduced(const Tensor& rows, const ReduceOp& op) {
  switch (op.op_) {
    case ReduceOp::SUM: return rows.sum(0, false, rows.scalar_type());
    case ReduceOp::AVG: return rows.sum(0, false, rows.scalar_type()).div_(rows.size(0));
    case ReduceOp::PRODUCT: return rows.prod(0, false, rows.scalar_type());
    case ReduceOp::MAX: return rows.amax(0);
    case ReduceOp::MIN: return rows.amin(0);
    default: TORCH_CHECK_NOT_IMPLEMENTED(false, "this reduction is not simulated");
  }
}

struct Backend final : c10d::Backend {
  using Begun = c10::intrusive_ptr<Work>;
  Started started(Begun work) {
    if (coalescing) coalesced.push_back(work);
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> gloo;
  std::vector<Started> coalesced;
  bool coalescing = false;

  explicit Backend(c10::intrusive_ptr<c10d::Backend> over)
      : c10d::Backend(over->getRank(), over->getSize()), gloo(std::move(over)) {}
  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void shutdown() override { gloo->shutdown(); }
  void abort() override { gloo->abort(); }
  void startCoalescing() override { coalescing = true; }
  Started endCoalescing() override {
    coalescing = false;
    auto work = c10::make_intrusive<Work>("coalesced");
    work->steps.swap(coalesced);
    return work;
  }

  Begun begin(const char* name, const Tensor& sent) {
    note("COLLECTIVE", name, sent.nbytes());
    return c10::make_intrusive<Work>(name);
  }

  // The values of all ranks, (ranks, elements), once the work has ended.
  Tensor gathered(Begun& work, const Tensor& host) {
    Tensor rows = at::empty({getSize(), host.numel()}, host.options());
    Tensor from = bytes_of(host), into = bytes_of(rows);
    if (host.numel()) work->steps.push_back(gloo->_allgather_base(into, from, {}));
    return rows;
  }

  Started exchanged(Begun work, Tensor into, Tensor from, std::vector<int64_t> receive, std::vector<int64_t> send) {
    bool any = into.nbytes() || from.nbytes() || !receive.empty();
    if (any) work->steps.push_back(gloo->alltoall_base(into, from, receive, send, {}));
    return started(work);
  }

  Started allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Below below;
    Tensor tensor = tensors.at(0);
    check(tensor);
    check(options.reduceOp, tensor);
    auto work = begin("all_reduce", tensor);
    Tensor rows = gathered(work, on_host(tensor).clone()), result = work->write(tensor);
    work->at_end = [=, op = options.reduceOp] { bytes_of(result).copy_(bytes_of(reduced(rows, op))); };
    return started(work);
  }
  Started allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto work = c10::make_intrusive<Work>("all_reduce_coalesced");
    c10d::AllreduceOptions each;
    each.reduceOp = options.reduceOp;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      work->steps.push_back(allreduce(one, each));
    }
    return work;
  }
  Started reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Below below;
    Tensor tensor = tensors.at(0);
    check(tensor);
    check(options.reduceOp, tensor);
    auto work = begin("reduce", tensor);
    bool root = getRank() == options.rootRank;
    Tensor rows = gathered(work, root ? on_host(tensor).clone() : work->read(tensor));
    if (root) {
      Tensor result = work->write(tensor);
      work->at_end = [=, op = options.reduceOp] { bytes_of(result).copy_(bytes_of(reduced(rows, op))); };
    }
    return started(work);
  }
  Started broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Below below;
    Tensor tensor = tensors.at(0);
    check(tensor);
    auto work = begin("broadcast", tensor);
    Tensors sent{bytes_of(getRank() == options.rootRank ? work->read(tensor) : work->write(tensor))};
    work->steps.push_back(gloo->broadcast(sent, options));
    return started(work);
  }
  Started _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions&) override {
    Below below;
    check(out);
    check(in);
    TORCH_CHECK_TYPE(out.scalar_type() == in.scalar_type(), "output tensor must have the same type as input tensor");
    TORCH_CHECK_VALUE(out.numel() == in.numel() * getSize(), "output size must be equal to world_size times input size");
    auto work = begin("all_gather", in);
    bool in_place = in.is_alias_of(out);  // the own block of the output: written too, so nothing of it is compared
    Tensor rows = gathered(work, in_place ? on_host(in).clone() : work->read(in)), result = work->write(out);
    work->at_end = [=] { bytes_of(result).copy_(bytes_of(rows)); };
    return started(work);
  }
  Started allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions&) override {
    Below below;
    Tensor in = ins.at(0);
    check(in);
    auto work = begin("all_gather", in);
    Tensor rows = gathered(work, work->read(in));
    Tensors results;
    for (auto& out : outs.at(0)) {
      check(out);
      TORCH_CHECK_NOT_IMPLEMENTED(out.numel() == in.numel(), "an all-gather of uneven sizes is not simulated");
      results.push_back(work->write(out));
    }
    work->at_end = [=] {
      for (size_t rank = 0; rank < results.size(); ++rank) bytes_of(results[rank]).copy_(bytes_of(rows[rank]));
    };
    return started(work);
  }
  Started allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    auto work = c10::make_intrusive<Work>("all_gather_coalesced");
    for (size_t at = 0; at < ins.size(); ++at) work->steps.push_back(_allgather_base(outs[at], ins[at], options));
    return work;
  }
  Started gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& options) override {
    Below below;
    check(ins.at(0));
    auto work = begin("gather", ins[0]);
    Tensors sent{work->read(ins[0])};
    std::vector<Tensors> received;
    if (!outs.empty()) {
      received.emplace_back();
      for (auto& out : outs[0]) received[0].push_back(work->write(out));
    }
    work->steps.push_back(gloo->gather(received, sent, options));
    return started(work);
  }
  Started scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) override {
    Below below;
    check(outs.at(0));
    auto work = begin("scatter", outs[0]);
    std::vector<Tensors> sent;
    if (!ins.empty()) {
      sent.emplace_back();
      for (auto& in : ins[0]) sent[0].push_back(work->read(in));
    }
    Tensors received{work->write(outs[0])};
    work->steps.push_back(gloo->scatter(received, sent, options));
    return started(work);
  }
  Started alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& receive, std::vector<int64_t>& send, const c10d::AllToAllOptions&) override {
    Below below;
    check(out);
    check(in);
    auto work = begin("all_to_all", in);
    auto in_bytes = [](const std::vector<int64_t>& sizes, const Tensor& of) {
      std::vector<int64_t> bytes;
      for (auto rows : sizes) bytes.push_back(of.numel() ? rows * static_cast<int64_t>(of.nbytes()) / of.size(0) : 0);
      return bytes;
    };
    return exchanged(work, bytes_of(work->write(out)), bytes_of(work->read(in)), in_bytes(receive, out), in_bytes(send, in));
  }
  Started alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions&) override {
    Below below;
    auto work = begin("all_to_all", ins.at(0));
    Tensors sent, results;
    std::vector<int64_t> send, receive;
    for (auto& in : ins) {
      check(in);
      sent.push_back(bytes_of(work->read(in)));
      send.push_back(in.nbytes());
    }
    for (auto& out : outs) {
      check(out);
      results.push_back(bytes_of(work->write(out)));
      receive.push_back(out.nbytes());
    }
    Tensor received = at::cat(results);
    work->at_end = [=] {
      auto blocks = received.split_with_sizes(receive);
      for (size_t rank = 0; rank < results.size(); ++rank) Tensor(results[rank]).copy_(blocks[rank]);
    };
    return exchanged(work, received, at::cat(sent), receive, send);
  }
  Started _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    Below below;
    check(out);
    check(in);
    check(options.reduceOp, in);
    TORCH_CHECK_TYPE(in.scalar_type() == out.scalar_type(), "input tensor must be the same type as the output tensor");
    TORCH_CHECK_VALUE(in.numel() == out.numel() * getSize(), "input size must be equal to world_size times output size");
    auto work = begin("reduce_scatter", in);
    Tensor sent = work->read(in), rows = at::empty({getSize(), out.numel()}, sent.options()), result = work->write(out);
    work->at_end = [=, op = options.reduceOp] { bytes_of(result).copy_(bytes_of(reduced(rows, op))); };
    return exchanged(work, bytes_of(rows), bytes_of(sent), {}, {});
  }
  Started reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& options) override {
    Tensors flat;
    for (auto& in : ins.at(0)) flat.push_back(in.reshape(-1));
    Tensor in = at::cat(flat), out = outs.at(0);
    return _reduce_scatter_base(out, in, options);
  }
  Started reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& options) override {
    auto work = c10::make_intrusive<Work>("reduce_scatter_coalesced");
    for (size_t at = 0; at < ins.size(); ++at) work->steps.push_back(_reduce_scatter_base(outs[at], ins[at], options));
    return work;
  }
  Started send(Tensors& tensors, int to, int tag) override {
    Below below;
    check(tensors.at(0));
    auto work = begin("send", tensors[0]);
    Tensors sent{work->read(tensors[0])};
    work->steps.push_back(gloo->send(sent, to, tag));
    return started(work);
  }
  Started recv(Tensors& tensors, int from, int tag) override {
    Below below;
    check(tensors.at(0));
    auto work = begin("receive", tensors[0]);
    Tensors received{work->write(tensors[0])};
    work->steps.push_back(gloo->recv(received, from, tag));
    return started(work);
  }
  Started barrier(const c10d::BarrierOptions& options) override {
    note("SYNC", "barrier");
    return gloo->barrier(options);
  }
};

static void listen_in_python(py::function function) {
  auto* kept = new py::function(std::move(function));  // as long as the process
  listen([kept](const std::string& kind, const std::string& what, int64_t bytes) {
    py::gil_scoped_acquire lock;
    py::error_scope scope;  // an operator may tell of a stall while an exception is under way
    (*kept)(kind, what, bytes);
  });
}

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  sim::register_hooks();
  module.def("listen", &sim::listen_in_python);
  module.def("device_count", [] { return sim::DEVICES; });
  module.def("current_device", &sim::current_device);
  module.def("set_device", &sim::set_current_device);
  module.def("default_generator", &sim::default_generator);
  module.def("memory", [] { return std::make_pair(sim::memory().live, sim::memory().peak); });
  module.def("forget_peak", &sim::forget_peak);
  module.def("backend", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<sim::Backend>(gloo);
  });
}
