// A recipe: what an earlier call allocated and launched, with slots for the addresses of a later call. Python makes the
// recipe (fusednorm/host/recipe.py) and copies it field by field into these structs (fusednorm/host/native.py).

#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <cuda.h>

#include <array>
#include <cstring>
#include <optional>
#include <vector>

namespace fusednorm {

using std::optional;

constexpr size_t MAX_PARAMETER_BYTES = 1024;
constexpr size_t MAX_PARAMETERS = 64;
constexpr size_t MAP_ALIGNMENT = 64;

// An output or the workspace of a call.
struct Memory {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

// A pointer among a kernel's parameters. `index` counts the call's tensors, then its outputs, then its workspace.
struct Slot {
  size_t at, index;  // byte offset in Step::parameters; which address goes there
  int64_t offset;    // bytes to add to the address
};

// A tensor map among a kernel's parameters, encoded anew for each call. at and index are those of Slot.
struct Map {
  size_t at, index;
  CUtensorMapDataType type;
  uint32_t rank;
  std::array<cuuint64_t, 5> sizes, strides;  // innermost first; strides in bytes, from the second on
  std::array<cuuint32_t, 5> box;
};

// One launch. Python builds it: the configuration first, then the parameters in the kernel's order.
struct Step {
  CUfunction function;
  CUlaunchConfig config{};
  std::array<CUlaunchAttribute, 3> attributes{};
  std::vector<char> parameters;  // complete but for slots and maps
  std::vector<size_t> starts;    // byte offset of each parameter
  std::vector<Slot> slots;
  std::vector<Map> maps;

  Step(uint64_t function, std::array<unsigned, 3> grid, unsigned threads, unsigned shared_bytes, unsigned cluster,
       bool dependent)
      : function(reinterpret_cast<CUfunction>(function)) {
    config.gridDimX = grid[0] * cluster;
    config.gridDimY = grid[1];
    config.gridDimZ = grid[2];
    config.blockDimX = threads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared_bytes;
    if (cluster > 1) {
      CUlaunchAttribute& size = add_attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
      size.value.clusterDim.x = cluster;
      size.value.clusterDim.y = size.value.clusterDim.z = 1;
      CUlaunchAttribute& policy = add_attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);
      policy.value.clusterSchedulingPolicyPreference = CU_CLUSTER_SCHEDULING_POLICY_SPREAD;
    }
    if (dependent) {  // may be placed on the GPU while the launch before it ends
      CUlaunchAttribute& overlap = add_attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
      overlap.value.programmaticStreamSerializationAllowed = 1;
    }
  }

  template <typename Number>
  void add_number(Number number) {
    size_t at = reserve(sizeof number, sizeof number);
    std::memcpy(parameters.data() + at, &number, sizeof number);
  }

  void add_address(size_t index, int64_t offset) {
    slots.push_back({reserve(sizeof(uint64_t), sizeof(uint64_t)), index, offset});
  }

  void add_map(size_t index, int type, const std::vector<uint64_t>& sizes, const std::vector<uint64_t>& strides,
               const std::vector<uint32_t>& box) {
    Map map{reserve(sizeof(CUtensorMap), MAP_ALIGNMENT), index, static_cast<CUtensorMapDataType>(type),
            static_cast<uint32_t>(sizes.size())};
    fill(map.sizes, sizes);
    fill(map.strides, strides);
    fill(map.box, box);
    maps.push_back(map);
  }

 private:
  CUlaunchAttribute& add_attribute(CUlaunchAttributeID id) {
    CUlaunchAttribute& attribute = attributes.at(config.numAttrs++);
    attribute.id = id;
    return attribute;
  }

  // Makes room for the next parameter and returns its byte offset.
  size_t reserve(size_t bytes, size_t alignment) {
    size_t at = (parameters.size() + alignment - 1) / alignment * alignment;
    TORCH_CHECK(at + bytes <= MAX_PARAMETER_BYTES && starts.size() < MAX_PARAMETERS,
                "fusednorm: a kernel must have at most ", MAX_PARAMETERS, " parameters of ", MAX_PARAMETER_BYTES,
                " bytes in all, got parameter ", starts.size() + 1, " at byte ", at);
    parameters.resize(at + bytes);
    starts.push_back(at);
    return at;
  }

  template <typename Array, typename Number>
  static void fill(Array& array, const std::vector<Number>& numbers) {
    for (size_t i = 0; i < numbers.size(); ++i) array.at(i) = numbers[i];
  }
};

struct Recipe {
  at::Device device;
  std::vector<optional<Memory>> outputs;  // nullopt for an unwanted output
  optional<Memory> workspace;
  std::vector<Step> steps;

  Recipe(int device, std::vector<optional<Memory>> outputs, optional<Memory> workspace, std::vector<Step> steps)
      : device(device < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device))),
        outputs(std::move(outputs)), workspace(std::move(workspace)), steps(std::move(steps)) {}
};

}  // namespace fusednorm
