// The ops, as Python describes them (fusednorm/operands.py), and the operands of a call as one value.

#pragma once

#include "program.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <mutex>
#include <string>

namespace fusednorm {

namespace py = pybind11;
using c10::IValue;

inline bool is_tensor(Role role) { return role < Role::SHAPE; }

// An operand.
struct Slot {
  Role role;
  bool optional, is_argument, is_read;
  size_t place;  // of a tensor: its address among those of a call
  size_t list;   // how many slots, from this one on, are an argument that is a list of tensors; 0 in one that is none

  size_t slots() const { return list ? list : 1; }
};

struct Op;

constexpr size_t MEAN = 1, RSTD = 2;  // among the outputs of a forward's program: those of operands.py
constexpr size_t DX = 0;              // among those of a backward's

// How the node of a forward calls the backward op: operands.derivative_of, with places in place of names. Outputs are
// counted as programs have them.
struct Backward {
  struct Setting {  // none of these is there for the mask, which differs from call to call
    optional<size_t> of_forward;  // the forward's setting that it is
    std::vector<size_t> dtype_of;  // the forward's tensors whose promoted dtype it is
    int64_t constant;              // what it is otherwise
  };

  const Op* op;
  std::vector<size_t> saved;  // the forward's tensors and, counted on, its outputs that the node keeps
  // What each tensor of the op is: one of `saved` or, counted on, one of two parts or the gradient of an output or that of
  // the other parts.
  std::vector<optional<size_t>> sources;
  std::vector<size_t> gradients;  // what each tensor of the forward gets: an output of the op or, counted on, the gradient of an output
  std::vector<size_t> passed;     // the outputs of the forward whose gradients are added to that of x
  std::vector<size_t> of_dx;      // the outputs of the op that are made of that of x
  std::vector<size_t> copies;     // and those that are that of x, in another dtype
  std::vector<Setting> settings;  // of the op
  size_t eps;                                  // among the settings of the forward
};

// The ops that make up a forward that normalizes again: native._connect_in_two.
struct InTwo {
  struct Part {
    const Op* op;
    std::vector<optional<size_t>> tensors;  // which of the forward's each is; without one, x is h and others are absent
  };

  Part first, next, recorded;  // autograd records the last one in place of `next`
  std::vector<optional<size_t>> outputs;  // which of the forward's each of `recorded` is; `next` has the first of these
};

struct Op {
  int64_t number;  // among all ops
  std::string name;
  std::vector<Slot> inputs;     // in the order of the schema, which lacks those that are no arguments
  size_t num_tensors;           // places of tensors
  size_t num_outputs;           // that a program of the op has, absent ones included
  std::vector<size_t> outputs;  // which of these the op has
  bool follows_autocast;        // whether dtypes are not those of the arguments under autocast
  bool returns_list;            // of the outputs that are wanted
  // Python's functions of the inputs: the op above autograd; below it, which returns (outputs, program); ATen's op while
  // an Overrides is in force; and a backward that is itself differentiated, of (eps, *inputs).
  py::object above, below, in_place_of_aten, differentiable_backward, statistics_gradients;
  optional<Backward> backward;  // of a forward
  optional<InTwo> in_two;       // of one that normalizes again, in place of a backward
  optional<Backward> packed;    // of one whose first two tensors are parts of one: that tensor takes the place of the first

  std::vector<Slot> tensors;  // of the inputs
  size_t x = 0;               // among these
  size_t num_arguments = 0, num_values = 0;  // with lists as one, and by their elements
  bool has_shape = false;                    // a normalized shape, rows, and in a forward statistics
  std::vector<size_t> without_statistics;  // `outputs` of a forward whose statistics stay inside the node
  optional<size_t> wants_statistics;       // among the settings; the only input that is no argument
  optional<size_t> mask, groups;           // among the settings

  Op(int64_t number, std::string name, std::vector<Slot> given, size_t x, size_t num_tensors, size_t num_outputs,
     std::vector<size_t> given_outputs, bool follows_autocast, bool returns_list)
      : number(number), name(std::move(name)), inputs(std::move(given)), num_tensors(num_tensors),
        num_outputs(num_outputs), outputs(std::move(given_outputs)), follows_autocast(follows_autocast),
        returns_list(returns_list), x(x) {
    TORCH_CHECK(num_tensors + num_outputs + MOST_PARTS <= MOST_ADDRESSES, this->name, " must have at most ",
                text(MOST_ADDRESSES - MOST_PARTS), " tensors, got ", text(num_tensors + num_outputs));
    size_t settings = 0;
    for (const Slot& each : inputs) {
      if (!each.is_argument) wants_statistics = settings;
      if (each.role == Role::MASK) mask = settings;
      if (each.role == Role::GROUPS) groups = settings;
      has_shape |= each.role == Role::SHAPE;
      num_values += each.is_argument;
      settings += !is_tensor(each.role) && each.role != Role::SHAPE;
      if (is_tensor(each.role)) tensors.push_back(each);
    }
    for (size_t i = 0; i < inputs.size(); i += inputs[i].slots()) num_arguments += inputs[i].is_argument;
    for (size_t each : outputs)
      if (!has_shape || (each != MEAN && each != RSTD)) without_statistics.push_back(each);
  }
};

inline std::vector<Op*>& ops = *new std::vector<Op*>;  // by number; never destroyed, as Python may be gone before

inline const Tensor& undefined() {
  static const Tensor tensor;
  return tensor;
}

constexpr int64_t NONE = -1;  // a setting that is None
constexpr int64_t NO_INTEGER = std::numeric_limits<int64_t>::min();  // one that may be any other integer

inline int64_t as_setting(optional<double> given) {
  if (!given) return NONE;
  double number = std::isnan(*given) ? std::numeric_limits<double>::quiet_NaN() : *given;  // no NaN is NONE
  int64_t setting;
  std::memcpy(&setting, &number, sizeof setting);
  return setting;
}

// The names that operands were given, by the settings that stand for them.
struct Names {
  std::mutex mutex;
  std::vector<std::string> known;

  int64_t setting_of(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = std::find(known.begin(), known.end(), name);
    return found == known.end() ? (known.push_back(name), known.size() - 1) : found - known.begin();
  }

  std::string of(int64_t setting) {
    std::lock_guard<std::mutex> lock(mutex);
    return known.at(setting);
  }
};

inline Names& names = *new Names;

inline optional<double> as_number(int64_t setting) {
  if (setting == NONE) return {};
  double number;
  std::memcpy(&number, &setting, sizeof number);
  return number;
}

// The mask is a number of flags and these as bits.
template <typename Flags>
inline int64_t as_setting(const Flags& mask) {
  int64_t setting = static_cast<int64_t>(mask.size()) << 32;
  for (size_t i = 0; i < mask.size(); ++i) setting |= static_cast<int64_t>(bool(mask[i])) << i;
  return setting;
}

inline std::vector<bool> as_flags(int64_t setting) {
  std::vector<bool> flags(setting >> 32);
  for (size_t i = 0; i < flags.size(); ++i) flags[i] = setting >> i & 1;
  return flags;
}

// The operands of an op. Its tensors must outlive them.
struct Given {
  using Tensors = c10::SmallVector<const Tensor*, 8>;
  using Settings = c10::SmallVector<int64_t, 4>;

  const Op& op;
  Tensors tensors;  // an absent one is undefined
  Shape shape;
  Settings settings;  // what is neither a tensor nor the shape
  c10::ArrayRef<IValue> symbolic_shape;  // in place of `shape`, if sizes are symbolic
  bool is_of_aten = false;

  explicit Given(const Op& op) : op(op) {}

  Given(const Op& op, std::initializer_list<const Tensor*> tensors, IntArrayRef shape, int64_t setting)
      : op(op), tensors(tensors), shape(shape.begin(), shape.end()), settings(1, setting) {
    if (op.wants_statistics) settings.push_back(true);
  }

  // The arguments as the dispatcher's stack has them.
  Given(const Op& op, c10::ArrayRef<IValue> arguments) : op(op) {
    const IValue* next = arguments.data();
    for (size_t at = 0; at < op.inputs.size(); at += op.inputs[at].slots()) {
      const Slot& slot = op.inputs[at];
      if (!slot.is_argument) {
        settings.push_back(true);
        continue;
      }
      const IValue& each = *next++;
      if (slot.list) {
        auto list = each.toListRef();
        TORCH_CHECK(list.size() == slot.list, op.name, ": a list must hold ", text(slot.list), " tensors, got ",
                    text(list.size()));
        for (const IValue& one : list) tensors.push_back(one.isNone() ? &undefined() : &one.toTensor());
      } else if (is_tensor(slot.role)) {
        tensors.push_back(each.isNone() ? &undefined() : &each.toTensor());
      } else if (slot.role == Role::SHAPE) {
        for (const IValue& size : each.toListRef()) {
          if (C10_UNLIKELY(!size.isInt())) symbolic_shape = each.toListRef();
          else shape.push_back(size.toInt());
        }
      } else if (slot.role == Role::MASK) {
        c10::SmallVector<bool, 8> flags;
        for (const IValue& flag : each.toListRef()) flags.push_back(flag.toBool());
        settings.push_back(as_setting(flags));
      } else if (slot.role == Role::NUMBER) {
        settings.push_back(as_setting(each.isNone() ? optional<double>() : each.toDouble()));
      } else if (slot.role == Role::FLAG) {
        settings.push_back(each.toBool());
      } else if (slot.role == Role::NAME) {
        settings.push_back(names.setting_of(each.toStringRef()));
      } else {
        settings.push_back(!each.isNone() ? each.toInt() : slot.role == Role::INTEGER ? NO_INTEGER : NONE);
      }
    }
  }

  // The operands of a part of an op that normalizes again.
  Given part(const InTwo::Part& part, const Tensor& h) const {
    Given made(*part.op);
    for (size_t i = 0; i < part.tensors.size(); ++i)
      made.tensors.push_back(part.tensors[i] ? tensors[*part.tensors[i]] : i == part.op->x ? &h : &undefined());
    made.shape = shape;
    made.settings = settings;
    return made;
  }

  const Tensor& x() const { return *tensors[op.x]; }

  // The tensors that outputs depend on.
  Tensors differentiable() const {
    Tensors found;
    for (size_t i = 0; i < tensors.size(); ++i)
      if (op.tensors[i].is_read) found.push_back(tensors[i]);
    return found;
  }
};

template <typename Element>
inline IValue list_of(const Tensor* const* tensors, size_t count) {
  c10::List<Element> list;
  for (size_t i = 0; i < count; ++i) list.push_back(tensors[i]->defined() ? Element(*tensors[i]) : Element());
  return list;
}

// The inputs as the dispatcher's stack has arguments.
inline torch::jit::Stack to_stack(const Given& given) {
  torch::jit::Stack stack;
  auto tensor = given.tensors.begin();
  auto setting = given.settings.begin();
  const auto& inputs = given.op.inputs;
  for (size_t at = 0; at < inputs.size(); at += inputs[at].slots()) {
    const Slot& slot = inputs[at];
    if (slot.list) {
      stack.push_back(slot.optional ? list_of<optional<Tensor>>(tensor, slot.list) : list_of<Tensor>(tensor, slot.list));
      tensor += slot.list;
    } else if (is_tensor(slot.role)) {
      const Tensor& each = **tensor++;
      stack.emplace_back(each.defined() ? IValue(each) : IValue());
    } else if (slot.role == Role::SHAPE) {
      c10::impl::GenericList symbolic(c10::AnyType::get());
      for (const IValue& size : given.symbolic_shape) symbolic.push_back(size);
      if (symbolic.empty()) stack.emplace_back(std::vector<int64_t>(given.shape.begin(), given.shape.end()));
      else stack.emplace_back(std::move(symbolic));
    } else if (int64_t number = *setting++; slot.role == Role::MASK) {
      stack.emplace_back(as_flags(number));
    } else if (slot.role == Role::NUMBER) {
      stack.emplace_back(as_number(number));
    } else if (slot.role == Role::NAME) {
      stack.emplace_back(names.of(number));
    } else if (slot.role == Role::FLAG) {
      stack.emplace_back(number != 0);
    } else {
      stack.push_back(number == (slot.role == Role::INTEGER ? NO_INTEGER : NONE) ? IValue() : IValue(number));
    }
  }
  return stack;
}

// For callers that hold the GIL.
inline py::object to_python(const Tensor& tensor) { return tensor.defined() ? py::cast(tensor) : py::none(); }

inline py::tuple to_python(const Given& given) {
  torch::jit::Stack stack = to_stack(given);
  py::tuple made(stack.size());
  for (size_t i = 0, at = 0; i < stack.size(); at += given.op.inputs[at].slots(), ++i) {
    const IValue& each = stack[i];
    if (each.isTensor()) made[i] = to_python(each.toTensor());  // with names of dims, which torch's own refuses
    else if (each.isInt() && given.op.inputs[at].role == Role::DTYPE)
      made[i] = py::cast(static_cast<at::ScalarType>(each.toInt()));
    else made[i] = torch::jit::toPyObject(each);
  }
  return made;
}

inline Tensor to_tensor(py::handle object) { return object.is_none() ? Tensor() : py::cast<Tensor>(object); }

inline Outputs to_tensors(py::handle objects) {
  Outputs tensors;
  for (py::handle each : objects) tensors.push_back(to_tensor(each));
  return tensors;
}

}  // namespace fusednorm
