// The host side of the four norm ops in C++. For plain tensors it repeats the recipes that Python has made and records
// autograd's node. The Python functions that `install` is given run all other calls: those with a new signature, a
// tensor subclass, a mode, a transform or a forced variant. fusednorm/host/native.py is the Python side.
//
// A call enters here, above autograd. The way down: node.h (autograd's nodes), below.h (the ops below autograd), call.h
// (a call's signature), launch.h (repeats a recipe), cache.h (finds it), recipe.h (its structs) and driver.h (CUDA's
// driver).

#include "node.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>
#include <torch/version.h>

namespace fusednorm {
namespace {

// -------------------------------------------------------------------------------- the ops above autograd

template <typename... Arguments>
std::vector<Tensor> run_above_in_python(Op op, const Arguments&... arguments) {
  py::gil_scoped_acquire gil;
  return to_tensors(call_python(python->above[op], arguments...));
}

Triple layer_norm_fwd_above(
    const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight_, const optional<Tensor>& bias_, double eps) {
  const Tensor &weight = or_undefined(weight_), &bias = or_undefined(bias_);
  if (!may_run_here({x, weight, bias}) || needs_formula({x, weight, bias}))
    return as_triple(run_above_in_python(LAYER_FWD, x, shape, weight, bias, eps));
  if (is_recorded({x, weight, bias})) {
    auto ints = as_ints(shape);
    return as_triple(NormFunction::apply(
        LAYER_FWD, x, std::vector<int64_t>(ints.begin(), ints.end()), weight_, bias_, optional<double>(eps)));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return layer_norm_fwd(x, shape, weight_, bias_, eps);
}

Pair rms_norm_fwd_above(
    const Tensor& x, SymIntArrayRef shape, const optional<Tensor>& weight_, optional<double> eps) {
  const Tensor& weight = or_undefined(weight_);
  if (!may_run_here({x, weight}) || needs_formula({x, weight}))
    return as_pair(run_above_in_python(RMS_FWD, x, shape, weight, eps));
  if (is_recorded({x, weight})) {
    auto ints = as_ints(shape);
    return as_pair(NormFunction::apply(
        RMS_FWD, x, std::vector<int64_t>(ints.begin(), ints.end()), weight_, optional<Tensor>(), eps));
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return rms_norm_fwd(x, shape, weight_, eps);
}

Triple layer_norm_bwd_above(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const optional<Tensor>& weight_, const optional<Tensor>& bias_, c10::List<bool> mask) {
  const Tensor &weight = or_undefined(weight_), &bias = or_undefined(bias_);
  auto wanted = checked_mask<3>("layer_norm_bwd", mask);
  if (!may_run_here({grad_out, x, mean, rstd, weight, bias}) || needs_formula({grad_out, x, mean, rstd, weight}) ||
      is_recorded({grad_out, x, mean, rstd, weight}))
    return as_triple(run_above_in_python(LAYER_BWD, grad_out, x, shape, mean, rstd, weight, bias, wanted));
  at::AutoDispatchBelowADInplaceOrView below;
  return layer_norm_bwd(grad_out, x, shape, mean, rstd, weight_, bias_, mask);
}

Pair rms_norm_bwd_above(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& rstd, const optional<Tensor>& weight_,
    c10::List<bool> mask) {
  const Tensor& weight = or_undefined(weight_);
  auto wanted = checked_mask<2>("rms_norm_bwd", mask);
  if (!may_run_here({grad_out, x, rstd, weight}) || needs_formula({grad_out, x, rstd, weight}) ||
      is_recorded({grad_out, x, rstd, weight}))
    return as_pair(run_above_in_python(RMS_BWD, grad_out, x, shape, rstd, weight, wanted));
  at::AutoDispatchBelowADInplaceOrView below;
  return rms_norm_bwd(grad_out, x, shape, rstd, weight_, mask);
}

// -------------------------------------------------------------------------------- y alone, for modules

// y of a forward, without the dispatcher, and without statistics that no backward will read. The arguments are
// (x, normalized_shape, weight, bias, eps), without bias for RMSNorm. Returns NotImplemented for calls that Python must
// run.
PyObject* y_of(Op op, PyObject* const* arguments, Py_ssize_t count) {
  bool layer = op == LAYER_FWD;
  auto decline = [] { Py_RETURN_NOTIMPLEMENTED; };
  if (count != (layer ? 5 : 4) || !python || at::impl::torch_function_mode_enabled() ||
      at::autocast::is_autocast_enabled(at::kCUDA) || c10::InferenceMode::is_enabled())
    return decline();
  auto tensor = [](PyObject* object, optional<Tensor>& into) {
    if (object == Py_None) return true;
    if (!THPVariable_CheckTypeExact(Py_TYPE(object))) return false;
    into = THPVariable_Unpack(object);
    return true;
  };
  optional<Tensor> x_, weight_, bias_;
  if (!tensor(arguments[0], x_) || !x_ || !tensor(arguments[2], weight_) || (layer && !tensor(arguments[3], bias_)))
    return decline();
  const Tensor &x = *x_, &weight = or_undefined(weight_), &bias = or_undefined(bias_);
  if (!PyTuple_Check(arguments[1])) return decline();
  std::vector<int64_t> shape(PyTuple_GET_SIZE(arguments[1]));
  for (size_t i = 0; i < shape.size(); ++i) {
    PyObject* size = PyTuple_GET_ITEM(arguments[1], i);
    if (!PyLong_CheckExact(size)) return decline();
    int overflow = 0;
    shape[i] = PyLong_AsLongLongAndOverflow(size, &overflow);
    if (overflow) return decline();
  }
  optional<double> eps;
  if (PyObject* number = arguments[count - 1]; number != Py_None) {
    if (!PyFloat_CheckExact(number)) return decline();
    eps = PyFloat_AS_DOUBLE(number);
  } else if (layer) {
    return decline();  // only RMSNorm has a default for eps None
  }
  if (!may_run_here({x, weight, bias}) || needs_formula({x, weight, bias})) return decline();
  Tensor y;
  {
    py::gil_scoped_release released;
    at::RecordFunction record(at::RecordScope::FUNCTION);
    show_to_profiler(record, layer ? "fusednorm::layer_norm_fwd" : "fusednorm::rms_norm_fwd", {x, weight, bias});
    if (is_recorded({x, weight, bias})) {
      y = record_y(op, x, shape, weight, bias, eps);
    } else {
      at::AutoDispatchBelowADInplaceOrView below;
      y = run_forward(op, x, c10::fromIntArrayRefUnchecked(shape), weight, bias, eps, /*wants_statistics=*/false)[0];
    }
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

void install(const std::string& key, const std::vector<py::object>& above, const std::vector<py::object>& below,
             py::object statistics_gradient, py::object differentiable_backward, size_t kept) {
  most_recipes = kept;
  python = new Python{{}, {}, std::move(statistics_gradient), std::move(differentiable_backward)};
  for (size_t op = 0; op < OPS; ++op) {
    python->above[op] = above.at(op);
    python->below[op] = below.at(op);
  }
  runs_cpu_tensors |= key == "CPU";
  auto library = [](const std::string& at) -> torch::Library& {
    installed.push_back(std::make_unique<torch::Library>(
        torch::Library::IMPL, "fusednorm", c10::parseDispatchKey(at), __FILE__, __LINE__));
    return *installed.back();
  };
  library(key)
      .impl("layer_norm_fwd", TORCH_FN(layer_norm_fwd))
      .impl("layer_norm_bwd", TORCH_FN(layer_norm_bwd))
      .impl("rms_norm_fwd", TORCH_FN(rms_norm_fwd))
      .impl("rms_norm_bwd", TORCH_FN(rms_norm_bwd));
  library("Autograd" + key)
      .impl("layer_norm_fwd", TORCH_FN(layer_norm_fwd_above))
      .impl("layer_norm_bwd", TORCH_FN(layer_norm_bwd_above))
      .impl("rms_norm_fwd", TORCH_FN(rms_norm_fwd_above))
      .impl("rms_norm_bwd", TORCH_FN(rms_norm_bwd_above));
}

}  // namespace
}  // namespace fusednorm

using namespace fusednorm;

PYBIND11_MODULE(_native, module) {
  module.attr("torch_version") = TORCH_VERSION;
  PyModule_AddFunctions(module.ptr(), functions);
  py::class_<Memory>(module, "Memory")
      .def(py::init([](std::vector<int64_t> shape, std::vector<int64_t> strides, at::ScalarType dtype) {
             return Memory{std::move(shape), std::move(strides), dtype};
           }),
           py::arg("shape"), py::arg("strides"), py::arg("dtype"));
  py::class_<Step>(module, "Step")
      .def(py::init<uint64_t, std::array<unsigned, 3>, unsigned, unsigned, unsigned, bool>(), py::kw_only(),
           py::arg("function"), py::arg("grid"), py::arg("threads"), py::arg("shared_bytes"), py::arg("cluster"),
           py::arg("dependent"))
      .def("add_i32", &Step::add_number<int32_t>)
      .def("add_i64", &Step::add_number<int64_t>)
      .def("add_fp32", &Step::add_number<float>)
      .def("add_fp64", &Step::add_number<double>)
      .def("add_address", &Step::add_address, py::arg("index"), py::arg("offset"))
      .def("add_map", &Step::add_map, py::kw_only(), py::arg("index"), py::arg("type"), py::arg("shape"),
           py::arg("strides"), py::arg("box"));
  py::class_<Recipe, std::shared_ptr<Recipe>>(module, "Recipe")
      .def(py::init<int, std::vector<optional<Memory>>, optional<Memory>, std::vector<Step>>(), py::kw_only(),
           py::arg("device"), py::arg("outputs"), py::arg("workspace"), py::arg("steps"));
  module.def("install", &install);
  module.def("pause", [](int by) { pauses += by; });
  module.def("set_sm_margin", [](int64_t sms) { sm_margin = sms; });
  module.def("watch", [](py::list enter, py::list exit) {
    if (hooks[0] != enter.ptr()) hooks[0] = enter.release().ptr();  // never freed: is_paused reads it without the GIL
    if (hooks[1] != exit.ptr()) hooks[1] = exit.release().ptr();
  });
  module.def("repeats", [] { return repeats.load(); });
  module.def("forget", [] {
    std::unique_lock<std::shared_mutex> writing(mutex);
    recipes.clear();
  });
  module.def("use_driver", [](const std::string& path) { driver_path = path; });
}
