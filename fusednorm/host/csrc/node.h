// The autograd node of both norms, of ops and of modules.

#pragma once

#include "call.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

namespace fusednorm {

inline py::object& statistics_gradient = *new py::object;  // a derivative that only Python has; never destroyed

// The outputs of a backward op through the dispatcher.
inline Outputs dispatch(const Given& given) {
  torch::jit::Stack stack;
  auto tensor = given.tensors.begin();
  auto setting = given.settings.begin();
  for (const Slot& slot : given.op.inputs) {
    if (is_tensor(slot.role)) {
      const Tensor& each = **tensor++;
      stack.emplace_back(each.defined() ? IValue(each) : IValue());
    } else if (slot.role == Role::SHAPE) {
      stack.emplace_back(std::vector<int64_t>(given.shape.begin(), given.shape.end()));
    } else if (int64_t mask = *setting++; slot.role == Role::MASK) {
      std::vector<bool> flags(mask >> 32);
      for (size_t i = 0; i < flags.size(); ++i) flags[i] = mask >> i & 1;
      stack.emplace_back(flags);
    } else {
      stack.emplace_back();  // its default
    }
  }
  c10::Dispatcher::singleton().findSchemaOrThrow(given.op.name.c_str(), "").callBoxed(&stack);
  Outputs outputs(given.op.num_outputs);
  for (size_t i = 0; i < stack.size(); ++i)
    if (stack[i].isTensor()) outputs[given.op.outputs[i]] = stack[i].toTensor();
  return outputs;
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

// The node of a forward. Its outputs are y, or y and the others that there are. It is no torch::autograd::Function,
// because what that does for functions of any kind takes several microseconds of a forward and its backward.
struct NormBackward : torch::autograd::Node {
  using variable_list = torch::autograd::variable_list;
  using Flags = c10::SmallVector<bool, 8>;

  NormBackward(const Given& given, bool y_alone)
      : op(given.op), y_alone(y_alone), invariant(is_invariant()), shape(given.shape), settings(given.settings) {}

  std::string name() const override {
    return "NormBackward";
  }

  void save(const Tensor& tensor) {
    saved.emplace_back(tensor, is_output(saved.size()));
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    AsInForward as_in_forward(invariant);
    auto tensors = unpacked();
    Flags asked = wanted();
    if (!y_alone || !at::GradMode::is_enabled() || !grads[0].defined())
      return gradients(op, shape, grads, tensors, asked);
    Given forward(op);
    for (size_t i = 0; i < op.tensors.size(); ++i) forward.tensors.push_back(&tensors[i]);
    forward.shape = shape;
    forward.settings = settings;
    py::gil_scoped_acquire gil;
    auto found = to_tensors(op.differentiable_backward(to_python(grads[0]), to_tuple(asked), *to_python(forward)));
    return of_tensors(op, found, asked);
  }

  // The gradients of the forward's tensors. `tensors` are those and its outputs after y, in the order of `save`; `grads`
  // are those of the outputs.
  static variable_list gradients(
      const Op& op, const Shape& shape, const variable_list& grads, const variable_list& tensors,
      const Flags& wanted) {
    const Backward& backward = *op.backward;
    Given given(*backward.op);
    given.shape = shape;
    Tensor grad_out = grads[0];
    auto gradient = [&](size_t output) {
      return output == 0 ? &grad_out : output < grads.size() ? &grads[output] : &undefined();
    };
    bool any = grad_out.defined();
    for (const auto& source : backward.sources) {
      bool is_gradient = source && *source >= tensors.size();
      given.tensors.push_back(!source ? &undefined() : is_gradient ? gradient(*source - tensors.size()) : &tensors[*source]);
      any |= is_gradient && given.tensors.back()->defined();
    }
    if (any && !grad_out.defined()) grad_out = at::zeros_like(tensors[op.x]);
    Flags mask(given.op.outputs.size());
    for (size_t i = 0; i < wanted.size(); ++i)
      if (wanted[i] && tensors[i].defined()) mask[backward.gradients[i]] = true;
    for (const Slot& slot : given.op.inputs)
      if (!is_tensor(slot.role) && slot.role != Role::SHAPE)
        given.settings.push_back(slot.role == Role::MASK ? as_setting(mask) : NONE);
    Outputs found(given.op.num_outputs);
    if (!any) {
    } else if (may_run_here(given.tensors) && !at::GradMode::is_enabled() && !needs_formula(given.differentiable())) {
      at::RecordFunction record(at::RecordScope::FUNCTION);
      show_to_profiler(record, given);
      found = run(given, true);
    } else {
      found = dispatch(given);
    }
    if (wanted[op.x] && grads.size() > 1) {
      std::array<Tensor, 4> statistics;  // mean, rstd and their gradients
      for (size_t i : {0, 1})
        if (auto place = backward.statistics[i]) {
          statistics[i] = tensors[*place];
          statistics[2 + i] = grads[*place - op.tensors.size() + 1];
        }
      if (statistics[2].defined() || statistics[3].defined()) {
        py::gil_scoped_acquire gil;
        Tensor more = to_tensor(statistics_gradient(
            to_python(given.x()), to_tuple(shape), to_python(statistics[0]), to_python(statistics[1]),
            to_python(statistics[2]), to_python(statistics[3])));
        Tensor& dx = found[given.op.outputs[backward.gradients[op.x]]];
        dx = dx.defined() ? at::add(dx, more) : more;
      }
    }
    return of_tensors(op, found, wanted);
  }

  // The wanted ones among the outputs of the backward, for each tensor of the forward.
  static variable_list of_tensors(const Op& op, const Outputs& found, const Flags& wanted) {
    variable_list made(wanted.size());
    for (size_t i = 0; i < made.size(); ++i)
      if (wanted[i]) made[i] = found[op.backward->op->outputs[op.backward->gradients[i]]];
    return made;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : saved) each.reset_data();
  }

  // For compiled autograd: compiled_args collects what a graph depends on, and apply_with_saved puts a call of
  // `gradients` into the graph.
  void compiled_args(compiled::CompiledNodeArgs& args) const override {
    args.collect(op.number);
    args.collect(invariant);
    args.collect(std::vector<int64_t>(shape.begin(), shape.end()));
    for (size_t at = 0; at < saved.size(); ++at) args.collect(saved[at], is_output(at));
  }

  variable_list apply_with_saved(const variable_list& grads, compiled::SwapSavedVariables& swap) override {
    for (auto& each : saved) swap.before(each);
    auto tensors = unpacked();
    auto asked = wanted();
    compiled::PackedArgs packed;
    packed.pack(op.number);
    packed.pack(invariant);
    packed.pack(std::vector<int64_t>(shape.begin(), shape.end()));
    packed.pack(tensors);
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
    const Op& op = *ops.at(packed.unpack<int64_t>());
    AsInForward as_in_forward(packed.unpack<bool>());
    auto shape = packed.unpack<std::vector<int64_t>>();
    auto tensors = packed.unpack<variable_list>();
    auto wanted = packed.unpack<std::vector<bool>>();
    return gradients(op, Shape(shape), grads, tensors, Flags(wanted.begin(), wanted.end()));
  }

  variable_list unpacked() {
    variable_list tensors;
    for (size_t at = 0; at < saved.size(); ++at)
      tensors.push_back(
          is_output(at) ? saved[at].unpack(owner_of<torch::autograd::Node>(this, 0)) : saved[at].unpack());
    return tensors;
  }

  Flags wanted() const {
    Flags flags;
    for (size_t i = 0; i < op.tensors.size(); ++i) flags.push_back(task_should_compute_output(i));
    return flags;
  }

  // Whether a saved tensor is an output of this node. If the statistics were not, they would be constants to a second
  // derivative.
  bool is_output(size_t at) const {
    return !y_alone && at >= op.tensors.size();
  }

  const Op& op;
  bool y_alone, invariant;
  Shape shape;
  Given::Settings settings;
  c10::SmallVector<torch::autograd::SavedVariable, 5> saved;  // the tensors, and the outputs after y
};

// The outputs of a forward that C++ may run, recorded with a NormBackward. With y alone, the others are not.
inline Outputs record_forward(const Given& given, bool y_alone) {
  const Op& op = given.op;
  Outputs outputs = run(given, true);
  auto* node = new NormBackward(given, y_alone);
  Owner owner = own(node, 0);
  node->set_next_edges(torch::autograd::collect_next_edges(c10::ArrayRef<const Tensor*>(given.tensors)));
  for (size_t i = 0; i < (y_alone ? 1 : op.outputs.size()); ++i)
    if (Tensor& each = outputs[op.outputs[i]]; each.defined()) torch::autograd::set_history(each, owner);
    else node->add_input_metadata(torch::autograd::Node::undefined_input());
  for (const Tensor* each : given.tensors) node->save(*each);
  for (size_t i = 1; i < op.outputs.size(); ++i) node->save(outputs[op.outputs[i]]);
  return outputs;
}

}  // namespace fusednorm
