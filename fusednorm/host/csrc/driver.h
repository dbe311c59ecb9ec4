// The functions of CUDA's driver that a launch needs.

#pragma once

#include <c10/util/Exception.h>
#include <cuda.h>
#include <dlfcn.h>

#include <string>

namespace fusednorm {

// Numbers in messages: streams of numbers crash where the compiler links its C++ library into the extension.
inline std::string text(size_t number) { return std::to_string(number); }

// Opened at the first launch, because a process that launches nothing needs no libcuda.
struct Driver {
  decltype(&cuLaunchKernelEx) launch;
  decltype(&cuTensorMapEncodeTiled) encode;
  decltype(&cuGetErrorString) error_string;
  decltype(&cuCtxGetCurrent) current_context;
  decltype(&cuDevicePrimaryCtxRetain) retain_context;
  decltype(&cuCtxSetCurrent) set_context;

  explicit Driver(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library, "fusednorm: ", path, " must be there to launch kernels, got: ", dlerror());
    find(library, launch, "cuLaunchKernelEx");
    find(library, encode, "cuTensorMapEncodeTiled");
    find(library, error_string, "cuGetErrorString");
    find(library, current_context, "cuCtxGetCurrent");
    find(library, retain_context, "cuDevicePrimaryCtxRetain");
    find(library, set_context, "cuCtxSetCurrent");
  }

  template <typename Function>
  static void find(void* library, Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    TORCH_CHECK(function, "fusednorm: CUDA's driver must have ", name, ", which the installed one has not");
  }

  void check(CUresult result) const {
    if (C10_LIKELY(result == CUDA_SUCCESS)) return;
    const char* text = nullptr;
    error_string(result, &text);
    TORCH_CHECK(false, "fusednorm: CUDA's driver says: ", text ? text : "unknown error");
  }

  // Autograd's threads have no context until they call CUDA's runtime.
  void ensure_context(int device) const {
    CUcontext context = nullptr;
    check(current_context(&context));
    if (C10_UNLIKELY(!context)) {
      check(retain_context(&context, device < 0 ? 0 : device));
      check(set_context(context));
    }
  }
};

inline std::string driver_path = "libcuda.so.1";

inline const Driver& driver() {
  static const Driver opened(driver_path);
  return opened;
}

}  // namespace fusednorm
