// A call below autograd: its key, whether C++ may run it, and Python, which runs it otherwise.

#pragma once

#include "cache.h"
#include "op.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace fusednorm {

inline std::atomic<int> pauses{0};  // open `force` blocks of all threads; while there is one, Python runs all calls
inline std::atomic<int64_t> sm_margin{0};  // the number of SMs that plans leave free, a part of a call's key
inline std::atomic<int64_t> process_invariance{0};     // what of settings/invariance.py is in force, likewise
inline thread_local optional<int64_t> thread_invariance;  // in a backward: as in its forward
inline std::array<std::atomic<PyObject*>, 2> hooks{};  // Triton's lists of hooks that run before and after a launch
inline bool runs_cpu_tensors = false;  // for tests without a GPU

inline int64_t invariance_in_force() {
  return thread_invariance.value_or(process_invariance.load(std::memory_order_relaxed));
}

// Lets this thread's calls be batch-invariant as their forward was.
struct AsInForward {
  optional<int64_t> before;
  explicit AsInForward(int64_t invariance) : before(thread_invariance) { thread_invariance = invariance; }
  ~AsInForward() { thread_invariance = before; }
};

// Whether all calls must run in Python. Reads the lists of hooks without the GIL: a launch may miss a hook that is
// being added.
inline bool is_paused() {
  for (const auto& each : hooks)
    if (PyObject* list = each.load(std::memory_order_relaxed); list && PyList_GET_SIZE(list)) return true;
  return pauses.load(std::memory_order_relaxed);
}

inline std::atomic<int64_t> repeats{0};  // the number of calls that ran without Python

// A call that may have a program: its key, which is everything that its checks, plans and builds depend on but rows and
// addresses, and what a program is bound to.
class Call {
 public:
  explicit Call(const Given& given)
      : op(given.op), margin(sm_margin.load(std::memory_order_relaxed)), invariance(invariance_in_force()),
        invariant(invariance) {
    const Tensor& x = given.x();
    binding.num_tensors = op.num_tensors;
    binding.x_shape = x.sizes();
    binding.normalized_shape = given.shape;
    if (op.groups) binding.groups = given.settings[*op.groups];
    size_t ndim = given.shape.size(), batch_ndim = x.dim() - ndim;
    may_run = !op.has_shape ||
              (ndim && static_cast<size_t>(x.dim()) >= ndim && given.symbolic_shape.empty() &&
               std::equal(given.shape.begin(), given.shape.end(), x.sizes().end() - ndim));
    if (may_run && op.has_shape)
      for (size_t i = 0; i < batch_ndim; ++i) binding.rows *= x.sizes()[i];
    key.push_back(margin << 32 | op.number << 16 | static_cast<int64_t>(ndim));
    key.push_back(invariance);
    key.append(given.settings.begin(), given.settings.end());
    key.append(given.shape.begin(), given.shape.end());
    for (const Slot& slot : op.tensors) add(*given.tensors[added++], slot);
  }

  // Runs the call if there is a program for it.
  bool run(Outputs& outputs) {
    if (C10_UNLIKELY(!may_run)) return false;
    auto program = cache.find(op.number, key, binding.rows);
    if (C10_UNLIKELY(!program)) return false;
    program->run(binding, outputs);
    repeats.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  // Whether the call is made as two: no kernel computes it.
  bool is_in_two() const { return may_run && op.in_two && cache.are_in_two(key); }

  // The call with the copies that were made, so that the program that Python finds is one for all such calls.
  Given with_copies(const Given& given) const {
    Given made = given;
    for (const auto& each : copies) made.tensors[each.first] = &each.second;
    return made;
  }

  // Another thread may have changed what plans depend on since this call's key was made.
  void remember(std::shared_ptr<const Program> program) const {
    if (may_run && program->sm_margin == margin && program->invariance == invariance)
      cache.add(key, std::move(program));
  }

  void remember_in_two() const {
    if (may_run) cache.add_in_two(key);
  }

 private:
  const Op& op;
  int64_t margin, invariance;
  bool invariant;  // whether rows are batch-invariant
  Key key;
  Binding binding;
  bool may_run;  // whether all shapes are right, and all tensors or their copies may be read in place
  size_t added = 0;  // tensors
  c10::SmallVector<std::pair<size_t, Tensor>, 2> copies;  // and which of the tensors they are of

  // What is read of a tensor's dtype, device, address and layout is in the key. A tensor that is read must have memory:
  // its storage may have been freed.
  void add(const Tensor& tensor, const Slot& slot) {
    uint64_t& address = binding.addresses[slot.place];
    if (!tensor.defined()) {
      address = 0;
      key.push_back(NONE);
      may_run &= slot.optional;
      return;
    }
    address = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
    may_run &= !slot.is_read || tensor.unsafeGetTensorImpl()->storage_initialized();
    bool contiguous = tensor.is_contiguous();
    bool as_it_is = contiguous && !(invariant && address % 16);
    int64_t x_dim = binding.x_shape.size();
    key.push_back(part_of_key(tensor, contiguous, address));
    switch (slot.role) {
      case Role::PARAMETER:
        may_run &= as_it_is && tensor.sizes() == binding.normalized_shape;
        break;
      case Role::MODULATION:
        may_run = may_run && add_modulation(invariant && !as_it_is ? copy(tensor, address) : tensor);
        break;
      case Role::COLUMNS:
        may_run = may_run && tensor.dim() == x_dim &&
                  tensor.sizes().slice(0, x_dim - 1) == binding.x_shape.slice(0, x_dim - 1);
        if (may_run && !as_it_is) copy(tensor, address);
        key.push_back(tensor.dim() ? tensor.sizes().back() : 0);
        break;
      case Role::INDEX:
        may_run = may_run && tensor.sizes() == binding.x_shape.slice(0, x_dim - binding.normalized_shape.size());
        if (may_run && !as_it_is) copy(tensor, address);
        break;
      case Role::TABLE:
        may_run = may_run && add_table(invariant && !as_it_is ? copy(tensor, address) : tensor);
        break;
      case Role::STRIDED:
      case Role::CONSTANT:
        key.push_back(tensor.dim() << 1 | (slot.role == Role::CONSTANT && tensor.requires_grad()));
        key.append(tensor.sizes().begin(), tensor.sizes().end());
        if (!contiguous) key.append(tensor.strides().begin(), tensor.strides().end());
        break;
      case Role::STATISTIC:
        may_run &= tensor.numel() == binding.rows * binding.groups;
        if (!as_it_is && may_run) may_run = !invariant && add_layout(tensor, tensor.dim(), /*nested=*/false);
        break;
      default:
        may_run &= tensor.sizes() == binding.x_shape;
        if (as_it_is || !may_run) break;
        if (invariant || slot.role == Role::PACKED_ROWS ||
            !add_layout(tensor, tensor.dim() - binding.normalized_shape.size(), /*nested=*/true))
          copy(tensor, address);
    }
  }

  // Adds to the key which batch dims of x a modulation has whole, how many rows of x share one of its rows (rows.py:
  // sharing), and how its rows lie as one for each row of x. False if it has another shape
  // (validation.py: _require_modulation), or its rows would have to be copied.
  bool add_modulation(const Tensor& tensor) {
    int64_t ndim = binding.normalized_shape.size(), batch_ndim = binding.x_shape.size() - ndim, lead = tensor.dim() - ndim;
    if (lead < 0 || lead > batch_ndim || tensor.sizes().slice(lead) != binding.normalized_shape) return false;
    Shape strides(binding.x_shape.size(), 0);
    int64_t whole = 0, sharing = 0;
    for (int64_t i = 0; i < lead; ++i) {
      if (tensor.size(i) == 1) continue;
      if (tensor.size(i) != binding.x_shape[i]) return false;
      strides[i] = tensor.stride(i);
      whole |= int64_t(1) << i;
    }
    if (whole) {
      int64_t dims = batch_ndim;
      for (sharing = 1; !(whole >> (dims - 1) & 1); --dims) sharing *= binding.x_shape[dims - 1];
      for (int64_t i = 0; i < dims; ++i)
        if (!(whole >> i & 1) && binding.x_shape[i] != 1) sharing = -1;
    }
    for (int64_t i = 0; i < ndim; ++i) strides[batch_ndim + i] = tensor.stride(lead + i);
    key.push_back(lead << 32 | whole);
    key.push_back(sharing);
    return add_layout(binding.x_shape, strides, batch_ndim, /*nested=*/true);
  }

  // Adds to the key how many rows a table has, and how they lie. False if it has another shape, or its rows would have
  // to be copied.
  bool add_table(const Tensor& tensor) {
    if (!tensor.dim() || tensor.sizes().slice(1) != binding.normalized_shape) return false;
    key.push_back(tensor.size(0));
    return add_layout(tensor, 1, /*nested=*/false);
  }

  static int64_t part_of_key(const Tensor& tensor, bool contiguous, uint64_t address) {
    return static_cast<int64_t>(tensor.scalar_type()) << 16 | (tensor.get_device() & 0xff) << 8 |
           static_cast<int64_t>(contiguous) << 1 | (address % 16 == 0);
  }

  // Lets the tensor that was added last be read from a contiguous copy, which is returned.
  const Tensor& copy(const Tensor& tensor, uint64_t& address) {
    at::AutoDispatchBelowADInplaceOrView below;
    const Tensor& made = copies.emplace_back(added - 1, tensor.clone(at::MemoryFormat::Contiguous)).second;
    address = reinterpret_cast<uint64_t>(made.const_data_ptr());
    key.back() = part_of_key(made, true, address);
    return made;
  }

  // Adds to the key how the rows (the first batch_ndim dims) lie in memory, by the rule of rows.py: row_view. False if
  // neither one stride nor, if allowed, two nested ones describe them.
  bool add_layout(const Tensor& tensor, int64_t batch_ndim, bool nested) {
    return add_layout(tensor.sizes(), tensor.strides(), batch_ndim, nested);
  }

  bool add_layout(IntArrayRef sizes, IntArrayRef strides, int64_t batch_ndim, bool nested) {
    int64_t expected = 1, at = sizes.size();
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

using TensorPointers = c10::ArrayRef<const Tensor*>;

// Whether C++ may run a call of these tensors. If not, Python does.
inline bool may_run_here(TensorPointers tensors) {
  if (is_paused() || c10::impl::TorchDispatchModeTLS::any_modes_set()) return false;
  for (const Tensor* tensor : tensors)
    if (!is_plain(*tensor)) return false;
  return true;
}

// Whether a torch.func transform or forward-mode AD is active, which must see the operations inside the op.
inline bool needs_formula(TensorPointers tensors) {
  constexpr c10::DispatchKeySet transforms(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode});
  if (c10::impl::tls_local_dispatch_key_set().included_.has_any(transforms)) return true;
  for (const Tensor* tensor : tensors)
    if (tensor->defined() && tensor->_fw_grad(0).defined()) return true;
  return false;
}

// Whether autograd would record an operation on these tensors.
inline bool is_recorded(TensorPointers tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const Tensor* tensor : tensors)
    if (tensor->defined() && tensor->requires_grad()) return true;
  return false;
}

// The outputs of the op below autograd by Python. Keeps the program that it returns, or that it has made two calls (True
// in place of a program), if C++ may run the call.
inline Outputs run_in_python(const Given& given, const Call* call) {
  at::AutoGradMode off(false);
  at::AutoDispatchBelowADInplaceOrView below;
  py::gil_scoped_acquire gil;
  py::object function = given.is_of_aten ? given.op.in_place_of_aten : given.op.below;
  TORCH_CHECK(function, "fusednorm: enable_eager() must last until all calls have ended, got one after its end");
  py::tuple returned = function(*to_python(given));
  if (call && returned[1].ptr() == Py_True) call->remember_in_two();
  else if (call && !returned[1].is_none()) call->remember(py::cast<std::shared_ptr<Program>>(returned[1]));
  return to_tensors(returned[0]);
}

inline Outputs run_in_two(const Given& given);

// The outputs of the op below autograd, as a program has them. The caller says whether C++ may run the call.
inline Outputs run(const Given& given, bool may_run_here) {
  if (C10_UNLIKELY(!may_run_here)) return run_in_python(given, nullptr);
  Call call(given);
  Outputs outputs;
  if (C10_LIKELY(call.run(outputs))) return outputs;
  if (call.is_in_two()) return run_in_two(given);
  return run_in_python(call.with_copies(given), &call);
}

// The same of an op that normalizes again, by those of both norms.
inline Outputs run_in_two(const Given& given) {
  const InTwo& in_two = *given.op.in_two;
  Outputs outputs = run(given.part(in_two.first, {}), true);
  Outputs of_next = run(given.part(in_two.next, outputs[0]), true);
  outputs.resize(given.op.num_outputs);
  for (size_t i = 0; i < of_next.size(); ++i)
    if (in_two.outputs[i]) outputs[*in_two.outputs[i]] = of_next[i];
  return outputs;
}

inline Outputs run_below(const Given& given) { return run(given, may_run_here(given.tensors)); }

// Shows a call that bypasses the dispatcher to profilers, as the dispatcher would.
inline void show_to_profiler(at::RecordFunction& record, const Given& given) {
  if (C10_LIKELY(!record.isActive())) return;
  std::vector<IValue> inputs;
  if (record.needsInputs())
    for (const Tensor* tensor : given.tensors) inputs.emplace_back(tensor->defined() ? IValue(*tensor) : IValue());
  record.before(given.op.name.c_str(), &inputs);
}

// The outputs of a call that C++ may run, shown to profilers.
inline Outputs run_shown(const Given& given) {
  at::RecordFunction record(at::RecordScope::FUNCTION);
  show_to_profiler(record, given);
  return run(given, true);
}

}  // namespace fusednorm
