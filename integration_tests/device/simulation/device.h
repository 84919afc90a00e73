// A simulated accelerator in host memory, for torch's PrivateUse1 key: what its three files share.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>

namespace sim {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 4;
constexpr int UNWRITTEN = 0xFF;  // each byte of memory that nobody has written: floats of such bytes are NaN

using Listener = std::function<void(const std::string& kind, const std::string& what, int64_t bytes)>;

// Tell the listener of a stall, copy, collective or mistake. No mutex may be held: the listener takes Python's lock.
void note(const std::string& kind, const std::string& what, int64_t bytes = 0);
void listen(Listener listener);

struct Memory {
  int64_t live, peak;
};
Memory memory();      // bytes of device memory in this process
void forget_peak();   // from now on the peak is of what is live
void adopt(int64_t bytes);  // count memory that an operator has made; negative where it is freed

int current_device();
void set_current_device(int device);
c10::DataPtr allocate(size_t bytes, int device);
c10::Allocator* allocator();
at::Generator default_generator(int device);    // of a device; -1 is the current one
at::Generator host_generator(const at::Generator& generator);  // what the CPU's kernels draw from in its place
void register_hooks();

// Copies that have been given and not yet been made: they end when the host waits for the device, in any way.
bool is_pinned(const void* pointer);
void copy_later(const at::Tensor& from_host, const at::Tensor& into_host);  // unread until then: `into_host` is NaN
void hold_until_copied(const at::Tensor& pinned);  // the host may not write it until then
void end_copies();

at::Tensor on_host(const at::Tensor& tensor);  // a CPU tensor over the same memory, which it keeps alive

// In its scope operators on host tensors reach their kernels, whatever modes and transforms are in force.
struct Below {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace sim
