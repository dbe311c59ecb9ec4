// The two autograd nodes: NormFunction for the ops, which return y and the statistics, and NormBackward for modules,
// which return y alone.

#pragma once

#include "below.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <torch/csrc/autograd/custom_function.h>
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

// (dx, dw, db) by the backward op, through the dispatcher. The op is LayerNorm's if there is a mean, else RMSNorm's.
inline Triple dispatch_backward(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const Tensor& weight, const Tensor& bias, std::array<bool, 3> mask) {
  static auto layer_norm_op = find_op("fusednorm::layer_norm_bwd", layer_norm_bwd);
  static auto rms_norm_op = find_op("fusednorm::rms_norm_bwd", rms_norm_bwd);
  if (mean.defined())
    return layer_norm_op.call(grad_out, x, shape, mean, rstd, as_optional(weight), as_optional(bias),
                              c10::List<bool>({mask[0], mask[1], mask[2]}));
  auto [dx, dw] =
      rms_norm_op.call(grad_out, x, shape, rstd, as_optional(weight), c10::List<bool>({mask[0], mask[1]}));
  return {dx, dw, Tensor()};
}

// The node of both norms' forward ops. Its outputs are (y, mean, rstd), without mean for RMSNorm.
struct NormFunction : torch::autograd::Function<NormFunction> {
  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* context, Op op, const Tensor& x, const std::vector<int64_t>& shape,
      const optional<Tensor>& weight, const optional<Tensor>& bias, optional<double> eps) {
    auto outputs = run_forward(
        op, x, c10::fromIntArrayRefUnchecked(shape), or_undefined(weight), or_undefined(bias), eps);
    context->set_materialize_grads(false);
    context->save_for_backward({x, outputs[1], outputs[2], or_undefined(weight), or_undefined(bias)});
    if (!weight) context->saved_data["shape"] = shape;  // else it is the weight's shape, which costs no entry in a map
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
    size_t inputs = 0;  // needs_input_grad counts the tensors that are defined
    bool wants_dx = context->needs_input_grad(inputs++);
    bool wants_dw = weight.defined() && context->needs_input_grad(inputs++);
    bool wants_db = bias.defined() && context->needs_input_grad(inputs++);
    Tensor dx, dw, db, grad_mean = layer ? grads[1] : Tensor(), grad_rstd = grads.back();
    if (grads[0].defined())
      std::tie(dx, dw, db) =
          dispatch_backward(grads[0], x, sizes, mean, rstd, weight, bias, {wants_dx, wants_dw, wants_db});
    if (wants_dx && (grad_mean.defined() || grad_rstd.defined())) {
      py::gil_scoped_acquire gil;
      Tensor more = to_tensor(call_python(python->statistics_gradient, x, sizes, mean, rstd, grad_mean, grad_rstd));
      dx = dx.defined() ? at::add(dx, more) : more;
    }
    return {Tensor(), dx, Tensor(), dw, db, Tensor()};
  }
};

namespace compiled = torch::dynamo::autograd;

// The node of a module's forward. Its output is y. It is no torch::autograd::Function, because what that does for
// functions of any kind takes several microseconds of a forward and its backward.
struct NormBackward : torch::autograd::Node {
  using variable_list = torch::autograd::variable_list;

  NormBackward(Op op, std::vector<int64_t> shape, optional<double> eps) : op(op), shape(std::move(shape)), eps(eps) {}

  std::string name() const override {
    return "NormBackward";
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
    const char* norm = op == LAYER_FWD ? "layer" : "rms";
    auto sizes = c10::fromIntArrayRefUnchecked(shape);
    py::gil_scoped_acquire gil;
    return to_tensors(call_python(python->differentiable_backward, norm, sizes, eps, grads[0], tensors[0], tensors[3],
                                  tensors[4], wanted()));
  }

  // The gradients of x, weight and bias. `tensors` are in the order of `save`.
  static variable_list gradients(
      Op op, const std::vector<int64_t>& shape, const Tensor& grad_out, const variable_list& tensors,
      const std::vector<bool>& wanted) {
    if (!grad_out.defined()) return {Tensor(), Tensor(), Tensor()};
    const Tensor &x = tensors[0], &mean = tensors[1], &rstd = tensors[2], &weight = tensors[3], &bias = tensors[4];
    auto sizes = c10::fromIntArrayRefUnchecked(shape);
    std::array<bool, 3> mask{wanted[0], weight.defined() && wanted[1], bias.defined() && wanted[2]};
    if (may_run_here({grad_out, x, mean, rstd, weight, bias}) && !needs_formula({grad_out, x, mean, rstd, weight})) {
      at::RecordFunction record(at::RecordScope::FUNCTION);
      show_to_profiler(record, op == LAYER_FWD ? "fusednorm::layer_norm_bwd" : "fusednorm::rms_norm_bwd",
                       {grad_out, x, mean, rstd, weight, bias});
      at::AutoDispatchBelowADInplaceOrView below;
      return run_backward(op == LAYER_FWD ? LAYER_BWD : RMS_BWD, grad_out, x, sizes, mean, rstd, weight, bias, mask);
    }
    auto [dx, dw, db] = dispatch_backward(grad_out, x, sizes, mean, rstd, weight, bias, mask);
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

// The owner of a new node: a shared pointer with torch's deleter (torch 2.11), or an intrusive pointer (2.13).
template <typename Made>
inline auto owned(Made* node, int) -> decltype(deleteNode(node), std::shared_ptr<torch::autograd::Node>()) {
  return std::shared_ptr<torch::autograd::Node>(node, [](auto* each) { deleteNode(each); });
}

template <typename Made>
inline auto owned(Made* node, long) {
  return c10::intrusive_ptr<Made>::unsafe_steal_from_new(node);
}

// y of a forward, recorded with a NormBackward.
inline Tensor record_y(
    Op op, const Tensor& x, const std::vector<int64_t>& shape, const Tensor& weight, const Tensor& bias,
    optional<double> eps) {
  std::vector<Tensor> outputs;
  {
    at::AutoGradMode off(false);
    at::AutoDispatchBelowADInplaceOrView below;
    outputs = run_forward(op, x, c10::fromIntArrayRefUnchecked(shape), weight, bias, eps);
  }
  auto* node = new NormBackward(op, shape, eps);
  decltype(torch::autograd::Edge::function) owner = owned(node, 0);
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
  node->save(x, outputs[1], outputs[2], weight, bias);
  torch::autograd::set_history(outputs[0], owner);
  return outputs[0];
}

}  // namespace fusednorm
