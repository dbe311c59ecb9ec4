// The four ops below autograd.

#pragma once

#include "call.h"

#include <ATen/core/List.h>
#include <ATen/record_function.h>

namespace fusednorm {

inline int64_t bits(double number) {
  int64_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

inline c10::SmallVector<int64_t, 4> as_ints(SymIntArrayRef shape) {
  c10::SmallVector<int64_t, 4> ints;
  for (const auto& each : shape) ints.push_back(each.guard_int(__FILE__, __LINE__));
  return ints;
}

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

inline Three three(std::vector<Tensor> of) { return {std::move(of[0]), std::move(of[1]), std::move(of[2])}; }
inline Two first_and_last(std::vector<Tensor> of) { return {std::move(of.front()), std::move(of.back())}; }
inline Two first_two(std::vector<Tensor> of) { return {std::move(of[0]), std::move(of[1])}; }

inline std::vector<Tensor> run_forward(
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

inline std::vector<Tensor> run_backward(
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
inline void show(
    at::RecordFunction& record, const char* name,
    std::initializer_list<std::reference_wrapper<const Tensor>> tensors) {
  if (C10_LIKELY(!record.isActive())) return;
  std::vector<c10::IValue> inputs;
  if (record.needsInputs())
    for (const Tensor& tensor : tensors) inputs.emplace_back(tensor.defined() ? c10::IValue(tensor) : c10::IValue());
  record.before(name, &inputs);
}

// As problem.py checks a mask: the dispatcher's own conversion to an array has a sentence of its own.
template <size_t N>
inline std::array<bool, 3> flags(const char* op, const c10::List<bool>& mask) {
  if (C10_UNLIKELY(mask.size() != N)) {
    std::string got;
    for (size_t i = 0; i < mask.size(); ++i) got += std::string(i ? ", " : "") + (mask.get(i) ? "True" : "False");
    TORCH_CHECK(false, op, ": output_mask must have one flag per output, got [", got, "]");
  }
  return {mask.get(0), mask.get(1), N == 3 && mask.get(N - 1)};
}

inline Three layer_norm_fwd(
    const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight, const optional<Tensor>& bias, double eps) {
  return three(run_forward(LAYER_FWD, x, shape, value(weight), value(bias), eps));
}

inline Two rms_norm_fwd(const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight, optional<double> eps) {
  return first_and_last(run_forward(RMS_FWD, x, shape, value(weight), {}, eps));
}

inline Three layer_norm_bwd(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const optional<Tensor>& weight, const optional<Tensor>& bias, c10::List<bool> mask) {
  auto wanted = flags<3>("layer_norm_bwd", mask);
  return three(run_backward(LAYER_BWD, grad_out, x, shape, mean, rstd, value(weight), value(bias), wanted));
}

inline Two rms_norm_bwd(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& rstd, const optional<Tensor>& weight,
    c10::List<bool> mask) {
  auto wanted = flags<2>("rms_norm_bwd", mask);
  return first_two(run_backward(RMS_BWD, grad_out, x, shape, {}, rstd, value(weight), {}, wanted));
}

}  // namespace fusednorm
