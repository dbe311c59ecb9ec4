// ATen's norm ops by ours, while enable_eager() is in force (fusednorm/integrations/aten.py). Calls that are not prepared
// go to Python, which may leave them to ATen's own kernels.

#pragma once

#include "below.h"

#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

namespace fusednorm {

inline Functions& in_place_of_aten = *new Functions;  // Python's, by Op, while an Overrides is in force; never destroyed

inline Outputs forward_of_aten(ForwardOperands given) {
  given.below = &in_place_of_aten;
  return forward_below(given);
}

inline Outputs backward_of_aten(BackwardOperands given) {
  given.below = &in_place_of_aten;
  return backward_below(given);
}

inline Triple native_layer_norm_backward(
    const Tensor& grad_out, const Tensor& x, SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd,
    const optional<Tensor>& weight, const optional<Tensor>& bias, std::array<bool, 3> mask) {
  return as_triple(backward_of_aten(
      {LAYER_BWD, grad_out, x, shape, mean, rstd, or_undefined(weight), or_undefined(bias), mask}));
}

// The sizes of these two ops are integers, but of any value: a traced graph may pass the bits of symbolic ones. As a
// SymInt such a value has memory of its own, which sends the call to Python.
using Sizes = c10::SmallVector<c10::SymInt, 4>;

inline Pair fused_rms_norm(
    const Tensor& x, IntArrayRef shape, const optional<Tensor>& weight, optional<double> eps) {
  return rms_norm_fwd<forward_of_aten>(x, Sizes(shape.begin(), shape.end()), weight, eps);
}

inline Pair fused_rms_norm_backward(
    const Tensor& grad_out, const Tensor& x, IntArrayRef shape, const Tensor& rstd, const optional<Tensor>& weight,
    std::array<bool, 2> mask) {
  Sizes sizes(shape.begin(), shape.end());
  return first_two(backward_of_aten({RMS_BWD, grad_out, x, sizes, undefined(), rstd, or_undefined(weight), undefined(),
                                     {mask[0], mask[1], false}}));
}

// In place of ATen's kernels at a dispatch key, from construction until `remove`. At most one is in force at a time.
class Overrides {
 public:
  // `functions`: Python's, by Op.
  Overrides(const std::string& key, const std::vector<py::object>& functions) {
    TORCH_CHECK(!in_place_of_aten[0], "fusednorm: ATen's norms must be replaced once at a time, got ", key, " as well");
    torch::PyWarningHandler to_python;  // the dispatcher warns of kernels that are overridden
    try {
      for (size_t op = 0; op < functions.size(); ++op) in_place_of_aten.at(op) = functions[op];
      library = std::make_unique<torch::Library>(
          torch::Library::IMPL, "aten", c10::parseDispatchKey(key), __FILE__, __LINE__);
      library->impl("native_layer_norm", TORCH_FN(layer_norm_fwd<forward_of_aten>))
          .impl("native_layer_norm_backward", TORCH_FN(native_layer_norm_backward))
          .impl("_fused_rms_norm", TORCH_FN(fused_rms_norm))
          .impl("_fused_rms_norm_backward", TORCH_FN(fused_rms_norm_backward));
    } catch (...) {
      in_place_of_aten.fill({});
      throw;
    }
  }

  ~Overrides() { remove(); }

  void remove() {
    if (!library) return;
    library.reset();
    in_place_of_aten.fill({});
  }

 private:
  std::unique_ptr<torch::Library> library;
};

}  // namespace fusednorm
