// The host side of the norm ops in C++. For plain tensors it runs the calls that Python has prepared and records
// autograd's node. The Python functions that `install` is given run all other calls: those of a new kind, a tensor
// subclass, a mode, a transform or a forced variant. fusednorm/host/native.py is the Python side.
//
// A call enters here, above autograd. The way down: node.h (autograd's node), below.h (the ops below autograd), call.h
// (a call's key), cache.h (finds the prepared call), prepared.h (runs it) and driver.h (CUDA's driver). aten.h lets ATen's
// ops enter below autograd.

#include "aten.h"
#include "node.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TracerMode.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

namespace fusednorm {
namespace {

// -------------------------------------------------------------------------------- the ops above autograd

// Whether a call must run in Python's implementation above autograd.
template <typename Given>
bool needs_python(const Given& given) {
  return !may_run_here(given.tensors()) || needs_formula(given.differentiable());
}

template <typename Given>
Outputs run_above_in_python(const Given& given) {
  py::gil_scoped_acquire gil;
  return to_tensors(given.pass_to(python->above[given.op]));
}

Outputs forward_above(const ForwardOperands& given) {
  if (needs_python(given)) return run_above_in_python(given);
  return is_recorded(given.tensors()) ? record_forward(given, /*y_alone=*/false) : run_forward(given, true);
}

Outputs backward_above(const BackwardOperands& given) {
  if (needs_python(given) || is_recorded(given.differentiable())) return run_above_in_python(given);
  return run_backward(given, true);
}

// -------------------------------------------------------------------------------- y alone, for modules

// y of a forward, without the dispatcher, and without statistics that no backward will read. The arguments are
// (x, normalized_shape, weight, bias, eps), without bias for RMSNorm. Returns None for calls that Python must run.
PyObject* y_of(Op op, PyObject* const* arguments, Py_ssize_t count) {
  bool layer = op == LAYER_FWD;
  auto decline = [] { Py_RETURN_NONE; };
  if (count != (layer ? 5 : 4) || !python || at::impl::torch_function_mode_enabled() ||
      at::tracer::impl::is_dispatch_enabled() || at::autocast::is_autocast_enabled(at::kCUDA) ||
      c10::InferenceMode::is_enabled())
    return decline();
  auto tensor = [](PyObject* object, const Tensor*& into) {
    into = &undefined();
    if (object == Py_None) return true;
    if (!THPVariable_CheckTypeExact(Py_TYPE(object))) return false;
    into = &THPVariable_Unpack(object);
    return true;
  };
  const Tensor *x_, *weight_, *bias_ = &undefined();  // the caller keeps the arguments
  if (!tensor(arguments[0], x_) || !tensor(arguments[2], weight_) || (layer && !tensor(arguments[3], bias_)))
    return decline();
  const Tensor &x = *x_, &weight = *weight_, &bias = *bias_;
  if (!x.defined() || !PyTuple_Check(arguments[1])) return decline();
  Shape shape(PyTuple_GET_SIZE(arguments[1]));
  for (size_t i = 0; i < shape.size(); ++i) {
    PyObject* size = PyTuple_GET_ITEM(arguments[1], i);
    if (!PyLong_CheckExact(size)) return decline();
    int overflow = 0;
    shape[i] = PyLong_AsLongLongAndOverflow(size, &overflow);
    if (overflow || shape[i] < 0) return decline();
  }
  optional<double> eps;
  if (PyObject* number = arguments[count - 1]; number != Py_None) {
    if (!PyFloat_CheckExact(number)) return decline();
    eps = PyFloat_AS_DOUBLE(number);
  } else if (layer) {
    return decline();  // only RMSNorm has a default for eps None
  }
  auto sizes = c10::fromIntArrayRefUnchecked(shape);
  ForwardOperands given{op, x, sizes, weight, bias, eps};
  if (needs_python(given)) return decline();
  Tensor y;
  {
    py::gil_scoped_release released;
    at::RecordFunction record(at::RecordScope::FUNCTION);
    show_to_profiler(record, layer ? "fusednorm::layer_norm_fwd" : "fusednorm::rms_norm_fwd", {x, weight, bias});
    given.wants_statistics = is_recorded(given.tensors());
    y = given.wants_statistics ? record_forward(given, /*y_alone=*/true)[0] : run_forward(given, true)[0];
  }
  return THPVariable_Wrap(y);
}

template <Op op>
PyObject* norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  return y_of(op, arguments, count);
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {
    {"layer_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(norm<LAYER_FWD>)), METH_FASTCALL, nullptr},
    {"rms_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(norm<RMS_FWD>)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// -------------------------------------------------------------------------------- registration

std::vector<std::unique_ptr<torch::Library>> installed;

// Registers the ops at a dispatch key, by these functions of their operands.
template <auto forward, auto backward>
void implement(const std::string& key) {
  installed.push_back(std::make_unique<torch::Library>(
      torch::Library::IMPL, "fusednorm", c10::parseDispatchKey(key), __FILE__, __LINE__));
  installed.back()->impl("layer_norm_fwd", TORCH_FN(layer_norm_fwd<forward>))
      .impl("rms_norm_fwd", TORCH_FN(rms_norm_fwd<forward>))
      .impl("layer_norm_bwd", TORCH_FN(layer_norm_bwd<backward>))
      .impl("rms_norm_bwd", TORCH_FN(rms_norm_bwd<backward>))
      .impl("layer_norm_bwd_residual", TORCH_FN(layer_norm_bwd_residual<backward>))
      .impl("rms_norm_bwd_residual", TORCH_FN(rms_norm_bwd_residual<backward>));
}

void install(const std::string& key, const std::vector<py::object>& above, const std::vector<py::object>& below,
             py::object statistics_gradient, py::object differentiable_backward, size_t kept) {
  cache.most_kinds = kept;
  python = new Python{{}, {}, std::move(statistics_gradient), std::move(differentiable_backward)};
  for (size_t op = 0; op < OPS; ++op) {
    python->above[op] = above.at(op);
    python->below[op] = below.at(op);
  }
  runs_cpu_tensors |= key == "CPU";
  implement<forward_below, backward_below>(key);
  implement<forward_above, backward_above>("Autograd" + key);
}

}  // namespace
}  // namespace fusednorm

using namespace fusednorm;

PYBIND11_MODULE(_native, module) {
  module.attr("torch_version") = TORCH_VERSION;
  PyModule_AddFunctions(module.ptr(), functions);
  py::enum_<Extent>(module, "Extent")
      .value("X", Extent::X).value("STATISTIC", Extent::STATISTIC).value("PARAMETER", Extent::PARAMETER);
  py::enum_<Number>(module, "Number")
      .value("ROWS", Number::ROWS).value("CTAS", Number::CTAS).value("PARTIALS", Number::PARTIALS);
  py::class_<Output>(module, "Output")
      .def(py::init([](Extent extent, at::ScalarType dtype) { return Output{extent, dtype}; }), py::kw_only(),
           py::arg("extent"), py::arg("dtype"));
  py::class_<Grid>(module, "Grid")
      .def(py::init([](int64_t rows_per_tile, int64_t at_once, int64_t first_wave, int64_t rows_of_cta,
                       int64_t tiles_of_cta, int64_t tiles_of_sum, int64_t least_short_lived,
                       int64_t partials_of_cta) {
             return Grid{rows_per_tile, at_once, first_wave, rows_of_cta, tiles_of_cta, tiles_of_sum,
                         least_short_lived, partials_of_cta};
           }),
           py::kw_only(), py::arg("rows_per_tile"), py::arg("at_once"), py::arg("first_wave"), py::arg("rows_of_cta"),
           py::arg("tiles_of_cta"), py::arg("tiles_of_sum"), py::arg("least_short_lived"), py::arg("partials_of_cta"))
      .def("numbers", &Grid::numbers);
  py::class_<Workspace>(module, "Workspace")
      .def(py::init([](at::ScalarType dtype, std::array<Part, NUM_PARTS> parts) { return Workspace{dtype, parts}; }),
           py::kw_only(), py::arg("dtype"), py::arg("parts"))
      .def("sizes", &Workspace::sizes);
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
      .def("add_address", &Step::add_address, py::arg("index"))
      .def("add_map", &Step::add_map, py::kw_only(), py::arg("index"), py::arg("type"), py::arg("rows_dim"),
           py::arg("shape"), py::arg("strides"), py::arg("box"));
  py::class_<PreparedCall, std::shared_ptr<PreparedCall>>(module, "PreparedCall")
      .def(py::init<int, int64_t, int64_t, Grid, std::vector<optional<Output>>, optional<Workspace>,
                    std::vector<Step>, int64_t>(),
           py::kw_only(), py::arg("device"), py::arg("rows_above"), py::arg("most_rows"), py::arg("grid"),
           py::arg("outputs"), py::arg("workspace"), py::arg("steps"), py::arg("sm_margin"));
  py::class_<Overrides>(module, "Overrides")
      .def(py::init<const std::string&, const std::vector<py::object>&>(), py::arg("key"), py::arg("functions"))
      .def("remove", &Overrides::remove);
  module.def("install", &install);
  module.def("pause", [](int by) { pauses += by; });
  module.def("set_sm_margin", [](int64_t sms) { sm_margin = sms; });
  module.def("watch", [](py::list enter, py::list exit) {
    if (hooks[0] != enter.ptr()) hooks[0] = enter.release().ptr();  // never freed: is_paused reads it without the GIL
    if (hooks[1] != exit.ptr()) hooks[1] = exit.release().ptr();
  });
  module.def("repeats", [] { return repeats.load(); });
  module.def("forget", [] { cache.forget(); });
  module.def("use_driver", [](const std::string& path) { driver_path = path; });
}
