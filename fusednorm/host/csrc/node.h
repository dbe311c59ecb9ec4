// The autograd node of both norms, of ops and of modules.

#pragma once

#include "call.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>

namespace fusednorm {

// The outputs of a backward op through the dispatcher.
inline Outputs dispatch(const Given& given) {
  torch::jit::Stack stack = to_stack(given);
  c10::Dispatcher::singleton().findSchemaOrThrow(given.op.name.c_str(), "").callBoxed(&stack);
  Outputs outputs(given.op.num_outputs);
  if (given.op.returns_list) {
    size_t at = 0, output = 0;
    auto found = stack[0].toTensorVector();
    for (bool wanted : as_flags(given.settings[*given.op.mask])) {
      if (wanted) outputs[given.op.outputs[output]] = found.at(at++);
      ++output;
    }
    return outputs;
  }
  for (size_t i = 0; i < stack.size(); ++i)
    if (stack[i].isTensor()) outputs[given.op.outputs[i]] = stack[i].toTensor();
  return outputs;
}

template <typename Values, typename Value>
inline bool contains(const Values& values, const Value& value) {
  return std::find(values.begin(), values.end(), value) != values.end();
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

// How parts lie in one tensor, the whole: with `sizes` in place of its last dim, they are ranges of the last dim, or of
// the one before if there are several sizes. The first two are a norm's tensors.
struct Parts {
  std::vector<int64_t> sizes, ranges;  // a range is a start and a length

  explicit operator bool() const { return !ranges.empty(); }

  Outputs first_two(const Tensor& whole) const { return split(whole, 0, 4); }

  // The same without autograd and the dispatcher, which take as long as the rest of a call.
  Outputs first_two_plain(const Tensor& whole) const {
    Shape shape(whole.sizes().begin(), whole.sizes().end() - 1), strides(whole.strides().begin(), whole.strides().end() - 1);
    shape.append(sizes.begin(), sizes.end());
    strides.resize(shape.size(), whole.strides().back());
    for (size_t at = shape.size() - 1; at > static_cast<size_t>(whole.dim()) - 1; --at)
      strides[at - 1] = strides[at] * shape[at];
    size_t dim = shape.size() - (sizes.size() > 1 ? 2 : 1);
    Outputs found;
    for (size_t at = 0; at < 4; at += 2) {
      shape[dim] = ranges[at + 1];
      found.push_back(at::native::as_strided_tensorimpl(
          whole, shape, strides, whole.storage_offset() + ranges[at] * strides[dim]));
    }
    return found;
  }

  Outputs others(const Tensor& whole) const { return split(whole, 4, ranges.size()); }

  Outputs split(const Tensor& whole, size_t at, size_t end) const {
    bool in_dims = sizes.size() > 1;
    Tensor rows = in_dims ? whole.unflatten(-1, sizes) : whole;
    Outputs found;
    for (; at < end; at += 2) found.push_back(rows.narrow(in_dims ? -2 : -1, ranges[at], ranges[at + 1]));
    return found;
  }

  // The gradients of the others side by side. Undefined if there is none.
  Tensor join(const Tensor& whole, c10::ArrayRef<Tensor> grads) const {
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& each) { return each.defined(); })) return {};
    if (grads.size() == 1) return grads[0];
    std::vector<Tensor> found(grads.begin(), grads.end());
    Outputs likes = others(whole);
    for (size_t i = 0; i < found.size(); ++i)
      if (!found[i].defined()) found[i] = at::zeros_like(likes[i]);
    return at::cat(found, -1);
  }
};

// The node of a forward. Its outputs are those of the op, or these without the statistics. It is no
// torch::autograd::Function, because what that does for functions of any kind takes several microseconds of a forward
// and its backward.
struct NormBackward : torch::autograd::Node {
  using variable_list = torch::autograd::variable_list;
  using Flags = c10::SmallVector<bool, 8>;

  // What a backward takes from its node beside tensors.
  struct Info {
    const Op& op;  // the forward
    bool statistics_inside;
    Shape shape;
    Given::Settings settings;  // of the backward op; its mask is not one yet
    int64_t eps;               // as a setting
    int64_t invariance;        // that is in force
    Parts parts;               // of what the first tensor is, if the first two are parts of it

    const Backward& backward() const { return parts ? *op.packed : *op.backward; }
    const std::vector<size_t>& outputs() const { return statistics_inside ? op.without_statistics : op.outputs; }
  };

  NormBackward(const Given& given, bool statistics_inside, const Parts& parts)
      : info{given.op, statistics_inside, given.shape, {}, given.settings[given.op.backward->eps],
             invariance_in_force(), parts} {
    for (const auto& each : info.backward().settings) {
      int64_t setting = each.of_forward ? given.settings[*each.of_forward] : each.constant;
      for (size_t at : each.dtype_of)
        if (const Tensor& tensor = *given.tensors[at]; tensor.defined()) {
          auto promoted = tensor.scalar_type();
          if (setting != NONE) promoted = c10::promoteTypes(promoted, static_cast<at::ScalarType>(setting));
          setting = static_cast<int64_t>(promoted);
        }
      info.settings.push_back(setting);
    }
  }

  std::string name() const override {
    return "NormBackward";
  }

  void save(const Given& given, const Outputs& outputs) {
    for (size_t each : info.backward().saved) {
      size_t tensors = given.tensors.size();
      saved.emplace_back(each < tensors ? *given.tensors[each] : outputs[each - tensors], is_output(saved.size()));
    }
  }

  variable_list apply(variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return gradients(info, grads, unpacked(), wanted());
  }

  // The gradients of the forward's tensors. `saved` is what the node keeps, and `grads` are those of its outputs.
  static variable_list gradients(
      const Info& info, const variable_list& grads, const variable_list& saved, const Flags& wanted) {
    AsInForward as_in_forward(info.invariance);
    const Op& op = info.op;
    const Backward& backward = info.backward();
    Given given(*backward.op);
    Given::Tensors grad_of(op.num_outputs, &undefined()), read;
    size_t count = info.outputs().size();
    for (size_t i = 0; i < count; ++i) grad_of[info.outputs()[i]] = &grads[i];
    for (const Tensor& each : saved) read.push_back(&each);
    Outputs parts(2);
    Tensor of_others;
    if (info.parts) {
      if (contains(backward.sources, saved.size()))
        parts = at::GradMode::is_enabled() || !is_plain(saved[0]) ? info.parts.first_two(saved[0])
                                                                  : info.parts.first_two_plain(saved[0]);
      for (const Tensor& each : parts) read.push_back(&each);
      of_others = info.parts.join(saved[0], c10::ArrayRef<Tensor>(grads).slice(count));
      grad_of.push_back(&of_others);
    }

    given.shape = info.shape;
    given.settings = info.settings;
    Flags mask(given.op.outputs.size());
    for (size_t i = 0; i < mask.size(); ++i)
      for (size_t j = 0; j < wanted.size(); ++j)
        mask[i] |= wanted[j] && backward.gradients[j] == given.op.outputs[i];
    given.settings[*given.op.mask] = as_setting(mask);
    bool of_dx = false, runs = false;  // whether a wanted gradient is made of dx; whether the norm adds anything to some
    for (size_t i = 0; i < mask.size(); ++i) of_dx |= mask[i] && contains(backward.of_dx, given.op.outputs[i]);
    for (const auto& source : backward.sources) {
      size_t output = source ? *source - read.size() : 0;
      bool is_gradient = source && *source >= read.size();
      given.tensors.push_back(!source ? &undefined() : is_gradient ? grad_of[output] : read[*source]);
      runs |= is_gradient && given.tensors.back()->defined() && (of_dx || !contains(backward.passed, output));
    }
    runs &= contains(mask, true);
    Tensor zeros;
    if (runs && !grad_of[0]->defined() && given.op.has_shape) {
      zeros = at::zeros_like(given.x());
      for (size_t i = 0; i < given.tensors.size(); ++i)
        if (backward.sources[i] == read.size()) given.tensors[i] = &zeros;
    }
    Outputs found(given.op.num_outputs);
    Tensor& dx = found[DX];
    if (runs) {
      found = backward_of(info, given);
    } else {
      for (size_t each : backward.passed)
        if (grad_of[each]->defined()) dx = *grad_of[each];
      for (size_t each : backward.copies) found[each] = dx;  // which autograd casts
    }
    if (op.has_shape && (grad_of[MEAN]->defined() || grad_of[RSTD]->defined())) {
      py::gil_scoped_acquire gil;
      Outputs more = to_tensors(given.op.statistics_gradients(
          to_python(*grad_of[MEAN]), to_python(*grad_of[RSTD]), *to_python(given)));
      for (size_t i = 0; i < more.size(); ++i)
        if (more[i].defined()) found[i] = found[i].defined() ? at::add(found[i], more[i]) : more[i];
    }
    variable_list made(wanted.size());
    for (size_t i = 0; i < made.size(); ++i)
      if (size_t at = backward.gradients[i]; wanted[i])
        made[i] = at < found.size() ? found[at] : *grad_of[at - found.size()];
    return made;
  }

  // The outputs of the backward op.
  static Outputs backward_of(const Info& info, const Given& given) {
    bool is_differentiated = at::GradMode::is_enabled();
    if (may_run_here(given.tensors) && !is_differentiated && !needs_formula(given.differentiable()))
      return run_shown(given);
    if (!is_differentiated || !info.statistics_inside) return dispatch(given);
    // Gradients flow through the statistics, which are constants here.
    py::gil_scoped_acquire gil;
    return to_tensors(given.op.differentiable_backward(as_number(info.eps), *to_python(given)));
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : saved) each.reset_data();
  }

  // For compiled autograd: compiled_args collects what a graph depends on, and apply_with_saved puts a call of
  // `gradients` into the graph.
  void compiled_args(compiled::CompiledNodeArgs& args) const override {
    for (const auto& each : numbers()) args.collect(each);
    for (size_t at = 0; at < saved.size(); ++at) args.collect(saved[at], is_output(at));
  }

  variable_list apply_with_saved(const variable_list& grads, compiled::SwapSavedVariables& swap) override {
    for (auto& each : saved) swap.before(each);
    auto asked = wanted();
    compiled::PackedArgs packed;
    for (const auto& each : numbers()) packed.pack(each);
    packed.pack(unpacked());
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
    auto own = packed.unpack<std::vector<int64_t>>(), shape = packed.unpack<std::vector<int64_t>>(),
         settings = packed.unpack<std::vector<int64_t>>(), sizes = packed.unpack<std::vector<int64_t>>(),
         ranges = packed.unpack<std::vector<int64_t>>();
    auto saved = packed.unpack<variable_list>();
    auto wanted = packed.unpack<std::vector<bool>>();
    Info info{*ops.at(own[0]), own[1] != 0, Shape(shape), Given::Settings(settings), own[2], own[3],
              {sizes, ranges}};
    return gradients(info, grads, saved, Flags(wanted.begin(), wanted.end()));
  }

  // The Info as `in_graph` reads it.
  std::array<std::vector<int64_t>, 5> numbers() const {
    return {std::vector<int64_t>{info.op.number, info.statistics_inside, info.eps, info.invariance},
            std::vector<int64_t>(info.shape.begin(), info.shape.end()),
            std::vector<int64_t>(info.settings.begin(), info.settings.end()), info.parts.sizes, info.parts.ranges};
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
    for (size_t i = 0; i < info.op.tensors.size(); ++i) flags.push_back(task_should_compute_output(i));
    return flags;
  }

  // Whether a saved tensor is an output of this node. If it were not one, it would be a constant to a second derivative.
  bool is_output(size_t at) const {
    size_t place = info.backward().saved[at], tensors = info.op.tensors.size();
    return place >= tensors && contains(info.outputs(), place - tensors);
  }

  Info info;
  c10::SmallVector<torch::autograd::SavedVariable, 5> saved;
};

inline void record_in_two(const Given& given, const Outputs& outputs, bool statistics_inside);

// Records a forward with a NormBackward. With the statistics inside, they are not. The others of Parts, which are views,
// lie behind the outputs.
inline void record(const Given& given, const Outputs& outputs, bool statistics_inside, const Parts& parts = {}) {
  namespace autograd = torch::autograd;
  if (given.op.in_two) return record_in_two(given, outputs, statistics_inside);
  auto* node = new NormBackward(given, statistics_inside, parts);
  Owner owner = own(node, 0);
  node->set_next_edges(autograd::collect_next_edges(c10::ArrayRef<const Tensor*>(given.tensors)));
  for (size_t each : node->info.outputs())
    if (outputs[each].defined()) autograd::set_history(outputs[each], owner);
    else node->add_input_metadata(autograd::Node::undefined_input());
  for (size_t at = given.op.num_outputs; at < outputs.size(); ++at) {
    autograd::set_history(outputs[at], owner);
    if (auto* view = autograd::impl::get_view_autograd_meta(outputs[at]))
      view->set_creation_meta(autograd::CreationMeta::MULTI_OUTPUT_NODE);
  }
  node->save(given, outputs);
}

// Records a forward that normalizes again with a node for each norm. h is an output of the first one, and then of the
// second, as if the next norm had changed it in place: its gradients meet in the backward of that norm.
inline void record_in_two(const Given& given, const Outputs& outputs, bool statistics_inside) {
  const InTwo& in_two = *given.op.in_two;
  Given first = given.part(in_two.first, {});
  if (is_recorded(first.tensors))
    record(first, Outputs(outputs.begin(), outputs.begin() + in_two.first.op->num_outputs), statistics_inside);
  Outputs of_next;
  for (const auto& each : in_two.outputs) of_next.push_back(each ? outputs[*each] : Tensor());
  record(given.part(in_two.recorded, outputs[0]), of_next, statistics_inside);
}

// The outputs of a forward whose first tensor is the whole.
inline Outputs run_of_parts(Given given, const Parts& parts) {
  Outputs both = parts.first_two_plain(given.x());
  for (size_t i = 0; i < 2; ++i) given.tensors[i] = &both[i];
  return run(given, true);
}

}  // namespace fusednorm
