// The host side of the norm ops in C++. For plain tensors it runs the programs that Python has built and records
// autograd's node. The Python functions of an op run all other calls: those of a new kind, a tensor subclass, a mode, a
// transform or a forced variant. fusednorm/host/native.py is the Python side, and tells which ops there are.
//
// A call enters here, above autograd. The way down: node.h (autograd's node), call.h (a call's key), cache.h (finds the
// program), program.h (runs it) and driver.h (CUDA's driver). op.h has an op's operands as a value.

#include "node.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TracerMode.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>
#include <torch/version.h>

namespace fusednorm {
namespace {

// -------------------------------------------------------------------------------- the ops above autograd

// Whether a call must run in Python's implementation above autograd.
bool needs_python(const Given& given) {
  return !may_run_here(given.tensors) || !given.symbolic_shape.empty() || needs_formula(given.differentiable());
}

Outputs run_above(const Given& given) {
  bool python = needs_python(given);
  if (!python && !is_recorded(given.differentiable())) return run(given, true);
  if (!python && (given.op.backward || given.op.in_two)) {
    Outputs outputs = run(given, true);
    record(given, outputs, /*statistics_inside=*/false);
    return outputs;
  }
  py::gil_scoped_acquire gil;
  return to_tensors(given.op.above(*to_python(given)));
}

// -------------------------------------------------------------------------------- called by Python, without the dispatcher

// Reads an argument from Python. Returns false for what Python must run.
bool read(PyObject* argument, const Slot& slot, Given& given) {
  bool is_none = argument == Py_None;
  if (is_none && !slot.optional) return false;
  switch (slot.role) {
    case Role::SHAPE:
      if (!PyTuple_Check(argument)) return false;
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(argument); ++i) {
        PyObject* size = PyTuple_GET_ITEM(argument, i);
        if (!PyLong_CheckExact(size)) return false;
        int overflow = 0;
        given.shape.push_back(PyLong_AsLongLongAndOverflow(size, &overflow));
        if (overflow || given.shape.back() < 0) return false;
      }
      return true;
    case Role::NUMBER:
      if (!is_none && !PyFloat_CheckExact(argument)) return false;
      given.settings.push_back(as_setting(is_none ? optional<double>() : PyFloat_AS_DOUBLE(argument)));
      return true;
    case Role::FLAG:
      if (!PyBool_Check(argument)) return false;
      given.settings.push_back(argument == Py_True);
      return true;
    case Role::INTEGER:
      if (is_none) {
        given.settings.push_back(NO_INTEGER);
        return true;
      }
      [[fallthrough]];
    case Role::GROUPS: {
      if (!PyLong_CheckExact(argument)) return false;
      int overflow = 0;
      given.settings.push_back(PyLong_AsLongLongAndOverflow(argument, &overflow));
      return !overflow;
    }
    case Role::NAME:
      if (!PyUnicode_Check(argument)) return false;
      given.settings.push_back(names.setting_of(PyUnicode_AsUTF8(argument)));
      return true;
    case Role::DTYPE:
      if (!is_none && !THPDtype_Check(argument)) return false;
      given.settings.push_back(
          is_none ? NONE : static_cast<int64_t>(reinterpret_cast<THPDtype*>(argument)->scalar_type));
      return true;
    default:
      if (!is_none && !THPVariable_CheckTypeExact(Py_TYPE(argument))) return false;
      given.tensors.push_back(is_none ? &undefined() : &THPVariable_Unpack(argument));
      return true;
  }
}

// The operands that Python passes: the op's number, and a tuple of its arguments, those of lists one by one. Nothing for
// calls that Python must run.
optional<Given> from_python(PyObject* number, PyObject* arguments) {
  const Op& op = *ops.at(PyLong_AsLong(number));
  if (static_cast<size_t>(PyTuple_GET_SIZE(arguments)) != op.num_values || at::impl::torch_function_mode_enabled() ||
      at::tracer::impl::is_dispatch_enabled() || c10::InferenceMode::is_enabled() ||
      (op.follows_autocast && at::autocast::is_autocast_enabled(at::kCUDA)))
    return {};
  optional<Given> given(op);
  Py_ssize_t at = 0;
  for (const Slot& slot : op.inputs)
    if (!slot.is_argument) given->settings.push_back(true);
    else if (!read(PyTuple_GET_ITEM(arguments, at++), slot, *given)) return {};
  if (needs_python(*given)) return {};
  return given;
}

// A forward, without statistics that no backward will read: y, or a tuple of y and the outputs behind the statistics, and
// of the other Parts. With Parts, the first two tensors are the whole that they are parts of, and `integers` are what the
// backward takes beside the forward's settings. Returns None for calls that Python must run.
PyObject* run_forward(optional<Given> given, const Parts& parts = {}, const std::vector<int64_t>& integers = {}) {
  if (!given) Py_RETURN_NONE;
  const Op& op = given->op;
  bool recorded = is_recorded(given->tensors);
  if (recorded && !op.backward && !op.in_two) Py_RETURN_NONE;
  Outputs outputs;
  {
    py::gil_scoped_release released;
    at::RecordFunction shown(at::RecordScope::FUNCTION);
    show_to_profiler(shown, *given);
    if (op.wants_statistics) given->settings[*op.wants_statistics] = recorded;
    if (!parts) {
      outputs = run(*given, true);
    } else {
      const Tensor& whole = *std::exchange(given->tensors[1], &undefined());
      outputs = run_of_parts(*given, parts);
      at::AutoGradMode mode(at::GradMode::is_enabled() && !recorded);
      outputs.append(parts.others(whole));
      given->settings.append(integers.begin(), integers.end());
    }
    if (recorded) record(*given, outputs, /*statistics_inside=*/true, parts);
  }
  if (!parts && op.without_statistics.size() == 1) return THPVariable_Wrap(outputs[0]);
  py::tuple made(op.without_statistics.size() + outputs.size() - op.num_outputs);
  size_t at = 0;
  for (size_t each : op.without_statistics) made[at++] = to_python(outputs[each]);
  for (size_t each = op.num_outputs; each < outputs.size(); ++each) made[at++] = to_python(outputs[each]);
  return made.release().ptr();
}

PyObject* y_of(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  return run_forward(from_python(arguments[0], arguments[1]));
  END_HANDLE_TH_ERRORS
}

// The same behind the Parts (sizes and ranges) and the integers.
PyObject* y_of_parts(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  optional<Given> given = from_python(arguments[3], arguments[4]);
  py::detail::make_caster<std::vector<int64_t>> integers[3];
  for (int i = 0; i < 3; ++i)
    if (!given || !integers[i].load(arguments[i], /*convert=*/true)) Py_RETURN_NONE;
  return run_forward(std::move(given), {integers[0], integers[1]}, integers[2]);
  END_HANDLE_TH_ERRORS
}

PyObject* invariance(PyObject*, PyObject*) { return PyLong_FromLongLong(fusednorm::invariance_in_force()); }

PyMethodDef functions[] = {
    {"invariance", invariance, METH_NOARGS, nullptr},
    {"y_of", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(y_of)), METH_FASTCALL, nullptr},
    {"y_of_parts", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(y_of_parts)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// -------------------------------------------------------------------------------- ATen's ops, for enable_eager()

// With types of their own, because the dispatcher would pack the operands of these ops for a kernel without types.
using Pair = std::tuple<Tensor, Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;

struct AtensOps {
  Op *layer_fwd, *layer_bwd, *rms_fwd, *rms_bwd;
  bool are_replaced;
};
AtensOps aten{};

const Tensor* pointer_to(const optional<Tensor>& tensor) { return tensor ? &*tensor : &undefined(); }

Outputs run_in_place_of_aten(
    const Op* op, std::initializer_list<const Tensor*> tensors, IntArrayRef shape, int64_t setting) {
  Given given(*op, tensors, shape, setting);
  given.is_of_aten = true;
  return run_below(given);
}

Triple native_layer_norm(
    const Tensor& x, c10::SymIntArrayRef shape, const optional<Tensor>& weight, const optional<Tensor>& bias,
    double eps) {
  Outputs all = run_in_place_of_aten(aten.layer_fwd, {&x, pointer_to(weight), pointer_to(bias)}, C10_AS_INTARRAYREF_SLOW(shape),
                                     as_setting(optional<double>(eps)));
  return {std::move(all[0]), std::move(all[1]), std::move(all[2])};
}

Triple native_layer_norm_backward(
    const Tensor& grad_out, const Tensor& x, c10::SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const optional<Tensor>& weight, const optional<Tensor>& bias, std::array<bool, 3> mask) {
  Outputs all = run_in_place_of_aten(
      aten.layer_bwd, {&grad_out, &x, &mean, &rstd, pointer_to(weight), pointer_to(bias)}, C10_AS_INTARRAYREF_SLOW(shape),
      as_setting(mask));
  return {std::move(all[0]), std::move(all[1]), std::move(all[2])};
}

Pair fused_rms_norm(const Tensor& x, IntArrayRef shape, const optional<Tensor>& weight, optional<double> eps) {
  Outputs all = run_in_place_of_aten(aten.rms_fwd, {&x, pointer_to(weight)}, shape, as_setting(eps));
  return {std::move(all[0]), std::move(all[2])};
}

Pair fused_rms_norm_backward(
    const Tensor& grad_out, const Tensor& x, IntArrayRef shape, const Tensor& rstd, const optional<Tensor>& weight,
    std::array<bool, 2> mask) {
  Outputs all = run_in_place_of_aten(
      aten.rms_bwd, {&grad_out, &x, &rstd, pointer_to(weight)}, shape, as_setting(mask));
  return {std::move(all[0]), std::move(all[1])};
}

// In place of ATen's kernels at a dispatch key, from construction until `remove`. At most one is in force at a time.
class Overrides {
 public:
  // The numbers of our ops, in the order of AtensOps, and Python's functions of their inputs.
  Overrides(const std::string& key, const std::array<size_t, 4>& numbers, const std::array<py::object, 4>& functions) {
    TORCH_CHECK(!aten.are_replaced, "fusednorm: ATen's norms must be replaced once at a time, got ", key, " as well");
    torch::PyWarningHandler to_python;  // the dispatcher warns of kernels that are overridden
    try {
      aten = {ops.at(numbers[0]), ops.at(numbers[1]), ops.at(numbers[2]), ops.at(numbers[3]), true};
      for (size_t i = 0; i < numbers.size(); ++i) ops[numbers[i]]->in_place_of_aten = functions[i];
      library = std::make_unique<torch::Library>(
          torch::Library::IMPL, "aten", c10::parseDispatchKey(key), __FILE__, __LINE__);
      library->impl("native_layer_norm", TORCH_FN(native_layer_norm))
          .impl("native_layer_norm_backward", TORCH_FN(native_layer_norm_backward))
          .impl("_fused_rms_norm", TORCH_FN(fused_rms_norm))
          .impl("_fused_rms_norm_backward", TORCH_FN(fused_rms_norm_backward));
    } catch (...) {
      forget();
      throw;
    }
  }

  ~Overrides() { remove(); }

  void remove() {
    if (!library) return;
    library.reset();
    forget();
  }

 private:
  std::unique_ptr<torch::Library> library;

  // Calls that are still on their way find no function.
  static void forget() {
    for (Op* op : {aten.layer_fwd, aten.layer_bwd, aten.rms_fwd, aten.rms_bwd}) op->in_place_of_aten = {};
    aten.are_replaced = false;
  }
};

// -------------------------------------------------------------------------------- registration

// An op at one dispatch key, with its arguments and outputs on the dispatcher's stack.
template <Outputs run(const Given&)>
struct Kernel : c10::OperatorKernel {
  const Op& op;

  explicit Kernel(const Op& op) : op(op) {}

  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    Outputs outputs = run(Given(op, torch::jit::last(*stack, op.num_arguments)));
    torch::jit::drop(*stack, op.num_arguments);
    if (op.returns_list) {
      c10::List<Tensor> list;
      for (size_t each : op.outputs)
        if (outputs[each].defined()) list.push_back(std::move(outputs[each]));
      stack->emplace_back(std::move(list));
      return;
    }
    for (size_t each : op.outputs) stack->emplace_back(std::move(outputs[each]));
  }
};

template <Outputs run(const Given&)>
void implement(const Op& op, const std::string& key) {
  static std::vector<std::unique_ptr<torch::Library>> installed;
  size_t colons = op.name.find("::");
  installed.push_back(std::make_unique<torch::Library>(
      torch::Library::IMPL, op.name.substr(0, colons), c10::parseDispatchKey(key), __FILE__, __LINE__));
  installed.back()->impl(op.name.substr(colons + 2).c_str(),
                         torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel<run>>(op)));
}

// Adds an op, and returns its number.
size_t add(const std::string& name, std::vector<Slot> inputs, size_t x, size_t num_tensors, size_t num_outputs,
           std::vector<size_t> outputs, bool follows_autocast, bool returns_list) {
  ops.push_back(new Op(ops.size(), name, std::move(inputs), x, num_tensors, num_outputs, std::move(outputs),
                       follows_autocast, returns_list));
  return ops.size() - 1;
}

// Implements an op at a dispatch key and at autograd's key above it. The functions are Op's.
void install(size_t number, const std::string& key, py::object above, py::object below,
             py::object differentiable_backward, py::object statistics_gradients) {
  Op& op = *ops.at(number);
  op.above = std::move(above);
  op.below = std::move(below);
  op.differentiable_backward = std::move(differentiable_backward);
  op.statistics_gradients = std::move(statistics_gradients);
  runs_cpu_tensors |= key == "CPU";
  implement<run_below>(op, key);
  implement<run_above>(op, "Autograd" + key);
}

}  // namespace
}  // namespace fusednorm

using namespace fusednorm;

PYBIND11_MODULE(_native, module) {
  module.attr("torch_version") = TORCH_VERSION;
  PyModule_AddFunctions(module.ptr(), functions);
#define ROLE(name) .value(#name, Role::name)
#define NUMBER(name) .value(#name, Number::name)
  py::enum_<Role>(module, "Role") ROLES(ROLE);
  py::enum_<Number>(module, "Number") NUMBERS(NUMBER);
  py::class_<Output>(module, "Output")
      .def(py::init<Role, at::ScalarType, size_t, int64_t, std::vector<int64_t>, int64_t>(),
           py::kw_only(), py::arg("role"), py::arg("dtype"), py::arg("dims"), py::arg("whole"), py::arg("shape"),
           py::arg("width"));
  py::class_<Grid>(module, "Grid")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>(),
           py::kw_only(), py::arg("rows_per_tile"), py::arg("at_once"), py::arg("first_wave"), py::arg("rows_of_cta"),
           py::arg("tiles_of_cta"), py::arg("tiles_of_sum"), py::arg("least_short_lived"), py::arg("partials_of_cta"),
           py::arg("sample_rows"), py::arg("more_ctas"))
      .def("numbers", &Grid::numbers);
  py::class_<Workspace>(module, "Workspace")
      .def(py::init([](at::ScalarType dtype, std::vector<Part> parts) {
             TORCH_CHECK(parts.size() <= MOST_PARTS, "fusednorm: a workspace must have at most ", text(MOST_PARTS),
                         " parts, got ", text(parts.size()));
             return Workspace{dtype, std::move(parts)};
           }),
           py::kw_only(), py::arg("dtype"), py::arg("parts"))
      .def("sizes", [](const Workspace& self, const Numbers& numbers, int64_t blocks) {
        auto sizes = self.sizes(numbers, blocks);
        return std::vector<int64_t>(sizes.begin(), sizes.end());
      });
  py::class_<Step>(module, "Step")
      .def(py::init<uint64_t, std::array<unsigned, 3>, std::array<optional<Number>, 2>, unsigned, unsigned, unsigned,
                    bool>(),
           py::kw_only(), py::arg("function"), py::arg("sides"), py::arg("grid"), py::arg("threads"),
           py::arg("shared_bytes"), py::arg("cluster"), py::arg("dependent"))
      .def("add_i32", &Step::add_constant<int32_t>)
      .def("add_i64", &Step::add_constant<int64_t>)
      .def("add_fp32", &Step::add_constant<float>)
      .def("add_fp64", &Step::add_constant<double>)
      .def("add_variable", &Step::add_variable, py::arg("number"), py::arg("bytes"))
      .def("add_address", &Step::add_address, py::arg("index"), py::arg("offset"))
      .def("add_map", &Step::add_map, py::kw_only(), py::arg("index"), py::arg("type"), py::arg("rows_dim"),
           py::arg("shape"), py::arg("strides"), py::arg("box"));
  py::class_<Blocks>(module, "Blocks")
      .def(py::init<int64_t, size_t, std::vector<int64_t>>(), py::kw_only(), py::arg("rows"), py::arg("once"),
           py::arg("bytes"));
  py::class_<Program, std::shared_ptr<Program>>(module, "Program")
      .def(py::init<int, int64_t, int64_t, Grid, std::vector<optional<Output>>, optional<Workspace>,
                    std::vector<Step>, int64_t, int64_t, optional<Blocks>>(),
           py::kw_only(), py::arg("device"), py::arg("rows_above"), py::arg("most_rows"), py::arg("grid"),
           py::arg("outputs"), py::arg("workspace"), py::arg("steps"), py::arg("sm_margin"),
           py::arg("invariance"), py::arg("blocks"));
  py::class_<Slot>(module, "Slot")
      .def(py::init<Role, bool, bool, bool, size_t, size_t>(), py::kw_only(), py::arg("role"), py::arg("optional"),
           py::arg("is_argument"), py::arg("is_read"), py::arg("place"), py::arg("list") = 0);
  py::class_<Overrides>(module, "Overrides")
      .def(py::init<const std::string&, const std::array<size_t, 4>&, const std::array<py::object, 4>&>(), py::arg("key"),
           py::arg("numbers"), py::arg("functions"))
      .def("remove", &Overrides::remove);
  module.def("add", &add, py::kw_only(), py::arg("name"), py::arg("inputs"), py::arg("x"), py::arg("num_tensors"),
             py::arg("num_outputs"), py::arg("outputs"), py::arg("follows_autocast"), py::arg("returns_list") = false);
  py::class_<Backward::Setting>(module, "Setting")
      .def(py::init([](optional<size_t> of_forward, std::vector<size_t> dtype_of, optional<std::string> name) {
             return Backward::Setting{of_forward, std::move(dtype_of), name ? names.setting_of(*name) : NONE};
           }),
           py::kw_only(), py::arg("of_forward") = py::none(), py::arg("dtype_of") = std::vector<size_t>(),
           py::arg("name") = py::none());
  module.def("set_backward", [](size_t forward, size_t backward, bool packed, std::vector<size_t> saved,
                                std::vector<optional<size_t>> sources, std::vector<size_t> gradients,
                                std::vector<size_t> passed, std::vector<size_t> of_dx,
                                std::vector<Backward::Setting> settings, size_t eps, std::vector<size_t> copies) {
    Op& op = *ops.at(forward);
    (packed ? op.packed : op.backward) =
        Backward{ops.at(backward), std::move(saved), std::move(sources), std::move(gradients), std::move(passed),
                 std::move(of_dx), std::move(copies), std::move(settings), eps};
  }, py::kw_only(), py::arg("forward"), py::arg("backward"), py::arg("packed"), py::arg("saved"), py::arg("sources"),
     py::arg("gradients"), py::arg("passed"), py::arg("of_dx"), py::arg("settings"), py::arg("eps"),
     py::arg("copies") = std::vector<size_t>());
  module.def("set_in_two", [](size_t op, const std::array<std::pair<size_t, std::vector<optional<size_t>>>, 3>& parts,
                              std::vector<optional<size_t>> outputs) {
    auto part = [&](size_t i) { return InTwo::Part{ops.at(parts[i].first), parts[i].second}; };
    ops.at(op)->in_two = InTwo{part(0), part(1), part(2), std::move(outputs)};
  }, py::kw_only(), py::arg("op"), py::arg("parts"), py::arg("outputs"));
  module.def("install", &install, py::arg("number"), py::arg("key"), py::kw_only(), py::arg("above"), py::arg("below"),
             py::arg("differentiable_backward"), py::arg("statistics_gradients"));
  module.def("start", [](size_t kept) { cache.most_kinds = kept; }, py::kw_only(), py::arg("kept_kinds"));
  module.def("pause", [](int by) { pauses += by; });
  module.def("set_sm_margin", [](int64_t sms) { sm_margin = sms; });
  module.def("set_invariance", [](int64_t value) { process_invariance = value; });
  module.def("swap_invariance", [](optional<int64_t> value) { return std::exchange(thread_invariance, value); });
  module.def("watch", [](py::list enter, py::list exit) {
    if (hooks[0] != enter.ptr()) hooks[0] = enter.release().ptr();  // never freed: is_paused reads it without the GIL
    if (hooks[1] != exit.ptr()) hooks[1] = exit.release().ptr();
  });
  module.def("repeats", [] { return repeats.load(); });
  module.def("forget", [] { cache.forget(); });
  module.def("use_driver", [](const std::string& path) { driver_path = path; });
}
