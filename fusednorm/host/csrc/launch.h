// Repeats a recipe with the addresses of a call: allocates its outputs and launches its kernels.

#pragma once

#include "cache.h"
#include "driver.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>

namespace fusednorm {

using at::Tensor;

inline std::atomic<int64_t> repeats{0};  // the number of calls that ran without Python

inline uint64_t stream_of(at::Device device) {
  if (device.is_cpu()) return 1;  // in tests without a GPU
  return reinterpret_cast<uint64_t>(c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
}

inline Tensor allocate(const optional<Memory>& memory, at::Device device) {
  if (!memory) return {};
  return at::_ops::empty_strided::redispatch(
      c10::DispatchKeySet(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA),
      c10::fromIntArrayRefUnchecked(memory->sizes),
      c10::fromIntArrayRefUnchecked(memory->strides), memory->dtype, c10::kStrided, device, false);
}

// The outputs of the call whose tensors are at `addresses`, or nullopt if no call with this key has a recipe. Appends
// the addresses of outputs and workspace to `addresses`, in the order that slots count them.
inline optional<std::vector<Tensor>> repeat(const Key& key, c10::SmallVector<uint64_t, 16>& addresses) {
  std::shared_ptr<const Recipe> recipe;
  {
    std::shared_lock<std::shared_mutex> reading(mutex);
    auto found = recipes.find(key);
    if (found == recipes.end()) return {};
    recipe = found->second;
  }
  uint64_t stream = stream_of(recipe->device);
  const Driver& cuda = driver();
  c10::OptionalDeviceGuard guard;
  if (!recipe->device.is_cpu()) guard.reset_device(recipe->device);
  cuda.ensure_context(recipe->device.index());
  std::vector<Tensor> outputs;
  outputs.reserve(recipe->outputs.size());
  for (const auto& memory : recipe->outputs) {
    outputs.push_back(allocate(memory, recipe->device));
    addresses.push_back(outputs.back().defined() ? reinterpret_cast<uint64_t>(outputs.back().data_ptr()) : 0);
  }
  Tensor workspace = allocate(recipe->workspace, recipe->device);
  addresses.push_back(workspace.defined() ? reinterpret_cast<uint64_t>(workspace.data_ptr()) : 0);
  for (const Step& step : recipe->steps) {
    alignas(MAP_ALIGNMENT) char parameters[MAX_PARAMETER_BYTES];
    void* pointers[MAX_PARAMETERS];
    std::memcpy(parameters, step.parameters.data(), step.parameters.size());
    for (size_t i = 0; i < step.starts.size(); ++i) pointers[i] = parameters + step.starts[i];
    for (const Slot& slot : step.slots) {
      uint64_t address = addresses[slot.index] + slot.offset;
      std::memcpy(parameters + slot.at, &address, sizeof address);
    }
    for (const Map& map : step.maps) {
      static constexpr std::array<cuuint32_t, 5> element_strides{1, 1, 1, 1, 1};
      cuda.check(cuda.encode(
          reinterpret_cast<CUtensorMap*>(parameters + map.at), map.type, map.rank,
          reinterpret_cast<void*>(addresses[map.index]), map.sizes.data(), map.strides.data(), map.box.data(),
          element_strides.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
          CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    }
    CUlaunchConfig config = step.config;
    config.hStream = reinterpret_cast<CUstream>(stream);
    config.attrs = const_cast<CUlaunchAttribute*>(step.attributes.data());
    cuda.check(cuda.launch(&config, step.function, pointers, nullptr));
  }
  repeats.fetch_add(1, std::memory_order_relaxed);
  return outputs;
}

}  // namespace fusednorm
