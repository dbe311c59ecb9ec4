// Autograd's nodes: that of the ops, whose statistics are among its outputs, and that of a module, which returns y
// alone.

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

inline auto& layer_norm_bwd_op() {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("fusednorm::layer_norm_bwd", "")
                       .typed<Three(const Tensor&, const Tensor&, SymIntArrayRef, const Tensor&, const Tensor&,
                                    const optional<Tensor>&, const optional<Tensor>&, c10::List<bool>)>();
  return op;
}

inline auto& rms_norm_bwd_op() {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("fusednorm::rms_norm_bwd", "")
                       .typed<Two(const Tensor&, const Tensor&, SymIntArrayRef, const Tensor&,
                                  const optional<Tensor>&, c10::List<bool>)>();
  return op;
}

inline optional<Tensor> some(const Tensor& tensor) {
  return tensor.defined() ? optional<Tensor>(tensor) : std::nullopt;
}

// Whichever norm's op it is, by the dispatcher: of LayerNorm where there is a mean.
inline Three norm_bwd(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const Tensor& weight, const Tensor& bias, std::array<bool, 3> mask) {
  if (mean.defined())
    return layer_norm_bwd_op().call(grad_out, x, shape, mean, rstd, some(weight), some(bias),
                                    c10::List<bool>({mask[0], mask[1], mask[2]}));
  auto [dx, dw] = rms_norm_bwd_op().call(grad_out, x, shape, rstd, some(weight), c10::List<bool>({mask[0], mask[1]}));
  return {dx, dw, Tensor()};
}

// One node for the ops of both norms, of which LayerNorm's has a mean; the statistics are among its outputs.
struct NormNode : torch::autograd::Function<NormNode> {
  static torch::autograd::variable_list forward(
      torch::autograd::AutogradContext* context, Op op, const Tensor& x, const std::vector<int64_t>& shape,
      const optional<Tensor>& weight, const optional<Tensor>& bias, optional<double> eps) {
    auto outputs = run_forward(op, x, c10::fromIntArrayRefUnchecked(shape), value(weight), value(bias), eps);
    context->set_materialize_grads(false);
    context->save_for_backward({x, outputs[1], outputs[2], value(weight), value(bias)});
    if (!weight) context->saved_data["shape"] = shape;  // a map of names is not free
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
    size_t inputs = 0;  // of those that are there
    bool wants_dx = context->needs_input_grad(inputs++);
    bool wants_dw = weight.defined() && context->needs_input_grad(inputs++);
    bool wants_db = bias.defined() && context->needs_input_grad(inputs++);
    Tensor dx, dw, db, grad_mean = layer ? grads[1] : Tensor(), grad_rstd = grads.back();
    if (grads[0].defined())
      std::tie(dx, dw, db) = norm_bwd(grads[0], x, sizes, mean, rstd, weight, bias, {wants_dx, wants_dw, wants_db});
    if (wants_dx && (grad_mean.defined() || grad_rstd.defined())) {
      py::gil_scoped_acquire gil;
      Tensor more = to_tensor(python->statistics_gradient(to_python(x), to_python(sizes), to_python(mean),
                                                          to_python(rstd), to_python(grad_mean), to_python(grad_rstd)));
      dx = dx.defined() ? at::add(dx, more) : more;
    }
    return {Tensor(), dx, Tensor(), dw, db, Tensor()};
  }
};

namespace compiled = torch::dynamo::autograd;

// What a module records: a node with y as its one output, and without what torch::autograd::Function does for functions
// of any kind, which is 3 us of a forward and its backward.
struct NormOfYNode : torch::autograd::Node {
  using variable_list = torch::autograd::variable_list;

  NormOfYNode(Op op, std::vector<int64_t> shape, optional<double> eps) : op(op), shape(std::move(shape)), eps(eps) {}

  std::string name() const override {
    return "NormOfYNode";
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
    py::gil_scoped_acquire gil;  // the derivative is differentiated, of which the statistics are a part
    py::tuple mask(3);
    for (size_t i = 0; i < 3; ++i) mask[i] = py::cast(static_cast<bool>(wanted()[i]));
    py::tuple of = python->differentiable_backward(
        op == LAYER_FWD ? "layer" : "rms", to_python(c10::fromIntArrayRefUnchecked(shape)), py::cast(eps),
        to_python(grads[0]), to_python(tensors[0]), to_python(tensors[3]), to_python(tensors[4]), mask);
    return {to_tensor(of[0]), to_tensor(of[1]), to_tensor(of[2])};
  }

  // Of x, weight and bias, by tensors in the order of `save`.
  static variable_list gradients(
      Op op, const std::vector<int64_t>& shape, const Tensor& grad_out, const variable_list& tensors,
      const std::vector<bool>& wanted) {
    if (!grad_out.defined()) return {Tensor(), Tensor(), Tensor()};
    const Tensor &x = tensors[0], &mean = tensors[1], &rstd = tensors[2], &weight = tensors[3], &bias = tensors[4];
    auto sizes = c10::fromIntArrayRefUnchecked(shape);
    std::array<bool, 3> mask{wanted[0], weight.defined() && wanted[1], bias.defined() && wanted[2]};
    if (is_ordinary({grad_out, x, mean, rstd, weight, bias}) && !is_looked_into({grad_out, x, mean, rstd, weight})) {
      at::RecordFunction record(at::RecordScope::FUNCTION);
      show(record, op == LAYER_FWD ? "fusednorm::layer_norm_bwd" : "fusednorm::rms_norm_bwd",
           {grad_out, x, mean, rstd, weight, bias});
      at::AutoDispatchBelowADInplaceOrView below;
      return run_backward(op == LAYER_FWD ? LAYER_BWD : RMS_BWD, grad_out, x, sizes, mean, rstd, weight, bias, mask);
    }
    auto [dx, dw, db] = norm_bwd(grad_out, x, sizes, mean, rstd, weight, bias, mask);
    return {dx, dw, db};
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : saved) each.reset_data();
  }

  // For compiled autograd: what of the node a graph depends on, and a call of `gradients` in the graph.
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

// Nodes are owned by shared pointers with a deleter of their own (torch 2.11), or by intrusive ones (2.13).
template <typename Made>
inline auto owned(Made* node, int) -> decltype(deleteNode(node), std::shared_ptr<torch::autograd::Node>()) {
  return std::shared_ptr<torch::autograd::Node>(node, [](auto* each) { deleteNode(each); });
}

template <typename Made>
inline auto owned(Made* node, long) {
  return c10::intrusive_ptr<Made>::unsafe_steal_from_new(node);
}

inline Tensor record_y(
    Op op, const Tensor& x, const std::vector<int64_t>& shape, const Tensor& weight, const Tensor& bias,
    optional<double> eps) {
  std::vector<Tensor> outputs;
  {
    at::AutoGradMode off(false);
    at::AutoDispatchBelowADInplaceOrView below;
    outputs = run_forward(op, x, c10::fromIntArrayRefUnchecked(shape), weight, bias, eps);
  }
  auto* node = new NormOfYNode(op, shape, eps);
  decltype(torch::autograd::Edge::function) owner = owned(node, 0);
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
  node->save(x, outputs[1], outputs[2], weight, bias);
  torch::autograd::set_history(outputs[0], owner);
  return outputs[0];
}

}  // namespace fusednorm
