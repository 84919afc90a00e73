// The device itself: memory, pinned memory, copies under way, streams, generators, and torch's hooks to all of them.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>
#include <mutex>

namespace sim {

static std::mutex mutex;
static Listener listener;
static std::atomic<int64_t> live{0}, peak{0};
static thread_local int current = 0;

void listen(Listener given) { listener = std::move(given); }

void note(const std::string& kind, const std::string& what, int64_t bytes) {
  if (listener) listener(kind, what, bytes);
}

Memory memory() { return {live, peak}; }

void forget_peak() { peak = live.load(); }

void adopt(int64_t bytes) {
  int64_t now = live += bytes, before = peak;
  while (now > before && !peak.compare_exchange_weak(before, now)) {
  }
}

int current_device() { return current; }

void set_current_device(int device) {
  TORCH_CHECK(device < DEVICES, "invalid device ordinal ", device, ": there are ", DEVICES);
  if (device >= 0) current = device;
}

// --- memory

struct Block {
  void* data;
  int64_t bytes;
};

static void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  adopt(-block->bytes);
  free(block->data);
  delete block;
}

c10::DataPtr allocate(size_t bytes, int device) {
  void* data = bytes ? malloc(bytes) : nullptr;
  if (data) memset(data, UNWRITTEN, bytes);
  adopt(bytes);
  return {data, new Block{data, static_cast<int64_t>(bytes)}, &free_block, c10::Device(TYPE, device)};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return sim::allocate(bytes, current); }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

static std::map<const char*, size_t> pinned;  // first byte -> bytes

static void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(static_cast<const char*>(data));
  }
  free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = malloc(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> lock(mutex);
    pinned[static_cast<const char*>(data)] = std::max<size_t>(bytes, 1);
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

static DeviceAllocator device_allocator;
static PinnedAllocator pinned_allocator;

c10::Allocator* allocator() { return &device_allocator; }

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned.begin()) return false;
  auto& [first, bytes] = *--after;
  return static_cast<const char*>(pointer) < first + bytes;
}

// --- copies under way

struct Copy {
  at::Tensor host, values;  // of a copy to the device, `values` are what `host` had when it was given
  bool to_device;
};
static std::vector<Copy> copies;

static bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor left = a.contiguous(), right = b.contiguous();
  return !left.nbytes() || !memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes());
}

void copy_later(const at::Tensor& from_host, const at::Tensor& into_host) {
  Below below;
  at::Tensor values = from_host.clone();
  if (into_host.is_contiguous() && into_host.nbytes()) memset(into_host.mutable_data_ptr(), UNWRITTEN, into_host.nbytes());
  std::lock_guard<std::mutex> lock(mutex);
  copies.push_back({into_host, values, false});
}

void hold_until_copied(const at::Tensor& host) {
  Below below;
  at::Tensor values = host.clone();
  std::lock_guard<std::mutex> lock(mutex);
  copies.push_back({host, values, true});
}

void end_copies() {
  std::vector<Copy> ended;
  {
    std::lock_guard<std::mutex> lock(mutex);
    ended.swap(copies);
  }
  Below below;
  for (auto& [host, values, to_device] : ended) {
    if (!to_device) host.copy_(values);
    else if (!same_bytes(host, values)) note("RACE", "pinned memory written before it was copied to the device");
  }
}

// --- streams: all work is done when it is given, so they are numbers, and events are always past

static thread_local std::map<int, c10::StreamId> streams;  // device -> the current one
static std::atomic<int64_t> streams_made{0};

static void wait_for(const char* what) {
  note("SYNC", what);
  end_copies();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream numbered(c10::Device device, c10::StreamId number) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, static_cast<c10::DeviceIndex>(at(device))), number);
  }
  static int at(c10::Device device) { return device.index() < 0 ? current : device.index(); }

  c10::DeviceType type() const override { return TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Device getDevice() const override { return {TYPE, static_cast<c10::DeviceIndex>(current)}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = at(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(c10::Device device) const override { return numbered(device, streams[at(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return numbered(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return numbered(device, ++streams_made); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override { *event = this_event(); }
  static void* this_event() {
    static char event;
    return &event;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return note("POLL", "event"), end_copies(), true; }
  bool queryStream(const c10::Stream&) const override { return note("POLL", "stream"), end_copies(), true; }
  void synchronizeEvent(void*) const override { wait_for("event"); }
  void synchronizeStream(const c10::Stream&) const override { wait_for("stream"); }
  void synchronizeDevice(c10::DeviceIndex) const override { wait_for("device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- generators: one per device, of the CPU's law, with no offset that could be moved

struct Generator final : c10::GeneratorImpl {
  at::Generator host;
  Generator(int device, at::Generator host)
      : GeneratorImpl({TYPE, static_cast<c10::DeviceIndex>(device)}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "this generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "this generator has no offset"); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), host.clone()); }
};

static at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

static const at::Generator& default_of(int device) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < DEVICES; ++index) made.push_back(new_generator(index));
    return made;
  }();
  return all.at(device < 0 ? current : device);
}

at::Generator default_generator(int device) { return default_of(device); }

at::Generator host_generator(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

// --- hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current;
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_of(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current : device);
  }
  at::Device getDeviceFromPtr(void*) const override { return {TYPE, static_cast<c10::DeviceIndex>(current)}; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = sim::allocate(bytes, storage.device().index());
    if (size_t kept = std::min(bytes, storage.nbytes())) memcpy(data.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  c10::SetAllocator(TYPE, &device_allocator);
}

}  // namespace sim
