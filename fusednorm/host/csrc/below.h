// The ops below autograd: each runs a prepared call, or runs in Python.

#pragma once

#include "call.h"

#include <ATen/core/List.h>
#include <ATen/record_function.h>

namespace fusednorm {

using Pair = std::tuple<Tensor, Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;

inline Triple as_triple(Outputs all) { return {std::move(all[0]), std::move(all[1]), std::move(all[2])}; }
inline Pair y_and_rstd(Outputs all) { return {std::move(all[0]), std::move(all[2])}; }
inline Pair first_two(Outputs all) { return {std::move(all[0]), std::move(all[1])}; }

// The operands of a forward and of a backward, as operands.py has them. Their tensors must outlive them.
struct ForwardOperands {
  Op op;
  const Tensor& x;
  SymIntArrayRef shape;
  const Tensor &weight, &bias;
  optional<double> eps;
  bool wants_statistics = true;
  const Functions* below = &python->below;  // that run calls which are not prepared

  std::array<TensorRef, 3> tensors() const { return {x, weight, bias}; }

  std::array<TensorRef, 3> differentiable() const { return tensors(); }

  py::object pass_to(const py::object& function) const {
    return call_python(function, x, shape, weight, bias, eps, wants_statistics);
  }
};

struct BackwardOperands {
  Op op;
  const Tensor &grad_out, &x;
  SymIntArrayRef shape;
  const Tensor &mean, &rstd, &weight, &bias;
  std::array<bool, 3> mask;
  const Tensor& residual_grad = undefined();
  optional<at::ScalarType> dx_dtype = std::nullopt;
  double weight_offset = 0;
  const Functions* below = &python->below;

  std::array<TensorRef, 7> tensors() const { return {grad_out, x, mean, rstd, weight, bias, residual_grad}; }

  // Of the bias only the dtype is read.
  std::array<TensorRef, 6> differentiable() const { return {grad_out, x, mean, rstd, weight, residual_grad}; }

  py::object pass_to(const py::object& function) const {
    return call_python(function, grad_out, x, shape, mean, rstd, weight, bias, mask, residual_grad, dx_dtype,
                       weight_offset);
  }
};

// The outputs of the op below autograd by Python's function `below`. Keeps the prepared call that it returns, if C++ may
// run the call.
template <typename Given>
inline Outputs run_in_python(const Given& given, const Call* call) {
  at::AutoGradMode off(false);
  at::AutoDispatchBelowADInplaceOrView below;
  py::gil_scoped_acquire gil;
  py::object function = (*given.below)[given.op];
  TORCH_CHECK(function, "fusednorm: enable_eager() must last until all calls have ended, got one after its end");
  py::tuple returned = given.pass_to(function);
  if (call && !returned[1].is_none()) call->remember(py::cast<std::shared_ptr<PreparedCall>>(returned[1]));
  return to_tensors(returned[0]);
}

inline int64_t bits_of(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// (y, mean, rstd). mean is undefined for RMSNorm, and both statistics are if they are not wanted. The caller says whether
// C++ may run the call.
inline Outputs run_forward(const ForwardOperands& given, bool may_run_here) {
  auto sizes = c10::asIntArrayRefSlowOpt(given.shape);
  if (!may_run_here || !sizes) return run_in_python(given, nullptr);
  const auto& eps = given.eps;
  int64_t setting = eps.has_value() ? bits_of(*eps) : 0;
  Call call(given.op, *sizes, given.x, setting,
            static_cast<int64_t>(eps.has_value()) << 1 | static_cast<int64_t>(given.wants_statistics));
  call.add_rows(given.x);
  call.add_parameter(given.weight);
  call.add_parameter(given.bias);
  if (auto outputs = call.run(); C10_LIKELY(outputs.has_value())) return std::move(*outputs);
  return run_in_python(given, &call);
}

// (dx, dw, db). An unwanted gradient is undefined.
inline Outputs run_backward(const BackwardOperands& given, bool may_run_here) {
  auto sizes = c10::asIntArrayRefSlowOpt(given.shape);
  if (!may_run_here || !sizes) return run_in_python(given, nullptr);
  const auto& mask = given.mask;
  int64_t dx_dtype = given.dx_dtype ? 1 + static_cast<int64_t>(*given.dx_dtype) : 0;
  Call call(given.op, *sizes, given.x, dx_dtype << 3 | mask[0] | mask[1] << 1 | mask[2] << 2, 0);
  call.key.push_back(bits_of(given.weight_offset));
  call.add_rows(given.grad_out);
  call.add_rows(given.x);
  call.add_statistic(given.mean);
  call.add_statistic(given.rstd);
  call.add_parameter(given.weight);
  call.add_parameter(given.bias, /*is_read=*/false);
  call.add_residual_gradient(given.residual_grad);
  if (auto outputs = call.run(); C10_LIKELY(outputs.has_value())) return std::move(*outputs);
  return run_in_python(given, &call);
}

// Shows a call that bypasses the dispatcher to profilers, as the dispatcher would.
inline void show_to_profiler(at::RecordFunction& record, const char* name, TensorRefs tensors) {
  if (C10_LIKELY(!record.isActive())) return;
  std::vector<c10::IValue> inputs;
  if (record.needsInputs())
    for (const Tensor& tensor : tensors) inputs.emplace_back(tensor.defined() ? c10::IValue(tensor) : c10::IValue());
  record.before(name, &inputs);
}

// output_mask of an op with N outputs. The error is that of problem.py; the dispatcher's own conversion to an array
// would raise another.
template <size_t N>
inline std::array<bool, 3> checked_mask(const char* op, const c10::List<bool>& mask) {
  if (C10_UNLIKELY(mask.size() != N)) {
    std::string got;
    for (size_t i = 0; i < mask.size(); ++i) got += std::string(i ? ", " : "") + (mask.get(i) ? "True" : "False");
    TORCH_CHECK(false, op, ": output_mask must have one flag per output, got [", got, "]");
  }
  std::array<bool, 3> flags{};
  for (size_t i = 0; i < N; ++i) flags[i] = mask.get(i);
  return flags;
}

inline Outputs forward_below(const ForwardOperands& given) { return run_forward(given, may_run_here(given.tensors())); }
inline Outputs backward_below(const BackwardOperands& given) {
  return run_backward(given, may_run_here(given.tensors()));
}

// The ops, with the arguments and outputs of their schemas, by a function of their operands.
template <auto run>
Triple layer_norm_fwd(
    const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight, const optional<Tensor>& bias, double eps) {
  return as_triple(run({LAYER_FWD, x, shape, or_undefined(weight), or_undefined(bias), eps}));
}

template <auto run>
Pair rms_norm_fwd(const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight, optional<double> eps) {
  return y_and_rstd(run({RMS_FWD, x, shape, or_undefined(weight), undefined(), eps}));
}

template <auto run>
Triple layer_norm_bwd(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const optional<Tensor>& weight, const optional<Tensor>& bias, c10::List<bool> mask) {
  return as_triple(run({LAYER_BWD, grad_out, x, shape, mean, rstd, or_undefined(weight), or_undefined(bias),
                        checked_mask<3>("layer_norm_bwd", mask)}));
}

template <auto run>
Pair rms_norm_bwd(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& rstd, const optional<Tensor>& weight,
    c10::List<bool> mask) {
  return first_two(run({RMS_BWD, grad_out, x, shape, undefined(), rstd, or_undefined(weight), undefined(),
                        checked_mask<2>("rms_norm_bwd", mask)}));
}

template <auto run>
Triple layer_norm_bwd_residual(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const optional<Tensor>& weight, const optional<Tensor>& bias, const optional<Tensor>& residual_grad,
    c10::List<bool> mask, optional<at::ScalarType> dx_dtype, double weight_offset) {
  return as_triple(run({LAYER_BWD_RESIDUAL, grad_out, x, shape, mean, rstd, or_undefined(weight), or_undefined(bias),
                        checked_mask<3>("layer_norm_bwd_residual", mask), or_undefined(residual_grad), dx_dtype,
                        weight_offset}));
}

template <auto run>
Triple rms_norm_bwd_residual(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& rstd, const optional<Tensor>& weight,
    const optional<Tensor>& bias, const optional<Tensor>& residual_grad, c10::List<bool> mask,
    optional<at::ScalarType> dx_dtype, double weight_offset) {
  return as_triple(run({RMS_BWD_RESIDUAL, grad_out, x, shape, undefined(), rstd, or_undefined(weight),
                        or_undefined(bias), checked_mask<3>("rms_norm_bwd_residual", mask),
                        or_undefined(residual_grad), dx_dtype, weight_offset}));
}

}  // namespace fusednorm
