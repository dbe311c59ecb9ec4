// The autograd node of both norms, of ops and of modules.

#pragma once

#include "below.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

namespace fusednorm {

// The op `name`, to be called through the dispatcher with the arguments of its implementation.
template <typename Function>
inline auto find_op(const char* name, Function&) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Function>();
}

inline optional<Tensor> as_optional(const Tensor& tensor) {
  return tensor.defined() ? optional<Tensor>(tensor) : std::nullopt;
}

// (dx, dw, db) by the backward op, through the dispatcher.
inline Triple dispatch_backward(const BackwardOperands& given) {
  static auto layer_norm_op = find_op("fusednorm::layer_norm_bwd", layer_norm_bwd<backward_below>);
  static auto rms_norm_op = find_op("fusednorm::rms_norm_bwd", rms_norm_bwd<backward_below>);
  const auto& mask = given.mask;
  auto weight = as_optional(given.weight);
  if (given.op == LAYER_BWD)
    return layer_norm_op.call(given.grad_out, given.x, given.shape, given.mean, given.rstd, weight,
                              as_optional(given.bias), c10::List<bool>({mask[0], mask[1], mask[2]}));
  auto [dx, dw] = rms_norm_op.call(
      given.grad_out, given.x, given.shape, given.rstd, weight, c10::List<bool>({mask[0], mask[1]}));
  return {dx, dw, Tensor()};
}

namespace compiled = torch::dynamo::autograd;

// A node as torch's releases own it: by a shared pointer (torch 2.11), or by an intrusive one (2.13).
using Owner = decltype(torch::autograd::Edge::function);

template <typename Made>
inline auto own(Made* node, int) -> decltype(deleteNode(node), Owner()) {
  return Owner(node, [](auto* each) { deleteNode(each); });
}

template <typename Made>
inline auto own(Made* node, long) {
  return Owner(c10::intrusive_ptr<Made>::unsafe_steal_from_new(node));
}

template <typename Owned>
inline auto owner_of(Owned* node, int) -> decltype(node->getptr()) {
  return node->getptr();
}

template <typename Owned, typename Pointer = Owner>
inline Pointer owner_of(Owned* node, long) {
  return Pointer::unsafe_reclaim_from_nonowning(node);
}

// The node of a forward of either norm. Its outputs are y, or y and the statistics that there are. It is no
// torch::autograd::Function, because what that does for functions of any kind takes several microseconds of a forward
// and its backward.
struct NormBackward : torch::autograd::Node {
  using variable_list = torch::autograd::variable_list;

  NormBackward(Op op, bool y_alone, IntArrayRef shape, optional<double> eps)
      : op(op), y_alone(y_alone), shape(shape.begin(), shape.end()), eps(eps) {}

  std::string name() const override {
    return "NormBackward";
  }

  void save(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& weight, const Tensor& bias) {
    size_t at = 0;
    for (const Tensor& each : {std::cref(x), std::cref(mean), std::cref(rstd), std::cref(weight), std::cref(bias)}) {
      saved[at] = torch::autograd::SavedVariable(each, is_output(at));
      ++at;
    }
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto tensors = unpacked();
    if (!y_alone || !at::GradMode::is_enabled() || !grads[0].defined())
      return gradients(op, shape, grads, tensors, wanted());
    const char* norm = op == LAYER_FWD ? "layer" : "rms";
    auto sizes = c10::fromIntArrayRefUnchecked(shape);
    py::gil_scoped_acquire gil;
    auto found = to_tensors(call_python(python->differentiable_backward, norm, sizes, eps, grads[0], tensors[0],
                                        tensors[3], tensors[4], wanted()));
    return {found[0], found[1], found[2]};
  }

  // The gradients of x, weight and bias. `tensors` are in the order of `save`; `grads` are those of the outputs.
  static variable_list gradients(
      Op op, IntArrayRef shape, const variable_list& grads, const std::array<Tensor, 5>& tensors,
      const std::array<bool, 3>& wanted) {
    const auto& [x, mean, rstd, weight, bias] = tensors;
    const Tensor& grad_out = grads[0];
    auto sizes = c10::fromIntArrayRefUnchecked(shape);
    Op backward = op == LAYER_FWD ? LAYER_BWD : RMS_BWD;
    std::array<bool, 3> mask{wanted[0], weight.defined() && wanted[1], bias.defined() && wanted[2]};
    BackwardOperands given{backward, grad_out, x, sizes, mean, rstd, weight, bias, mask};
    Tensor dx, dw, db;
    if (!grad_out.defined()) {
    } else if (may_run_here(given.tensors()) && !at::GradMode::is_enabled() && !needs_formula(given.differentiable())) {
      at::RecordFunction record(at::RecordScope::FUNCTION);
      show_to_profiler(record, op == LAYER_FWD ? "fusednorm::layer_norm_bwd" : "fusednorm::rms_norm_bwd",
                       {grad_out, x, mean, rstd, weight, bias});
      std::tie(dx, dw, db) = as_triple(run_backward(given, true));
    } else {
      std::tie(dx, dw, db) = dispatch_backward(given);
    }
    if (wanted[0] && grads.size() > 1) {
      Tensor grad_mean = mean.defined() ? grads[1] : Tensor(), grad_rstd = grads.back();
      if (grad_mean.defined() || grad_rstd.defined()) {
        py::gil_scoped_acquire gil;
        Tensor more = to_tensor(call_python(python->statistics_gradient, x, sizes, mean, rstd, grad_mean, grad_rstd));
        dx = dx.defined() ? at::add(dx, more) : more;
      }
    }
    return {dx, dw, db};
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : saved) each.reset_data();
  }

  // For compiled autograd: compiled_args collects what a graph depends on, and apply_with_saved puts a call of
  // `gradients` into the graph.
  void compiled_args(compiled::CompiledNodeArgs& args) const override {
    args.collect(static_cast<int64_t>(op));
    args.collect(std::vector<int64_t>(shape.begin(), shape.end()));
    for (size_t at = 0; at < saved.size(); ++at) args.collect(saved[at], is_output(at));
  }

  variable_list apply_with_saved(const variable_list& grads, compiled::SwapSavedVariables& swap) override {
    for (auto& each : saved) swap.before(each);
    auto tensors = unpacked();
    auto asked = wanted();
    compiled::PackedArgs packed;
    packed.pack(static_cast<int64_t>(op));
    packed.pack(std::vector<int64_t>(shape.begin(), shape.end()));
    packed.pack(variable_list(tensors.begin(), tensors.end()));
    packed.pack(std::vector<bool>(asked.begin(), asked.end()));
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
    auto given = packed.unpack<variable_list>();
    auto wanted = packed.unpack<std::vector<bool>>();
    return gradients(op, shape, grads, {given[0], given[1], given[2], given[3], given[4]},
                     {wanted[0], wanted[1], wanted[2]});
  }

  std::array<Tensor, 5> unpacked() {
    std::array<Tensor, 5> tensors;
    for (size_t at = 0; at < saved.size(); ++at)
      tensors[at] = is_output(at) ? saved[at].unpack(owner_of<torch::autograd::Node>(this, 0)) : saved[at].unpack();
    return tensors;
  }

  std::array<bool, 3> wanted() const {
    return {task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
  }

  // Whether a saved tensor is an output of this node. If the statistics were not, they would be constants to a second
  // derivative.
  bool is_output(size_t at) const {
    return !y_alone && (at == 1 || at == 2);
  }

  Op op;
  bool y_alone;
  c10::SmallVector<int64_t, 4> shape;
  optional<double> eps;
  std::array<torch::autograd::SavedVariable, 5> saved;  // x, mean, rstd, weight, bias
};

// The outputs of a forward that C++ may run, recorded with a NormBackward. With y alone, the statistics are not.
inline Outputs record_forward(const ForwardOperands& given, bool y_alone) {
  const auto& [op, x, shape, weight, bias, eps, wants_statistics, below] = given;
  auto outputs = run_forward(given, true);
  auto* node = new NormBackward(op, y_alone, C10_AS_INTARRAYREF_SLOW(shape), eps);
  Owner owner = own(node, 0);
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
  torch::autograd::set_history(outputs[0], owner);
  if (!y_alone)
    for (size_t at : {1, 2})
      if (outputs[at].defined()) torch::autograd::set_history(outputs[at], owner);
  node->save(x, outputs[1], outputs[2], weight, bias);
  return outputs;
}

}  // namespace fusednorm
