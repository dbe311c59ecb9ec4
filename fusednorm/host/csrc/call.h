// A call: what it looks like, whether this side may run it, and Python's functions for when it may not.

#pragma once

#include "launch.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/utils/pybind.h>

namespace fusednorm {

namespace py = pybind11;
using c10::SymIntArrayRef;

inline std::atomic<int> pauses{0};
inline std::atomic<int64_t> sm_margin{0};  // a part of what a call looks like
inline std::array<std::atomic<PyObject*>, 2> hooks{};  // Triton's lists of them: those who want to see its launches
inline bool cpu_too = false;  // so that tests need no GPU

// Whether Python's way was asked for. Looks at lists without the GIL: who hooks in meanwhile was too late.
inline bool is_paused() {
  for (const auto& each : hooks)
    if (PyObject* list = each.load(std::memory_order_relaxed); list && PyList_GET_SIZE(list)) return true;
  return pauses.load(std::memory_order_relaxed);
}

enum Op : int64_t { LAYER_FWD, LAYER_BWD, RMS_FWD, RMS_BWD, OPS };

// What Python does in the place of ours: the ops above autograd, the ops below it (which come with a recipe), and the
// derivative of the statistics. Never destroyed: the interpreter may be gone before this library.
struct Python {
  std::array<py::object, OPS> above, below;
  py::object statistics_gradient, differentiable_backward;
};
inline Python* python = nullptr;

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

inline const Tensor& value(const optional<Tensor>& tensor) {
  static const Tensor undefined;
  return tensor.has_value() ? *tensor : undefined;
}

// Nothing but strided memory on a GPU, and autograd.
inline bool is_plain(const Tensor& tensor) {
  if (!tensor.defined()) return true;
  constexpr c10::DispatchKeySet strange(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Negative,
       c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor, c10::DispatchKey::Functionalize,
       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});
  return (tensor.is_cuda() || (cpu_too && tensor.is_cpu())) && !tensor.key_set().has_any(strange) &&
         tensor.layout() == c10::kStrided &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

inline bool is_ordinary(std::initializer_list<std::reference_wrapper<const Tensor>> tensors) {
  if (is_paused() || c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  for (const Tensor& tensor : tensors)
    if (!is_plain(tensor)) return false;
  return true;
}

inline bool is_looked_into(std::initializer_list<std::reference_wrapper<const Tensor>> tensors) {
  constexpr c10::DispatchKeySet transforms(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode});
  if (c10::impl::tls_local_dispatch_key_set().included_.has_any(transforms)) return true;
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && tensor._fw_grad(0).defined()) return true;
  return false;
}

inline bool is_recorded(std::initializer_list<std::reference_wrapper<const Tensor>> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && tensor.requires_grad()) return true;
  return false;
}

inline py::object to_python(const Tensor& tensor) {
  return tensor.defined() ? py::cast(tensor) : py::none();
}

inline Tensor to_tensor(py::handle object) {
  return object.is_none() ? Tensor() : py::cast<Tensor>(object);
}

inline py::tuple to_python(SymIntArrayRef shape) {
  py::tuple sizes(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) sizes[i] = py::cast(shape[i]);
  return sizes;
}

// The long way: Python's function, which returns the outputs and what to remember.
template <typename... Arguments>
inline std::vector<Tensor> go_the_long_way(Op op, const Call* call, Arguments&&... arguments) {
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

}  // namespace fusednorm
