// The host side of the four norm ops in C++: repeats the recipes that Python has written down (fusednorm/host/recipe.py) and
// records autograd's node, for plain tensors. Whatever else comes along is handed to the Python functions that
// `install` is given: a call that looks like none before, a tensor subclass, a mode, a transform, a forced variant.
// fusednorm/host/native.py is the other side.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <cuda.h>
#include <dlfcn.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace py = pybind11;
using at::Tensor;
using c10::SymIntArrayRef;
using std::optional;

namespace {

// ------------------------------------------------------------------------------------------------ CUDA's driver

// Opened at the first launch: a process that launches nothing needs no libcuda.
struct Driver {
  decltype(&cuLaunchKernelEx) launch;
  decltype(&cuTensorMapEncodeTiled) encode;
  decltype(&cuGetErrorString) error_string;
  decltype(&cuCtxGetCurrent) current_context;
  decltype(&cuDevicePrimaryCtxRetain) retain_context;
  decltype(&cuCtxSetCurrent) set_context;

  explicit Driver(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library, "fusednorm: ", path, " must be there to launch kernels, got: ", dlerror());
    find(library, launch, "cuLaunchKernelEx");
    find(library, encode, "cuTensorMapEncodeTiled");
    find(library, error_string, "cuGetErrorString");
    find(library, current_context, "cuCtxGetCurrent");
    find(library, retain_context, "cuDevicePrimaryCtxRetain");
    find(library, set_context, "cuCtxSetCurrent");
  }

  template <typename Function>
  static void find(void* library, Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    TORCH_CHECK(function, "fusednorm: CUDA's driver must have ", name, ", which the installed one has not");
  }

  void check(CUresult result) const {
    if (C10_LIKELY(result == CUDA_SUCCESS)) return;
    const char* text = nullptr;
    error_string(result, &text);
    TORCH_CHECK(false, "fusednorm: CUDA's driver says: ", text ? text : "unknown error");
  }

  // A thread of autograd's that has called nothing of CUDA's runtime has no context yet.
  void ensure_context(int device) const {
    CUcontext context = nullptr;
    check(current_context(&context));
    if (C10_UNLIKELY(!context)) {
      check(retain_context(&context, device < 0 ? 0 : device));
      check(set_context(context));
    }
  }
};

std::string driver_path = "libcuda.so.1";

const Driver& driver() {
  static const Driver opened(driver_path);
  return opened;
}

// ------------------------------------------------------------------------------------------------ recipes

constexpr size_t MAX_PARAMETER_BYTES = 1024;
constexpr size_t MAX_PARAMETERS = 64;
constexpr size_t MAP_ALIGNMENT = 64;

// An output or the workspace of a call.
struct Memory {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

struct Slot {
  size_t at, index;  // where in the parameters, and which address
  int64_t offset;
};

struct Map {
  size_t at, index;
  CUtensorMapDataType type;
  uint32_t rank;
  std::array<cuuint64_t, 5> sizes, strides;  // innermost first; strides in bytes, from the second on
  std::array<cuuint32_t, 5> box;
};

// One launch. Python builds it: the configuration first, then the parameters in the kernel's order.
struct Step {
  CUfunction function;
  CUlaunchConfig config{};
  std::array<CUlaunchAttribute, 3> attributes{};
  std::vector<char> parameters;  // right but for slots and maps
  std::vector<size_t> starts;    // of each parameter
  std::vector<Slot> slots;
  std::vector<Map> maps;

  Step(uint64_t function, std::array<unsigned, 3> grid, unsigned threads, unsigned shared_bytes, unsigned cluster,
       bool dependent)
      : function(reinterpret_cast<CUfunction>(function)) {
    config.gridDimX = grid[0] * cluster;
    config.gridDimY = grid[1];
    config.gridDimZ = grid[2];
    config.blockDimX = threads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared_bytes;
    if (cluster > 1) {
      CUlaunchAttribute& size = add(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
      size.value.clusterDim.x = cluster;
      size.value.clusterDim.y = size.value.clusterDim.z = 1;
      add(CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE).value.clusterSchedulingPolicyPreference =
          CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
    }
    if (dependent)  // on the launch before it: may be placed while that one ends
      add(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION).value.programmaticStreamSerializationAllowed = 1;
  }

  template <typename Number>
  void add_number(Number number) {
    size_t at = reserve(sizeof number, sizeof number);
    std::memcpy(parameters.data() + at, &number, sizeof number);
  }

  void add_address(size_t index, int64_t offset) {
    slots.push_back({reserve(sizeof(uint64_t), sizeof(uint64_t)), index, offset});
  }

  void add_map(size_t index, int type, const std::vector<uint64_t>& sizes, const std::vector<uint64_t>& strides,
               const std::vector<uint32_t>& box) {
    Map map{reserve(sizeof(CUtensorMap), MAP_ALIGNMENT), index, static_cast<CUtensorMapDataType>(type),
            static_cast<uint32_t>(sizes.size())};
    fill(map.sizes, sizes);
    fill(map.strides, strides);
    fill(map.box, box);
    maps.push_back(map);
  }

 private:
  CUlaunchAttribute& add(CUlaunchAttributeID id) {
    CUlaunchAttribute& attribute = attributes.at(config.numAttrs++);
    attribute.id = id;
    return attribute;
  }

  size_t reserve(size_t bytes, size_t alignment) {
    size_t at = (parameters.size() + alignment - 1) / alignment * alignment;
    TORCH_CHECK(at + bytes <= MAX_PARAMETER_BYTES && starts.size() < MAX_PARAMETERS,
                "fusednorm: a kernel has more parameters than native.cpp was made for");
    parameters.resize(at + bytes);
    starts.push_back(at);
    return at;
  }

  template <typename Array, typename Number>
  static void fill(Array& array, const std::vector<Number>& numbers) {
    for (size_t i = 0; i < numbers.size(); ++i) array.at(i) = numbers[i];
  }
};

struct Recipe {
  at::Device device;
  std::vector<optional<Memory>> outputs;  // nothing where an output is not wanted
  optional<Memory> workspace;
  std::vector<Step> steps;

  Recipe(int device, std::vector<optional<Memory>> outputs, optional<Memory> workspace, std::vector<Step> steps)
      : device(device < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device))),
        outputs(std::move(outputs)), workspace(std::move(workspace)), steps(std::move(steps)) {}
};

using Key = c10::SmallVector<int64_t, 96>;

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0xcbf29ce484222325;
    for (int64_t each : key) hash = (hash ^ static_cast<uint64_t>(each)) * 0x9E3779B97F4A7C15 + (hash >> 29);
    return hash;
  }
};

std::shared_mutex mutex;  // over the recipes
std::unordered_map<Key, std::shared_ptr<const Recipe>, Hash> recipes;
size_t most_recipes = 0;  // as recipe.py keeps

std::atomic<int> pauses{0};
std::atomic<int64_t> sm_margin{0};  // a part of what a call looks like
std::array<std::atomic<PyObject*>, 2> hooks{};  // Triton's lists of them: those who want to see its launches
std::atomic<int64_t> repeats{0};
bool cpu_too = false;  // so that tests need no GPU

// Whether Python's way was asked for. Looks at lists without the GIL: who hooks in meanwhile was too late.
bool is_paused() {
  for (const auto& each : hooks)
    if (PyObject* list = each.load(std::memory_order_relaxed); list && PyList_GET_SIZE(list)) return true;
  return pauses.load(std::memory_order_relaxed);
}

uint64_t stream_of(at::Device device) {
  if (device.is_cpu()) return 1;  // of tests that have no GPU
  return reinterpret_cast<uint64_t>(c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
}

Tensor allocate(const optional<Memory>& memory, at::Device device) {
  if (!memory) return {};
  return at::_ops::empty_strided::redispatch(
      c10::DispatchKeySet(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA), c10::fromIntArrayRefUnchecked(memory->sizes),
      c10::fromIntArrayRefUnchecked(memory->strides), memory->dtype, c10::kStrided, device, false);
}

// The outputs of the call whose tensors are at `addresses`, or nothing where it has to go the long way.
optional<std::vector<Tensor>> repeat(const Key& key, c10::SmallVector<uint64_t, 16>& addresses) {
  std::shared_ptr<const Recipe> recipe;
  {
    std::shared_lock<std::shared_mutex> reading(mutex);
    auto found = recipes.find(key);
    if (found == recipes.end()) return {};
    recipe = found->second;
  }
  uint64_t stream = stream_of(recipe->device);
  const Driver& cuda = driver();
  c10::OptionalDeviceGuard guard;
  if (!recipe->device.is_cpu()) guard.reset_device(recipe->device);
  cuda.ensure_context(recipe->device.index());
  std::vector<Tensor> outputs;
  outputs.reserve(recipe->outputs.size());
  for (const auto& memory : recipe->outputs) {
    outputs.push_back(allocate(memory, recipe->device));
    addresses.push_back(outputs.back().defined() ? reinterpret_cast<uint64_t>(outputs.back().data_ptr()) : 0);
  }
  Tensor workspace = allocate(recipe->workspace, recipe->device);
  addresses.push_back(workspace.defined() ? reinterpret_cast<uint64_t>(workspace.data_ptr()) : 0);
  for (const Step& step : recipe->steps) {
    alignas(MAP_ALIGNMENT) char parameters[MAX_PARAMETER_BYTES];
    void* pointers[MAX_PARAMETERS];
    std::memcpy(parameters, step.parameters.data(), step.parameters.size());
    for (size_t i = 0; i < step.starts.size(); ++i) pointers[i] = parameters + step.starts[i];
    for (const Slot& slot : step.slots) {
      uint64_t address = addresses[slot.index] + slot.offset;
      std::memcpy(parameters + slot.at, &address, sizeof address);
    }
    for (const Map& map : step.maps) {
      static constexpr std::array<cuuint32_t, 5> every{1, 1, 1, 1, 1};
      cuda.check(cuda.encode(
          reinterpret_cast<CUtensorMap*>(parameters + map.at), map.type, map.rank,
          reinterpret_cast<void*>(addresses[map.index]), map.sizes.data(), map.strides.data(), map.box.data(),
          every.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    }
    CUlaunchConfig config = step.config;
    config.hStream = reinterpret_cast<CUstream>(stream);
    config.attrs = const_cast<CUlaunchAttribute*>(step.attributes.data());
    cuda.check(cuda.launch(&config, step.function, pointers, nullptr));
  }
  repeats.fetch_add(1, std::memory_order_relaxed);
  return outputs;
}

// ------------------------------------------------------------------------------------------------ calls

enum Op : int64_t { LAYER_FWD, LAYER_BWD, RMS_FWD, RMS_BWD, OPS };

// What Python does in the place of ours: the ops above autograd, the ops below it (which come with a recipe), and the
// derivative of the statistics. Never destroyed: the interpreter may be gone before this library.
struct Python {
  std::array<py::object, OPS> above, below;
  py::object statistics_gradient, differentiable_backward;
};
Python* python = nullptr;

struct Call {
  Key key;
  c10::SmallVector<uint64_t, 16> addresses;

  Call(Op op, c10::IntArrayRef shape, int64_t scalar) {
    key.push_back(sm_margin.load(std::memory_order_relaxed) << 32 | static_cast<int64_t>(op) << 16 |
                  static_cast<int64_t>(shape.size()));
    key.push_back(scalar);
    key.append(shape.begin(), shape.end());
  }

  void add(const Tensor& tensor) {
    if (!tensor.defined()) {
      key.push_back(-1);
      addresses.push_back(0);
      return;
    }
    uint64_t address = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
    auto sizes = tensor.sizes(), strides = tensor.strides();
    key.push_back(sizes.size() << 32 | static_cast<int64_t>(tensor.scalar_type()) << 16 |
                  (tensor.get_device() & 0xff) << 1 | (address % 16 == 0));
    key.append(sizes.begin(), sizes.end());
    key.append(strides.begin(), strides.end());
    addresses.push_back(address);
  }
};

const Tensor& value(const optional<Tensor>& tensor) {
  static const Tensor undefined;
  return tensor.has_value() ? *tensor : undefined;
}

// Nothing but strided memory on a GPU, and autograd.
bool is_plain(const Tensor& tensor) {
  if (!tensor.defined()) return true;
  constexpr c10::DispatchKeySet strange(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Negative,
       c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor, c10::DispatchKey::Functionalize,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});
  return (tensor.is_cuda() || (cpu_too && tensor.is_cpu())) && !tensor.key_set().has_any(strange) && tensor.layout() == c10::kStrided &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

bool is_ordinary(std::initializer_list<std::reference_wrapper<const Tensor>> tensors) {
  if (is_paused() || c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  for (const Tensor& tensor : tensors)
    if (!is_plain(tensor)) return false;
  return true;
}

bool is_looked_into(std::initializer_list<std::reference_wrapper<const Tensor>> tensors) {
  constexpr c10::DispatchKeySet transforms(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode});
  if (c10::impl::tls_local_dispatch_key_set().included_.has_any(transforms)) return true;
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && tensor._fw_grad(0).defined()) return true;
  return false;
}

bool is_recorded(std::initializer_list<std::reference_wrapper<const Tensor>> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && tensor.requires_grad()) return true;
  return false;
}

py::object to_python(const Tensor& tensor) {
  return tensor.defined() ? py::cast(tensor) : py::none();
}

Tensor to_tensor(py::handle object) {
  return object.is_none() ? Tensor() : py::cast<Tensor>(object);
}

py::tuple to_python(SymIntArrayRef shape) {
  py::tuple sizes(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) sizes[i] = py::cast(shape[i]);
  return sizes;
}

// The long way: Python's function, which returns the outputs and what to remember.
template <typename... Arguments>
std::vector<Tensor> go_the_long_way(Op op, const Call* call, Arguments&&... arguments) {
  py::gil_scoped_acquire gil;
  py::tuple returned = python->below[op](std::forward<Arguments>(arguments)...);
  std::vector<Tensor> outputs;
  for (py::handle each : py::cast<py::tuple>(returned[0])) outputs.push_back(to_tensor(each));
  if (call && !returned[1].is_none()) {
    auto recipe = py::cast<std::shared_ptr<Recipe>>(returned[1]);
    std::unique_lock<std::shared_mutex> writing(mutex);
    if (recipes.size() >= most_recipes) recipes.clear();
    recipes[call->key] = recipe;
  }
  return outputs;
}

int64_t bits(double number) {
  int64_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

c10::SmallVector<int64_t, 4> as_ints(SymIntArrayRef shape) {
  c10::SmallVector<int64_t, 4> ints;
  for (const auto& each : shape) ints.push_back(each.guard_int(__FILE__, __LINE__));
  return ints;
}

// ------------------------------------------------------------------------------------------------ the ops below autograd

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Three three(std::vector<Tensor> of) { return {std::move(of[0]), std::move(of[1]), std::move(of[2])}; }
Two first_and_last(std::vector<Tensor> of) { return {std::move(of.front()), std::move(of.back())}; }
Two first_two(std::vector<Tensor> of) { return {std::move(of[0]), std::move(of[1])}; }

std::vector<Tensor> run_forward(
    Op op, const Tensor& x, SymIntArrayRef shape, const Tensor& weight, const Tensor& bias, optional<double> eps,
    bool wants_statistics = true) {
  optional<Call> call;
  if (is_ordinary({x, weight, bias})) {
    call.emplace(op, as_ints(shape), eps.has_value() ? bits(*eps) : -1);
    call->key.push_back(wants_statistics);
    for (const Tensor& each : {std::cref(x), std::cref(weight), std::cref(bias)}) call->add(each);
    if (auto outputs = repeat(call->key, call->addresses)) return std::move(*outputs);
  }
  py::gil_scoped_acquire gil;
  return go_the_long_way(op, call ? &*call : nullptr, to_python(x), to_python(shape), to_python(weight),
                         to_python(bias), py::cast(eps), wants_statistics);
}

std::vector<Tensor> run_backward(
    Op op, const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const Tensor& weight, const Tensor& bias, std::array<bool, 3> mask) {
  optional<Call> call;
  if (is_ordinary({grad_out, x, mean, rstd, weight, bias})) {
    call.emplace(op, as_ints(shape), mask[0] | mask[1] << 1 | mask[2] << 2);
    for (const Tensor& each : {std::cref(grad_out), std::cref(x), std::cref(mean), std::cref(rstd), std::cref(weight),
                               std::cref(bias), std::cref(value({}))})  // as recipe.py counts them: no residual_grad
      call->add(each);
    if (auto outputs = repeat(call->key, call->addresses)) return std::move(*outputs);
  }
  py::gil_scoped_acquire gil;
  return go_the_long_way(op, call ? &*call : nullptr, to_python(grad_out), to_python(x), to_python(shape),
                         to_python(mean), to_python(rstd), to_python(weight), to_python(bias),
                         py::make_tuple(mask[0], mask[1], mask[2]));
}

// What the dispatcher does for profilers, where a call goes round it.
void show(at::RecordFunction& record, const char* name, std::initializer_list<std::reference_wrapper<const Tensor>> tensors) {
  if (C10_LIKELY(!record.isActive())) return;
  std::vector<c10::IValue> inputs;
  if (record.needsInputs())
    for (const Tensor& tensor : tensors) inputs.emplace_back(tensor.defined() ? c10::IValue(tensor) : c10::IValue());
  record.before(name, &inputs);
}

// As problem.py checks a mask: the dispatcher's own conversion to an array has a sentence of its own.
template <size_t N>
std::array<bool, 3> flags(const char* op, const c10::List<bool>& mask) {
  if (C10_UNLIKELY(mask.size() != N)) {
    std::string got;
    for (size_t i = 0; i < mask.size(); ++i) got += std::string(i ? ", " : "") + (mask.get(i) ? "True" : "False");
    TORCH_CHECK(false, op, ": output_mask must have one flag per output, got [", got, "]");
  }
  return {mask.get(0), mask.get(1), N == 3 && mask.get(N - 1)};
}

Three layer_norm_fwd(
    const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight, const optional<Tensor>& bias, double eps) {
  return three(run_forward(LAYER_FWD, x, shape, value(weight), value(bias), eps));
}

Two rms_norm_fwd(const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight, optional<double> eps) {
  return first_and_last(run_forward(RMS_FWD, x, shape, value(weight), {}, eps));
}

Three layer_norm_bwd(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const optional<Tensor>& weight, const optional<Tensor>& bias, c10::List<bool> mask) {
  auto wanted = flags<3>("layer_norm_bwd", mask);
  return three(run_backward(LAYER_BWD, grad_out, x, shape, mean, rstd, value(weight), value(bias), wanted));
}

Two rms_norm_bwd(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& rstd, const optional<Tensor>& weight,
    c10::List<bool> mask) {
  auto wanted = flags<2>("rms_norm_bwd", mask);
  return first_two(run_backward(RMS_BWD, grad_out, x, shape, {}, rstd, value(weight), {}, wanted));
}

// ------------------------------------------------------------------------------------------------ and above it

auto& layer_norm_bwd_op() {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("fusednorm::layer_norm_bwd", "")
                       .typed<Three(const Tensor&, const Tensor&, SymIntArrayRef, const Tensor&, const Tensor&,
                                    const optional<Tensor>&, const optional<Tensor>&, c10::List<bool>)>();
  return op;
}

auto& rms_norm_bwd_op() {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("fusednorm::rms_norm_bwd", "")
                       .typed<Two(const Tensor&, const Tensor&, SymIntArrayRef, const Tensor&,
                                  const optional<Tensor>&, c10::List<bool>)>();
  return op;
}

optional<Tensor> some(const Tensor& tensor) {
  return tensor.defined() ? optional<Tensor>(tensor) : std::nullopt;
}

// Whichever norm's op it is, by the dispatcher: of LayerNorm where there is a mean.
Three norm_bwd(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const Tensor& weight, const Tensor& bias, std::array<bool, 3> mask) {
  if (mean.defined())
    return layer_norm_bwd_op().call(grad_out, x, shape, mean, rstd, some(weight), some(bias),
                                    c10::List<bool>({mask[0], mask[1], mask[2]}));
  auto [dx, dw] = rms_norm_bwd_op().call(grad_out, x, shape, rstd, some(weight), c10::List<bool>({mask[0], mask[1]}));
  return {dx, dw, Tensor()};
}

// One node for the ops of both norms, of which LayerNorm's has a mean; the statistics are among its outputs.
struct NormNode : torch::autograd::Function<NormNode> {
  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* context, Op op, const Tensor& x, const std::vector<int64_t>& shape,
      const optional<Tensor>& weight, const optional<Tensor>& bias, optional<double> eps) {
    auto outputs = run_forward(op, x, c10::fromIntArrayRefUnchecked(shape), value(weight), value(bias), eps);
    context->set_materialize_grads(false);
    context->save_for_backward({x, outputs[1], outputs[2], value(weight), value(bias)});
    if (!weight) context->saved_data["shape"] = shape;  // a map of names is not free
    if (!outputs[1].defined()) outputs.erase(outputs.begin() + 1);
    return outputs;
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    auto saved = context->get_saved_variables();
    const Tensor &x = saved[0], &mean = saved[1], &rstd = saved[2], &weight = saved[3], &bias = saved[4];
    bool layer = mean.defined();
    auto shape = weight.defined() ? weight.sizes().vec() : context->saved_data["shape"].toIntVector();
    auto sizes = c10::fromIntArrayRefUnchecked(shape);
    size_t inputs = 0;  // of those that are there
    bool wants_dx = context->needs_input_grad(inputs++);
    bool wants_dw = weight.defined() && context->needs_input_grad(inputs++);
    bool wants_db = bias.defined() && context->needs_input_grad(inputs++);
    Tensor dx, dw, db, grad_mean = layer ? grads[1] : Tensor(), grad_rstd = grads.back();
    if (grads[0].defined())
      std::tie(dx, dw, db) = norm_bwd(grads[0], x, sizes, mean, rstd, weight, bias, {wants_dx, wants_dw, wants_db});
    if (wants_dx && (grad_mean.defined() || grad_rstd.defined())) {
      py::gil_scoped_acquire gil;
      Tensor more = to_tensor(python->statistics_gradient(to_python(x), to_python(sizes), to_python(mean),
                                                          to_python(rstd), to_python(grad_mean), to_python(grad_rstd)));
      dx = dx.defined() ? at::add(dx, more) : more;
    }
    return {Tensor(), dx, Tensor(), dw, db, Tensor()};
  }
};

namespace compiled = torch::dynamo::autograd;

// What a module records: a node with y as its one output, and without what torch::autograd::Function does for functions
// of any kind, which is 3 us of a forward and its backward.
struct NormOfYNode : torch::autograd::Node {
  using variable_list = torch::autograd::variable_list;

  NormOfYNode(Op op, std::vector<int64_t> shape, optional<double> eps) : op(op), shape(std::move(shape)), eps(eps) {}

  std::string name() const override {
    return "NormOfYNode";
  }

  void save(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& weight, const Tensor& bias) {
    size_t at = 0;
    for (const Tensor& each : {std::cref(x), std::cref(mean), std::cref(rstd), std::cref(weight), std::cref(bias)})
      saved[at++] = torch::autograd::SavedVariable(each, /*is_output=*/false);
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto tensors = unpacked();
    if (!at::GradMode::is_enabled() || !grads[0].defined())
      return gradients(op, shape, grads[0], tensors, wanted());
    py::gil_scoped_acquire gil;  // the derivative is differentiated, of which the statistics are a part
    py::tuple mask(3);
    for (size_t i = 0; i < 3; ++i) mask[i] = py::cast(static_cast<bool>(wanted()[i]));
    py::tuple of = python->differentiable_backward(
        op == LAYER_FWD ? "layer" : "rms", to_python(c10::fromIntArrayRefUnchecked(shape)), py::cast(eps),
        to_python(grads[0]), to_python(tensors[0]), to_python(tensors[3]), to_python(tensors[4]), mask);
    return {to_tensor(of[0]), to_tensor(of[1]), to_tensor(of[2])};
  }

  // Of x, weight and bias, by tensors in the order of `save`.
  static variable_list gradients(
      Op op, const std::vector<int64_t>& shape, const Tensor& grad_out, const variable_list& tensors,
      const std::vector<bool>& wanted) {
    if (!grad_out.defined()) return {Tensor(), Tensor(), Tensor()};
    const Tensor &x = tensors[0], &mean = tensors[1], &rstd = tensors[2], &weight = tensors[3], &bias = tensors[4];
    auto sizes = c10::fromIntArrayRefUnchecked(shape);
    std::array<bool, 3> mask{wanted[0], weight.defined() && wanted[1], bias.defined() && wanted[2]};
    if (is_ordinary({grad_out, x, mean, rstd, weight, bias}) && !is_looked_into({grad_out, x, mean, rstd, weight})) {
      at::RecordFunction record(at::RecordScope::FUNCTION);
      show(record, op == LAYER_FWD ? "fusednorm::layer_norm_bwd" : "fusednorm::rms_norm_bwd",
           {grad_out, x, mean, rstd, weight, bias});
      at::AutoDispatchBelowADInplaceOrView below;
      return run_backward(op == LAYER_FWD ? LAYER_BWD : RMS_BWD, grad_out, x, sizes, mean, rstd, weight, bias, mask);
    }
    auto [dx, dw, db] = norm_bwd(grad_out, x, sizes, mean, rstd, weight, bias, mask);
    return {dx, dw, db};
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : saved) each.reset_data();
  }

  // For compiled autograd: what of the node a graph depends on, and a call of `gradients` in the graph.
  void compiled_args(compiled::CompiledNodeArgs& args) const override {
    args.collect(static_cast<int64_t>(op));
    args.collect(shape);
    for (const auto& each : saved) args.collect(each, false);
  }

  variable_list apply_with_saved(const variable_list& grads, compiled::SwapSavedVariables& swap) override {
    for (auto& each : saved) swap.before(each);
    compiled::PackedArgs packed;
    packed.pack(static_cast<int64_t>(op));
    packed.pack(shape);
    packed.pack(unpacked());
    packed.pack(wanted());
    std::vector<at::TypePtr> schema;
    for (const auto& each : packed.vec())
      schema.emplace_back(each.isTensor() ? static_cast<at::TypePtr>(at::TensorType::get()) : each.type());
    auto metadata = compiled::IValuePacker<std::vector<optional<torch::autograd::InputMetadata>>>::pack(
        compiled::get_input_metadata(next_edges()));
    const auto& interface = compiled::getPyCompilerInterface();
    auto function = interface->bind_function(
        swap.get_py_compiler(), name(), in_graph, schema, /*is_custom_function=*/true, /*is_traceable=*/true);
    auto outputs = interface->call_function(
        swap.get_py_compiler(), "apply_functional", function, grads, packed.vec(), metadata);
    for (auto& each : saved) swap.after(each);
    return outputs;
  }

  static variable_list in_graph(const variable_list& grads, const std::vector<c10::IValue>& arguments) {
    compiled::PackedArgs packed(arguments);
    auto op = static_cast<Op>(packed.unpack<int64_t>());
    auto shape = packed.unpack<std::vector<int64_t>>();
    auto tensors = packed.unpack<variable_list>();
    return gradients(op, shape, grads[0], tensors, packed.unpack<std::vector<bool>>());
  }

  variable_list unpacked() {
    variable_list tensors;
    for (const auto& each : saved) tensors.push_back(each.unpack());
    return tensors;
  }

  std::vector<bool> wanted() const {
    return {task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
  }

  Op op;
  std::vector<int64_t> shape;
  optional<double> eps;
  std::array<torch::autograd::SavedVariable, 5> saved;  // x, mean, rstd, weight, bias
};

// Nodes are owned by shared pointers with a deleter of their own (torch 2.11), or by intrusive ones (2.13).
template <typename Made>
auto owned(Made* node, int) -> decltype(deleteNode(node), std::shared_ptr<torch::autograd::Node>()) {
  return std::shared_ptr<torch::autograd::Node>(node, [](auto* each) { deleteNode(each); });
}

template <typename Made>
auto owned(Made* node, long) {
  return c10::intrusive_ptr<Made>::unsafe_steal_from_new(node);
}

Tensor record_y(
    Op op, const Tensor& x, const std::vector<int64_t>& shape, const Tensor& weight, const Tensor& bias,
    optional<double> eps) {
  std::vector<Tensor> outputs;
  {
    at::AutoGradMode off(false);
    at::AutoDispatchBelowADInplaceOrView below;
    outputs = run_forward(op, x, c10::fromIntArrayRefUnchecked(shape), weight, bias, eps);
  }
  auto* node = new NormOfYNode(op, shape, eps);
  decltype(torch::autograd::Edge::function) owner = owned(node, 0);
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
  node->save(x, outputs[1], outputs[2], weight, bias);
  torch::autograd::set_history(outputs[0], owner);
  return outputs[0];
}

template <typename... Arguments>
py::object ask_python_above(Op op, Arguments&&... arguments) {
  return python->above[op](std::forward<Arguments>(arguments)...);
}

Three three_of(py::handle outputs) {
  py::tuple of = py::cast<py::tuple>(outputs);
  return {to_tensor(of[0]), to_tensor(of[1]), to_tensor(of[2])};
}

Two two_of(py::handle outputs) {
  py::tuple of = py::cast<py::tuple>(outputs);
  return {to_tensor(of[0]), to_tensor(of[1])};
}

Three layer_norm_fwd_above(
    const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight_, const optional<Tensor>& bias_, double eps) {
  const Tensor &weight = value(weight_), &bias = value(bias_);
  if (!is_ordinary({x, weight, bias}) || is_looked_into({x, weight, bias})) {
    py::gil_scoped_acquire gil;
    return three_of(ask_python_above(
        LAYER_FWD, to_python(x), to_python(shape), to_python(weight), to_python(bias), py::cast(eps)));
  }
  if (is_recorded({x, weight, bias})) {
    auto ints = as_ints(shape);
    return three(NormNode::apply(
        LAYER_FWD, x, std::vector<int64_t>(ints.begin(), ints.end()), weight_, bias_, optional<double>(eps)));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return layer_norm_fwd(x, shape, weight_, bias_, eps);
}

Two rms_norm_fwd_above(
    const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight_, optional<double> eps) {
  const Tensor& weight = value(weight_);
  if (!is_ordinary({x, weight}) || is_looked_into({x, weight})) {
    py::gil_scoped_acquire gil;
    return two_of(ask_python_above(RMS_FWD, to_python(x), to_python(shape), to_python(weight), py::cast(eps)));
  }
  if (is_recorded({x, weight})) {
    auto ints = as_ints(shape);
    return first_two(
        NormNode::apply(RMS_FWD, x, std::vector<int64_t>(ints.begin(), ints.end()), weight_, optional<Tensor>(), eps));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return rms_norm_fwd(x, shape, weight_, eps);
}

Three layer_norm_bwd_above(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const optional<Tensor>& weight, const optional<Tensor>& bias, c10::List<bool> mask) {
  auto wanted = flags<3>("layer_norm_bwd", mask);
  if (!is_ordinary({grad_out, x, mean, rstd, value(weight), value(bias)}) ||
      is_looked_into({grad_out, x, mean, rstd, value(weight)}) ||
      is_recorded({grad_out, x, mean, rstd, value(weight)})) {
    py::gil_scoped_acquire gil;
    return three_of(ask_python_above(
        LAYER_BWD, to_python(grad_out), to_python(x), to_python(shape), to_python(mean), to_python(rstd),
        to_python(value(weight)), to_python(value(bias)), py::make_tuple(wanted[0], wanted[1], wanted[2])));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return layer_norm_bwd(grad_out, x, shape, mean, rstd, weight, bias, mask);
}

Two rms_norm_bwd_above(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& rstd, const optional<Tensor>& weight,
    c10::List<bool> mask) {
  auto wanted = flags<2>("rms_norm_bwd", mask);
  if (!is_ordinary({grad_out, x, rstd, value(weight)}) || is_looked_into({grad_out, x, rstd, value(weight)}) ||
      is_recorded({grad_out, x, rstd, value(weight)})) {
    py::gil_scoped_acquire gil;
    return two_of(ask_python_above(RMS_BWD, to_python(grad_out), to_python(x), to_python(shape), to_python(rstd),
                                   to_python(value(weight)), py::make_tuple(wanted[0], wanted[1])));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return rms_norm_bwd(grad_out, x, shape, rstd, weight, mask);
}

// y alone, as modules ask for it: without the dispatcher, and without statistics that no backward will read. Returns
// NotImplemented for whatever is to be looked at in Python.
PyObject* norm_of(Op op, PyObject* const* arguments, Py_ssize_t count) {
  bool layer = op == LAYER_FWD;
  auto decline = [] { Py_RETURN_NOTIMPLEMENTED; };
  if (count != (layer ? 5 : 4) || !python || at::impl::torch_function_mode_enabled() ||
      at::autocast::is_autocast_enabled(at::kCUDA) || c10::InferenceMode::is_enabled())
    return decline();
  auto tensor = [](PyObject* object, optional<Tensor>& into) {
    if (object == Py_None) return true;
    if (!THPVariable_CheckTypeExact(Py_TYPE(object))) return false;
    into = THPVariable_Unpack(object);
    return true;
  };
  optional<Tensor> x, weight, bias;
  if (!tensor(arguments[0], x) || !x || !tensor(arguments[2], weight) || (layer && !tensor(arguments[3], bias)))
    return decline();
  if (!PyTuple_Check(arguments[1])) return decline();
  std::vector<int64_t> shape(PyTuple_GET_SIZE(arguments[1]));
  for (size_t i = 0; i < shape.size(); ++i) {
    PyObject* size = PyTuple_GET_ITEM(arguments[1], i);
    if (!PyLong_CheckExact(size)) return decline();
    int overflow = 0;
    shape[i] = PyLong_AsLongLongAndOverflow(size, &overflow);
    if (overflow) return decline();
  }
  optional<double> eps;
  if (PyObject* number = arguments[count - 1]; number != Py_None) {
    if (!PyFloat_CheckExact(number)) return decline();
    eps = PyFloat_AS_DOUBLE(number);
  } else if (layer) {
    return decline();  // RMSNorm alone has an eps of its own
  }
  if (!is_ordinary({*x, value(weight), value(bias)}) || is_looked_into({*x, value(weight), value(bias)}))
    return decline();
  Tensor y;
  {
    py::gil_scoped_release released;
    at::RecordFunction record(at::RecordScope::FUNCTION);
    show(record, layer ? "fusednorm::layer_norm_fwd" : "fusednorm::rms_norm_fwd", {*x, value(weight), value(bias)});
    if (is_recorded({*x, value(weight), value(bias)})) {
      y = record_y(op, *x, shape, value(weight), value(bias), eps);
    } else {
      at::AutoDispatchBelowADInplaceOrView below;
      y = run_forward(op, *x, c10::fromIntArrayRefUnchecked(shape), value(weight), value(bias), eps, false)[0];
    }
  }
  return THPVariable_Wrap(y);
}

PyObject* layer_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  return norm_of(LAYER_FWD, arguments, count);
  END_HANDLE_TH_ERRORS
}

PyObject* rms_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  return norm_of(RMS_FWD, arguments, count);
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {
    {"layer_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(layer_norm)), METH_FASTCALL, nullptr},
    {"rms_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(rms_norm)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// ------------------------------------------------------------------------------------------------ Python's side

std::vector<std::unique_ptr<torch::Library>> installed;

void install(const std::string& key, const std::vector<py::object>& above, const std::vector<py::object>& below,
             py::object statistics_gradient, py::object differentiable_backward, size_t kept) {
  most_recipes = kept;
  python = new Python{{}, {}, std::move(statistics_gradient), std::move(differentiable_backward)};
  for (size_t op = 0; op < OPS; ++op) {
    python->above[op] = above.at(op);
    python->below[op] = below.at(op);
  }
  cpu_too |= key == "CPU";
  auto library = [](const std::string& at) {
    installed.push_back(std::make_unique<torch::Library>(
        torch::Library::IMPL, "fusednorm", c10::parseDispatchKey(at), __FILE__, __LINE__));
    return installed.back().get();
  };
  torch::Library* ops = library(key);
  ops->impl("layer_norm_fwd", TORCH_FN(layer_norm_fwd));
  ops->impl("layer_norm_bwd", TORCH_FN(layer_norm_bwd));
  ops->impl("rms_norm_fwd", TORCH_FN(rms_norm_fwd));
  ops->impl("rms_norm_bwd", TORCH_FN(rms_norm_bwd));
  torch::Library* autograd = library("Autograd" + key);
  autograd->impl("layer_norm_fwd", TORCH_FN(layer_norm_fwd_above));
  autograd->impl("layer_norm_bwd", TORCH_FN(layer_norm_bwd_above));
  autograd->impl("rms_norm_fwd", TORCH_FN(rms_norm_fwd_above));
  autograd->impl("rms_norm_bwd", TORCH_FN(rms_norm_bwd_above));
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.attr("torch_version") = TORCH_VERSION;
  PyModule_AddFunctions(module.ptr(), functions);
  py::class_<Memory>(module, "Memory")
      .def(py::init([](std::vector<int64_t> shape, std::vector<int64_t> strides, at::ScalarType dtype) {
             return Memory{std::move(shape), std::move(strides), dtype};
           }),
           py::arg("shape"), py::arg("strides"), py::arg("dtype"));
  py::class_<Step>(module, "Step")
      .def(py::init<uint64_t, std::array<unsigned, 3>, unsigned, unsigned, unsigned, bool>(), py::kw_only(),
           py::arg("function"), py::arg("grid"), py::arg("threads"), py::arg("shared_bytes"), py::arg("cluster"),
           py::arg("dependent"))
      .def("add_i32", &Step::add_number<int32_t>)
      .def("add_i64", &Step::add_number<int64_t>)
      .def("add_fp32", &Step::add_number<float>)
      .def("add_fp64", &Step::add_number<double>)
      .def("add_address", &Step::add_address, py::arg("index"), py::arg("offset"))
      .def("add_map", &Step::add_map, py::kw_only(), py::arg("index"), py::arg("type"), py::arg("shape"),
           py::arg("strides"), py::arg("box"));
  py::class_<Recipe, std::shared_ptr<Recipe>>(module, "Recipe")
      .def(py::init<int, std::vector<optional<Memory>>, optional<Memory>, std::vector<Step>>(), py::kw_only(),
           py::arg("device"), py::arg("outputs"), py::arg("workspace"), py::arg("steps"));
  module.def("install", &install);
  module.def("pause", [](int by) { pauses += by; });
  module.def("set_sm_margin", [](int64_t sms) { sm_margin = sms; });
  module.def("watch", [](py::list enter, py::list exit) {
    if (hooks[0] != enter.ptr()) hooks[0] = enter.release().ptr();  // for good
    if (hooks[1] != exit.ptr()) hooks[1] = exit.release().ptr();
  });
  module.def("repeats", [] { return repeats.load(); });
  module.def("forget", [] {
    std::unique_lock<std::shared_mutex> writing(mutex);
    recipes.clear();
  });
  module.def("use_driver", [](const std::string& path) { driver_path = path; });
}
