// Operators: the CPU's kernels on tensors over the same memory, with the checks and the stalls of a real device.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <set>

namespace sim {

using at::Tensor;
using c10::IValue;

static bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

static Tensor over(const Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  return made;
}

static void free_storage(void* context) { delete static_cast<c10::Storage*>(context); }

static c10::Storage host_storage(const c10::Storage& storage) {
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), &free_storage, c10::Device(c10::kCPU));
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true};
}

struct Adopted {
  c10::Storage storage;
  int64_t bytes;
};

static void free_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  adopt(-adopted->bytes);
  delete adopted;
}

static c10::Storage device_storage(const c10::Storage& storage, int device) {
  int64_t bytes = storage.nbytes();
  adopt(bytes);
  c10::DataPtr data(storage.mutable_data(), new Adopted{storage, bytes}, &free_adopted, c10::Device(TYPE, device));
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), allocator(), true};
}

static void check_allocated(const Tensor& tensor, const std::string& name) {
  size_t end = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  TORCH_CHECK(!tensor.numel() || end <= tensor.storage().nbytes(), name, " uses freed memory of the device");
}

Tensor on_host(const Tensor& tensor) {
  check_allocated(tensor, "a copy");
  return over(tensor, host_storage(tensor.storage()), c10::DispatchKey::CPU);
}

// One call of an operator. Its tensors on the device have partners on the host over the same memory.
struct Call {
  const std::string& name;
  int device = -1;
  bool host_arrays = false, host_scalars = false;
  std::vector<std::pair<Tensor, Tensor>> partners;  // on the device, on the host

  Tensor lower(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!on_device(tensor)) {
      (tensor.dim() ? host_arrays : host_scalars) |= !tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return tensor;
    }
    TORCH_CHECK(
        device < 0 || device == tensor.device().index(),
        "Expected all tensors to be on the same device, but found sim:", device, " and ", tensor.device(), " in ", name);
    device = tensor.device().index();
    c10::Storage storage;
    for (auto& [above, below] : partners) {
      if (above.is_same(tensor)) return below;
      if (above.storage().is_alias_of(tensor.storage())) storage = below.storage();
    }
    check_allocated(tensor, name);
    if (!storage) storage = host_storage(tensor.storage());
    partners.emplace_back(tensor, over(tensor, storage, c10::DispatchKey::CPU));
    return partners.back().second;
  }

  Tensor lift(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    c10::Storage storage;
    for (auto& [above, below] : partners) {
      if (below.is_same(tensor)) return above;
      if (below.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) storage = above.storage();
    }
    if (!storage) storage = device_storage(tensor.storage(), device);
    partners.emplace_back(over(tensor, storage, c10::DispatchKey::PrivateUse1), tensor);
    return partners.back().first;
  }

  // What a kernel has resized (`out=`) is resized on the device too.
  void take_sizes() {
    for (auto& [above, below] : partners) {
      if (below.sizes() == above.sizes() && below.strides() == above.strides()) continue;
      if (below.storage().data() != above.storage().data()) {
        size_t bytes = below.storage().nbytes();
        auto data = allocate(bytes, device);
        if (bytes) memcpy(data.get(), below.storage().data(), bytes);
        above.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
        above.storage().unsafeGetStorageImpl()->set_nbytes(bytes);
      }
      above.unsafeGetTensorImpl()->set_sizes_and_strides(below.sizes(), below.strides(), below.storage_offset());
    }
  }
};

static bool starts(const std::string& name, const char* with) { return name.rfind(with, 0) == 0; }

// Operators whose result has a size, or a value on the host, that only the device knows.
static const std::set<std::string> WAIT_FOR_VALUES{
    "aten::nonzero", "aten::masked_select", "aten::equal",   "aten::_unique",     "aten::_unique2",
    "aten::bincount", "aten::unique_dim",   "aten::is_nonzero", "aten::unique_consecutive"};
// Kernels that take no scalar of the CPU beside tensors of the device; elementwise ones get it with the launch.
static const std::set<std::string> NO_HOST_SCALARS{
    "aten::cat", "aten::mm", "aten::bmm", "aten::index_select", "aten::gather", "aten::scatter", "aten::scatter_add",
    "aten::embedding", "aten::nll_loss_forward", "aten::_fused_adamw_", "aten::_fused_adam_", "aten::_fused_sgd_"};

static bool indexes(const std::string& name) {
  static const std::set<std::string> names{
      "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
  return names.count(name);
}

static void check_devices(const Call& call, int host_indices, bool first_on_host) {
  bool allowed = starts(call.name, "aten::_foreach") || (host_indices && !first_on_host);
  TORCH_CHECK(
      !call.host_arrays || allowed, "Expected all tensors to be on the same device, but found cpu and sim:", call.device,
      " in ", call.name);
  TORCH_CHECK(
      !call.host_scalars || !NO_HOST_SCALARS.count(call.name),
      "Expected all tensors to be on the same device, but found a scalar of the cpu in ", call.name);
}

static bool waits_for_values(const std::string& name, const torch::jit::Stack& stack, size_t base) {
  if (name == "aten::repeat_interleave") return stack.back().isNone();  // no output_size
  if (name == "aten::histc") return stack[base + 2].toScalar().equal(stack[base + 3].toScalar().to<double>());
  return WAIT_FOR_VALUES.count(name);
}

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  size_t base = stack->size() - arguments.size();
  Call call{op.schema().name()};
  bool first_on_host = (*stack)[base].isTensor() && !on_device((*stack)[base].toTensor()), mask = false;
  int host_indices = 0;
  bool stalls = waits_for_values(call.name, *stack, base);
  for (size_t at = 0; at < arguments.size(); ++at) {
    IValue& value = (*stack)[base + at];
    if (value.isTensor()) {
      value = call.lower(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> lowered;
      for (const Tensor& tensor : value.toTensorVector()) lowered.push_back(call.lower(tensor));
      value = lowered;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> lowered;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        bool given = tensor && tensor->defined();
        mask |= given && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte);
        host_indices += given && !on_device(*tensor);
        lowered.push_back(given ? std::optional<Tensor>(call.lower(*tensor)) : std::nullopt);
      }
      value = lowered;
    } else if (value.isDevice() && value.toDevice().type() == TYPE) {
      if (call.device < 0) call.device = value.toDevice().index();
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator() && value.toGenerator().device().type() == TYPE) {
      value = host_generator(value.toGenerator());
    } else if (value.isNone() && arguments[at].name() == "generator") {
      value = host_generator(default_generator(call.device));
    }
  }
  if (call.device < 0) call.device = current_device();
  check_devices(call, indexes(call.name) ? host_indices : 0, first_on_host);
  if (host_indices) note("H2D", call.name + " by an index of the cpu");
  if (mask || stalls) {
    note("SYNC", mask ? call.name + " by a mask" : call.name);
    end_copies();
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.take_sizes();
  for (size_t at = stack->size() - op.schema().returns().size(); at < stack->size(); ++at) {
    IValue& value = (*stack)[at];
    if (value.isTensor()) {
      value = call.lift(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> lifted;
      for (const Tensor& tensor : value.toTensorVector()) lifted.push_back(call.lift(tensor));
      value = lifted;
    }
  }
}

// --- memory

static Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  auto meta = c10::scalarTypeToTypeMeta(dtype.value_or(at::get_default_dtype_as_scalartype()));
  size_t bytes = at::detail::computeStorageNbytes(size, stride, meta.itemsize());
  int index = device && device->index() >= 0 ? device->index() : current_device();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate(bytes, index), allocator(), true);
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, meta);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return made;
}

static Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<c10::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  auto options = at::TensorOptions().device(at::kMeta).dtype(dtype.value_or(at::get_default_dtype_as_scalartype()));
  return empty_strided(size, at::empty(size, options, format).strides(), dtype, layout, device, pin);
}

static const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

static Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return self;
}

static Tensor& set_all_of_storage(Tensor& self, at::Storage source) {
  int64_t elements = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {elements}, {1});
}

static Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

static Tensor& set_nothing(Tensor& self) {
  auto data = allocate(0, self.device().index());
  return set_storage(self, at::Storage(c10::Storage::use_byte_size_t(), 0, std::move(data), allocator(), true), 0, {0}, {1});
}

static Tensor as_strided(
    const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  auto made = over(self, self.storage(), c10::DispatchKey::PrivateUse1);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return made;
}

static void record_stream(Tensor&, at::Stream) {}

// --- copies: in the device's order, and not yet made when the host goes on, where the host's memory is pinned

static Tensor copy_from(const Tensor& from, const Tensor& into, bool non_blocking) {
  if (on_device(from) && on_device(into)) {
    if (from.device() != into.device()) note("P2P", "copy", from.nbytes());
    on_host(into).copy_(on_host(from));
  } else if (on_device(into)) {
    bool later = non_blocking && is_pinned(from.storage().data());
    note(later ? "H2D later" : "H2D", "copy", from.nbytes());
    on_host(into).copy_(from);
    if (later) hold_until_copied(from);
  } else if (non_blocking && is_pinned(into.storage().data())) {
    note("D2H later", "copy", from.nbytes());
    copy_later(on_host(from), into);
  } else {
    note("D2H", "copy", from.nbytes());
    end_copies();
    Tensor(into).copy_(on_host(from));
  }
  return into;
}

static at::Scalar local_scalar(const Tensor& self) {
  note("SYNC", "item");
  end_copies();
  return on_host(self).item();
}

// --- kernels that are not the CPU's

// A law of its own, as on CUDA: what dropout keeps is not what `bernoulli_` would draw.
static std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double chance, std::optional<bool> train) {
  if (!train.value_or(true) || !input.numel()) return {input.clone(), at::ones_like(input, at::kBool)};
  Tensor mask = at::empty(input.sizes(), input.options().dtype(at::kFloat)).uniform_().ge(chance);
  return {input.mul(mask).mul_(chance < 1 ? 1 / (1 - chance) : 0), mask};
}

static Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  static const std::string name = "aten::convolution";
  Call call{name};
  Tensor x = call.lower(input), w = call.lower(weight);
  std::optional<Tensor> b = bias ? std::optional<Tensor>(call.lower(*bias)) : std::nullopt;
  return call.lift(at::convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups));
}

static std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  static const std::string name = "aten::convolution_backward";
  Call call{name};
  Tensor g = call.lower(grad), x = call.lower(input), w = call.lower(weight);
  std::vector<int64_t> bias{grad.size(1)};
  auto [dx, dw, db] = at::convolution_backward(
      g, x, w, bias, stride, padding, dilation, transposed, output_padding, groups, wanted);
  return {call.lift(dx), call.lift(dw), call.lift(db)};
}

static int64_t math_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // no fused kernel
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("set_", set_nothing);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_all_of_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("as_strided", as_strided);
  library.impl("record_stream", record_stream);
  library.impl("_copy_from", copy_from);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("native_dropout", native_dropout);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32)
}

}  // namespace sim

namespace at::native {
using sim::math_attention;
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &math_attention)
}  // namespace at::native
