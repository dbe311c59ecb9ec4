// A call: its key, whether C++ may run it, and the Python functions that run it otherwise.

#pragma once

#include "cache.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/utils/pybind.h>

namespace fusednorm {

namespace py = pybind11;
using c10::SymIntArrayRef;

inline std::atomic<int> pauses{0};  // open `force` blocks of all threads; while there is one, Python runs all calls
inline std::atomic<int64_t> sm_margin{0};  // the number of SMs that plans leave free, a part of a call's key
inline std::array<std::atomic<PyObject*>, 2> hooks{};  // Triton's lists of hooks that run before and after a launch
inline bool runs_cpu_tensors = false;  // for tests without a GPU

// Whether all calls must run in Python. Reads the lists of hooks without the GIL: a launch may miss a hook that is
// being added.
inline bool is_paused() {
  for (const auto& each : hooks)
    if (PyObject* list = each.load(std::memory_order_relaxed); list && PyList_GET_SIZE(list)) return true;
  return pauses.load(std::memory_order_relaxed);
}

// Python's functions, by Op: the ops above autograd, and those below it, which return (outputs, prepared call). Both take
// the operands in the order of operands.py. And the derivatives that only Python has. Never destroyed: the interpreter may be gone before this library.
using Functions = std::array<py::object, OPS>;
struct Python {
  Functions above, below;
  py::object statistics_gradient, differentiable_backward;
};
inline Python* python = nullptr;

inline std::atomic<int64_t> repeats{0};  // the number of calls that ran without Python

// A call of an op below autograd: its key, which is everything that its checks, plans and builds depend on but rows and
// addresses, and its operands. The tensors are added in the order of prepared.py.
class Call {
 public:
  Key key;

  // flags: two bits.
  Call(Op op, IntArrayRef normalized_shape, const Tensor& x, int64_t setting, int64_t flags)
      : op(op), margin(sm_margin.load(std::memory_order_relaxed)) {
    operands.x_shape = x.sizes();
    operands.normalized_shape = normalized_shape;
    size_t ndim = normalized_shape.size(), batch_ndim = x.dim() - ndim;
    may_be_prepared = ndim && static_cast<size_t>(x.dim()) >= ndim && ends_in(x.sizes(), normalized_shape);
    if (may_be_prepared)
      for (size_t i = 0; i < batch_ndim; ++i) operands.rows *= x.sizes()[i];
    key.push_back(margin << 32 | static_cast<int64_t>(ndim) << 8 | static_cast<int64_t>(op) << 2 | flags);
    key.push_back(setting);
    key.append(normalized_shape.begin(), normalized_shape.end());
  }

  // x or its gradient.
  void add_rows(const Tensor& tensor) {
    bool contiguous = add(tensor);
    may_be_prepared &= tensor.sizes() == operands.x_shape;
    if (!contiguous && may_be_prepared &&
        !add_layout(tensor, tensor.dim() - operands.normalized_shape.size(), /*nested=*/true))
      copy(tensor);
  }

  void add_statistic(const Tensor& tensor) {
    bool contiguous = add(tensor);
    if (!tensor.defined()) return;
    may_be_prepared &= tensor.numel() == operands.rows;
    if (!contiguous && may_be_prepared) may_be_prepared = add_layout(tensor, tensor.dim(), /*nested=*/false);
  }

  void add_parameter(const Tensor& tensor, bool is_read = true) {
    bool contiguous = add(tensor, is_read);
    if (tensor.defined()) may_be_prepared &= contiguous && tensor.sizes() == operands.normalized_shape;
  }

  // Kernels read it as if it were contiguous.
  void add_residual_gradient(const Tensor& tensor) {
    bool contiguous = add(tensor);
    may_be_prepared &= !tensor.defined() || tensor.sizes() == operands.x_shape;
    if (!contiguous && may_be_prepared) copy(tensor);
  }

  // Runs the call if it is prepared.
  optional<Outputs> run() {
    if (C10_UNLIKELY(!may_be_prepared)) return {};
    auto prepared = cache.find(op, key, operands.rows);
    if (C10_UNLIKELY(!prepared)) return {};
    auto outputs = prepared->run(operands);
    repeats.fetch_add(1, std::memory_order_relaxed);
    return outputs;
  }

  // Another thread may have changed the margin since this call's key was made.
  void remember(std::shared_ptr<const PreparedCall> prepared) const {
    if (may_be_prepared && prepared->sm_margin == margin) cache.add(key, std::move(prepared));
  }

 private:
  Op op;
  int64_t margin;
  Operands operands;
  bool may_be_prepared;  // whether all shapes are right, and all tensors or their copies may be read in place
  c10::SmallVector<Tensor, 2> copies;

  static bool ends_in(IntArrayRef shape, IntArrayRef end) {
    return std::equal(end.begin(), end.end(), shape.end() - end.size());
  }

  // Returns whether the tensor is contiguous. What is read of a dtype, device and address is in the key. A tensor that is
  // read must have memory: its storage may have been freed.
  bool add(const Tensor& tensor, bool is_read = true) {
    uint64_t& address = operands.addresses[operands.num_tensors++];
    address = 0;
    if (!tensor.defined()) {
      key.push_back(-1);
      return true;
    }
    address = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
    may_be_prepared &= !is_read || tensor.unsafeGetTensorImpl()->storage_initialized();
    bool contiguous = tensor.is_contiguous();
    key.push_back(part_of_key(tensor, contiguous, address));
    return contiguous;
  }

  static int64_t part_of_key(const Tensor& tensor, bool contiguous, uint64_t address) {
    return static_cast<int64_t>(tensor.scalar_type()) << 16 | (tensor.get_device() & 0xff) << 8 |
           static_cast<int64_t>(contiguous) << 1 | (address % 16 == 0);
  }

  // Lets the tensor that was added last be read from a contiguous copy.
  void copy(const Tensor& tensor) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Tensor& made = copies.emplace_back(tensor.contiguous());
    uint64_t& address = operands.addresses[operands.num_tensors - 1];
    address = reinterpret_cast<uint64_t>(made.const_data_ptr());
    key.back() = part_of_key(made, true, address);
  }

  // Adds to the key how the rows (the first batch_ndim dims) lie in memory, by the rule of problem.py: row_view. False if
  // neither one stride nor, if allowed, two nested ones describe them.
  bool add_layout(const Tensor& tensor, int64_t batch_ndim, bool nested) {
    auto sizes = tensor.sizes(), strides = tensor.strides();
    int64_t expected = 1, at = tensor.dim();
    while (at-- > batch_ndim) {
      if (sizes[at] != 1 && strides[at] != expected) return false;
      expected *= sizes[at];
    }
    std::array<std::pair<int64_t, int64_t>, 2> levels{};  // (size, stride), innermost first
    size_t count = 0;
    for (at = batch_ndim; at-- > 0;) {
      if (sizes[at] == 1) continue;
      if (count && strides[at] == levels[count - 1].first * levels[count - 1].second) {
        levels[count - 1].first *= sizes[at];
      } else {
        if (count == (nested ? 2 : 1)) return false;
        levels[count++] = {sizes[at], strides[at]};
      }
    }
    if (count == 0) levels[0].second = expected;
    key.push_back(count == 2 ? levels[0].first : 1);
    key.push_back(levels[count == 2].second);
    key.push_back(count == 2 ? levels[0].second : 0);
    return true;
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
         tensor.layout() == c10::kStrided && !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

using TensorRef = std::reference_wrapper<const Tensor>;
using TensorRefs = c10::ArrayRef<TensorRef>;

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

// Up to three tensors; the rest stay undefined.
inline Outputs to_tensors(py::handle objects) {
  Outputs tensors;
  size_t at = 0;
  for (py::handle each : objects) tensors.at(at++) = to_tensor(each);
  return tensors;
}

// For callers that hold the GIL.
template <typename... Arguments>
inline py::object call_python(const py::object& function, const Arguments&... arguments) {
  return function(to_python(arguments)...);
}

}  // namespace fusednorm
