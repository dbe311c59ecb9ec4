// The four ops below autograd: each runs a prepared call, or runs in Python.

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

// (y, mean, rstd). mean is undefined for RMSNorm, and both statistics are if they are not wanted. The caller says whether
// C++ may run the call.
inline Outputs run_forward(
    Op op, const Tensor& x, SymIntArrayRef shape, const Tensor& weight, const Tensor& bias, optional<double> eps,
    bool wants_statistics, bool may_run_here) {
  auto sizes = c10::asIntArrayRefSlowOpt(shape);
  if (!may_run_here || !sizes) return run_in_python(op, nullptr, x, shape, weight, bias, eps, wants_statistics);
  int64_t setting = 0;
  if (eps.has_value()) std::memcpy(&setting, &*eps, sizeof setting);
  Call call(op, *sizes, x, setting, static_cast<int64_t>(eps.has_value()) << 1 | static_cast<int64_t>(wants_statistics));
  call.add_rows(x);
  call.add_parameter(weight);
  call.add_parameter(bias);
  if (auto outputs = call.run(); C10_LIKELY(outputs.has_value())) return std::move(*outputs);
  return run_in_python(op, &call, x, shape, weight, bias, eps, wants_statistics);
}

// (dx, dw, db). An unwanted gradient is undefined.
inline Outputs run_backward(
    Op op, const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const Tensor& weight, const Tensor& bias, std::array<bool, 3> mask, bool may_run_here) {
  auto sizes = c10::asIntArrayRefSlowOpt(shape);
  if (!may_run_here || !sizes) return run_in_python(op, nullptr, grad_out, x, shape, mean, rstd, weight, bias, mask);
  Call call(op, *sizes, x, mask[0] | mask[1] << 1 | mask[2] << 2, 0);
  call.add_rows(grad_out);
  call.add_rows(x);
  call.add_statistic(mean);
  call.add_statistic(rstd);
  call.add_parameter(weight);
  call.add_parameter(bias, /*is_read=*/false);
  call.add_parameter({});  // residual_grad, which these ops lack
  if (auto outputs = call.run(); C10_LIKELY(outputs.has_value())) return std::move(*outputs);
  return run_in_python(op, &call, grad_out, x, shape, mean, rstd, weight, bias, mask);
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

inline Triple layer_norm_fwd(
    const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight_, const optional<Tensor>& bias_, double eps) {
  const Tensor &weight = or_undefined(weight_), &bias = or_undefined(bias_);
  return as_triple(
      run_forward(LAYER_FWD, x, shape, weight, bias, eps, true, may_run_here({x, weight, bias})));
}

inline Pair rms_norm_fwd(const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight_, optional<double> eps) {
  const Tensor& weight = or_undefined(weight_);
  return y_and_rstd(run_forward(RMS_FWD, x, shape, weight, {}, eps, true, may_run_here({x, weight})));
}

inline Triple layer_norm_bwd(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const optional<Tensor>& weight_, const optional<Tensor>& bias_, c10::List<bool> mask) {
  auto wanted = checked_mask<3>("layer_norm_bwd", mask);
  const Tensor &weight = or_undefined(weight_), &bias = or_undefined(bias_);
  return as_triple(run_backward(LAYER_BWD, grad_out, x, shape, mean, rstd, weight, bias, wanted,
                                may_run_here({grad_out, x, mean, rstd, weight, bias})));
}

inline Pair rms_norm_bwd(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& rstd, const optional<Tensor>& weight_,
    c10::List<bool> mask) {
  auto wanted = checked_mask<2>("rms_norm_bwd", mask);
  const Tensor& weight = or_undefined(weight_);
  return first_two(run_backward(RMS_BWD, grad_out, x, shape, {}, rstd, weight, {}, wanted,
                                may_run_here({grad_out, x, rstd, weight})));
}

}  // namespace fusednorm
