// A call: its signature, whether C++ may run it, and the Python functions that run it otherwise.

#pragma once

#include "launch.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/utils/pybind.h>

namespace fusednorm {

namespace py = pybind11;
using c10::SymIntArrayRef;

inline std::atomic<int> pauses{0};  // open `force` blocks of all threads; while there is one, Python runs all calls
inline std::atomic<int64_t> sm_margin{0};  // the number of SMs that plans leave free, a part of a call's signature
inline std::array<std::atomic<PyObject*>, 2> hooks{};  // Triton's lists of hooks that run before and after a launch
inline bool runs_cpu_tensors = false;  // for tests without a GPU

// Whether all calls must run in Python. Reads the lists of hooks without the GIL: a launch may miss a hook that is
// being added.
inline bool is_paused() {
  for (const auto& each : hooks)
    if (PyObject* list = each.load(std::memory_order_relaxed); list && PyList_GET_SIZE(list)) return true;
  return pauses.load(std::memory_order_relaxed);
}

enum Op : int64_t { LAYER_FWD, LAYER_BWD, RMS_FWD, RMS_BWD, OPS };

// Python's functions, by Op: the ops above autograd, and those below it, which return (outputs, recipe); and the
// derivatives that only Python has. Never destroyed: the interpreter may be gone before this library.
struct Python {
  std::array<py::object, OPS> above, below;
  py::object statistics_gradient, differentiable_backward;
};
inline Python* python = nullptr;

// The signature of a call as a key, and the addresses of its tensors. Calls with one key have the same recipe.
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

inline const Tensor& undefined() {
  static const Tensor tensor;
  return tensor;
}

inline const Tensor& or_undefined(const optional<Tensor>& tensor) {
  return tensor.has_value() ? *tensor : undefined();
}

// Whether the tensor is strided memory on a GPU, and the only key that handles its ops is autograd's.
inline bool is_plain(const Tensor& tensor) {
  if (!tensor.defined()) return true;
  constexpr c10::DispatchKeySet others(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Negative,
       c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor, c10::DispatchKey::Functionalize,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});
  return (tensor.is_cuda() || (runs_cpu_tensors && tensor.is_cpu())) && !tensor.key_set().has_any(others) &&
         tensor.layout() == c10::kStrided && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

using TensorRefs = std::initializer_list<std::reference_wrapper<const Tensor>>;

// Whether C++ may run a call of these tensors. If not, Python does.
inline bool may_run_here(TensorRefs tensors) {
  if (is_paused() || c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  for (const Tensor& tensor : tensors)
    if (!is_plain(tensor)) return false;
  return true;
}

// Whether a torch.func transform or forward-mode AD is active, which must see the operations inside the op.
inline bool needs_formula(TensorRefs tensors) {
  constexpr c10::DispatchKeySet transforms(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode});
  if (c10::impl::tls_local_dispatch_key_set().included_.has_any(transforms)) return true;
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && tensor._fw_grad(0).defined()) return true;
  return false;
}

// Whether autograd would record an operation on these tensors.
inline bool is_recorded(TensorRefs tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && tensor.requires_grad()) return true;
  return false;
}

template <typename Value>
inline py::object to_python(const Value& value) {
  return py::cast(value);
}

inline py::object to_python(const Tensor& tensor) {
  return tensor.defined() ? py::cast(tensor) : py::none();
}

inline py::object to_python(const SymIntArrayRef& shape) {
  py::tuple sizes(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) sizes[i] = py::cast(shape[i]);
  return sizes;
}

inline Tensor to_tensor(py::handle object) {
  return object.is_none() ? Tensor() : py::cast<Tensor>(object);
}

inline std::vector<Tensor> to_tensors(py::handle objects) {
  std::vector<Tensor> tensors;
  for (py::handle each : objects) tensors.push_back(to_tensor(each));
  return tensors;
}

// For callers that hold the GIL.
template <typename... Arguments>
inline py::object call_python(const py::object& function, const Arguments&... arguments) {
  return function(to_python(arguments)...);
}

// The outputs of the op below autograd by Python's function. Keeps the recipe that it returns, if C++ may run the call.
template <typename... Arguments>
inline std::vector<Tensor> run_in_python(Op op, const Call* call, const Arguments&... arguments) {
  py::gil_scoped_acquire gil;
  py::tuple returned = call_python(python->below[op], arguments...);
  if (call && !returned[1].is_none()) {
    auto recipe = py::cast<std::shared_ptr<Recipe>>(returned[1]);
    std::unique_lock<std::shared_mutex> writing(mutex);
    if (recipes.size() >= most_recipes) recipes.clear();
    recipes[call->key] = recipe;
  }
  return to_tensors(returned[0]);
}

}  // namespace fusednorm
