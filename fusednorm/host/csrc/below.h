// The four ops below autograd: each repeats a recipe, or runs in Python.

#pragma once

#include "call.h"

#include <ATen/core/List.h>
#include <ATen/record_function.h>

namespace fusednorm {

inline int64_t bits_of(double number) {
  int64_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

inline c10::SmallVector<int64_t, 4> as_ints(SymIntArrayRef shape) {
  c10::SmallVector<int64_t, 4> ints;
  for (const auto& each : shape) ints.push_back(each.guard_int(__FILE__, __LINE__));
  return ints;
}

using Pair = std::tuple<Tensor, Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;

inline Triple as_triple(std::vector<Tensor> all) { return {std::move(all[0]), std::move(all[1]), std::move(all[2])}; }
inline Pair as_pair(std::vector<Tensor> all) { return {std::move(all[0]), std::move(all[1])}; }

// (y, mean, rstd). mean is undefined for RMSNorm, and both statistics are if they are not wanted.
inline std::vector<Tensor> run_forward(
    Op op, const Tensor& x, SymIntArrayRef shape, const Tensor& weight, const Tensor& bias, optional<double> eps,
    bool wants_statistics = true) {
  optional<Call> call;
  if (may_run_here({x, weight, bias})) {
    call.emplace(op, as_ints(shape), eps.has_value() ? bits_of(*eps) : -1);
    call->key.push_back(wants_statistics);
    for (const Tensor& each : {std::cref(x), std::cref(weight), std::cref(bias)}) call->add(each);
    if (auto outputs = repeat(call->key, call->addresses)) return std::move(*outputs);
  }
  return run_in_python(op, call ? &*call : nullptr, x, shape, weight, bias, eps, wants_statistics);
}

// (dx, dw, db). An unwanted gradient is undefined.
inline std::vector<Tensor> run_backward(
    Op op, const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const Tensor& weight, const Tensor& bias, std::array<bool, 3> mask) {
  optional<Call> call;
  if (may_run_here({grad_out, x, mean, rstd, weight, bias})) {
    call.emplace(op, as_ints(shape), mask[0] | mask[1] << 1 | mask[2] << 2);
    // A recipe counts the tensors of BackwardOperands (operands.py): the last is residual_grad, which these ops lack.
    for (const Tensor& each : {std::cref(grad_out), std::cref(x), std::cref(mean), std::cref(rstd), std::cref(weight),
                               std::cref(bias), std::cref(undefined())})
      call->add(each);
    if (auto outputs = repeat(call->key, call->addresses)) return std::move(*outputs);
  }
  return run_in_python(op, call ? &*call : nullptr, grad_out, x, shape, mean, rstd, weight, bias, mask);
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
inline std::array<bool, N> checked_mask(const char* op, const c10::List<bool>& mask) {
  if (C10_UNLIKELY(mask.size() != N)) {
    std::string got;
    for (size_t i = 0; i < mask.size(); ++i) got += std::string(i ? ", " : "") + (mask.get(i) ? "True" : "False");
    TORCH_CHECK(false, op, ": output_mask must have one flag per output, got [", got, "]");
  }
  std::array<bool, N> flags;
  for (size_t i = 0; i < N; ++i) flags[i] = mask.get(i);
  return flags;
}

inline Triple layer_norm_fwd(
    const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight, const optional<Tensor>& bias, double eps) {
  return as_triple(run_forward(LAYER_FWD, x, shape, or_undefined(weight), or_undefined(bias), eps));
}

inline Pair rms_norm_fwd(const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight, optional<double> eps) {
  auto outputs = run_forward(RMS_FWD, x, shape, or_undefined(weight), {}, eps);
  return {std::move(outputs[0]), std::move(outputs[2])};
}

inline Triple layer_norm_bwd(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const optional<Tensor>& weight, const optional<Tensor>& bias, c10::List<bool> mask) {
  auto wanted = checked_mask<3>("layer_norm_bwd", mask);
  return as_triple(run_backward(
      LAYER_BWD, grad_out, x, shape, mean, rstd, or_undefined(weight), or_undefined(bias), wanted));
}

inline Pair rms_norm_bwd(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& rstd, const optional<Tensor>& weight,
    c10::List<bool> mask) {
  auto [wants_dx, wants_dw] = checked_mask<2>("rms_norm_bwd", mask);
  return as_pair(run_backward(
      RMS_BWD, grad_out, x, shape, {}, rstd, or_undefined(weight), {}, {wants_dx, wants_dw, false}));
}

}  // namespace fusednorm
