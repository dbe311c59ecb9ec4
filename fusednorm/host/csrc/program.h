// A program: what a call launches, as a function of its row count and its tensors' addresses. Python builds it
// (fusednorm/host/program.py), and native.py copies it into these records.

#pragma once

#include "driver.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

namespace fusednorm {

using at::IntArrayRef;
using at::Tensor;
using std::optional;

constexpr size_t MAX_PARAMETER_BYTES = 4096;  // what every release of CUDA takes
constexpr size_t MAX_PARAMETERS = 96;
constexpr size_t MAP_ALIGNMENT = 64;
constexpr size_t MOST_ADDRESSES = 64;  // of a call's tensors, its outputs and the parts of its workspace
constexpr size_t MOST_PARTS = 17;      // of the workspace

using Outputs = c10::SmallVector<Tensor, 4>;  // of a program; undefined for an unwanted one
using Shape = c10::SmallVector<int64_t, 6>;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The names of the enums, which Python knows, too. Roles up to SHAPE are those of tensors. A STRIDED one may have any
// shape and strides, which are in the key of a call; a CONSTANT is one without a gradient.
#define ROLES(name)                                                                                             \
  name(PARAMETER) name(ROWS) name(STATISTIC) name(PACKED_ROWS) name(MODULATION) name(COLUMNS) name(STRIDED)     \
  name(CONSTANT) name(INDEX) name(TABLE) name(SHAPE) name(NUMBER) name(DTYPE) name(MASK) name(FLAG) name(NAME)  \
  name(GROUPS) name(INTEGER)
#define NUMBERS(name) name(ROWS) name(CTAS) name(PARTIALS) name(SAMPLES)  // that differ from call to call
#define ENUMERATOR(name) name,
enum class Role { ROLES(ENUMERATOR) };
enum class Number { NUMBERS(ENUMERATOR) };
using Numbers = std::array<int64_t, 4>;  // by Number

// The rule of planner/plan.py: Grid.
constexpr int64_t MOST_CTAS = (1 << 16) - 1;

struct Grid {
  int64_t rows_per_tile, at_once, first_wave, rows_of_cta, tiles_of_cta, tiles_of_sum, least_short_lived,
      partials_of_cta, sample_rows, more_ctas;

  int64_t samples(int64_t rows) const { return sample_rows ? rows / sample_rows : 1; }

  // Of each of the samples.
  int64_t ctas(int64_t rows, int64_t samples) const {
    rows /= samples;
    int64_t first_wave = std::max<int64_t>(1, this->first_wave / samples);
    int64_t tiles = ceil_div(rows, rows_per_tile), limit = std::max<int64_t>(1, at_once / samples);
    if (tiles_of_cta) {
      int64_t short_lived = tiles / tiles_of_cta;
      limit = std::min(tiles, short_lived >= least_short_lived ? short_lived : limit);
      return ceil_div(tiles, ceil_div(tiles, limit));
    }
    if (rows_of_cta) limit = std::max(first_wave, std::min(limit, rows / rows_of_cta / first_wave * first_wave));
    if (tiles_of_sum) {
      int64_t turns = ceil_div(tiles, limit * tiles_of_sum);
      if (turns > 2) limit *= std::max<int64_t>(1, std::min(turns, MOST_CTAS / limit));
    }
    return std::min(tiles, limit) + more_ctas;
  }

  Numbers numbers(int64_t rows) const {
    int64_t count = samples(rows), of_sample = ctas(rows, count);
    return {rows, of_sample, count * of_sample * partials_of_cta, count};
  }
};

// The rule of program.py: Workspace. A part has so many elements for each row, for each row of partials, beside, and
// for each block.
using Part = std::array<int64_t, 4>;
struct Workspace {
  at::ScalarType dtype;
  std::vector<Part> parts;

  c10::SmallVector<int64_t, MOST_PARTS> sizes(const Numbers& numbers, int64_t blocks) const {
    c10::SmallVector<int64_t, MOST_PARTS> sizes;
    for (const auto& [per_row, per_partial, beside, per_block] : parts) {
      int64_t partials = numbers[static_cast<size_t>(Number::PARTIALS)];
      sizes.push_back(ceil_div(numbers[0] * per_row + partials * per_partial + beside + blocks * per_block, 4) * 4);
    }
    return sizes;
  }
};

// The rule of program.py: Blocks.
struct Blocks {
  int64_t rows;                // of a block; the last may have fewer
  size_t once;                 // how many of the last steps come once, behind all blocks
  std::vector<int64_t> bytes;  // by address: from what a block has to what the next one has
};

struct Output {
  Role role;
  at::ScalarType dtype;
  size_t dims;    // of a modulation: its batch dims
  int64_t whole;  // and, as bits, which of them are x's, and not 1
  std::vector<int64_t> shape;  // of a STRIDED one
  int64_t width;               // of COLUMNS
};

// One launch. Python builds it: the configuration first, then the parameters in the kernel's order. Addresses are counted
// in this order: the call's tensors, its outputs, the parts of its workspace.
struct Step {
  // `at` is a byte offset in `parameters`; `index` says which address goes there, `offset` bytes on.
  struct Address {
    size_t at, index, offset;
  };
  struct Variable {
    size_t at, bytes;
    Number number;
  };
  struct Map {  // a tensor map, encoded anew for each call
    size_t at, index;
    CUtensorMapDataType type;
    uint32_t rank, rows_dim;
    std::array<cuuint64_t, 5> sizes, strides;  // innermost first; strides in bytes, from the second on
    std::array<cuuint32_t, 5> box;
  };

  CUfunction function;
  CUlaunchConfig config{};
  unsigned cluster;
  std::array<optional<Number>, 2> grid;  // what the first two sides of the grid are, if they are not constant
  std::array<CUlaunchAttribute, 3> attributes{};
  std::vector<char> parameters;  // complete but for what follows
  std::vector<size_t> starts;    // byte offset of each parameter
  std::vector<Address> addresses;
  std::vector<Variable> variables;
  std::vector<Map> maps;

  Step(uint64_t function, std::array<unsigned, 3> sides, std::array<optional<Number>, 2> grid, unsigned threads,
       unsigned shared_bytes, unsigned cluster, bool dependent)
      : function(reinterpret_cast<CUfunction>(function)), cluster(cluster), grid(grid) {
    config.gridDimX = sides[0] * cluster;
    config.gridDimY = sides[1];
    config.gridDimZ = sides[2];
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

  template <typename Type>
  void add_constant(Type constant) {
    size_t at = reserve(sizeof constant, sizeof constant);
    std::memcpy(parameters.data() + at, &constant, sizeof constant);
  }

  void add_variable(Number number, size_t bytes) { variables.push_back({reserve(bytes, bytes), bytes, number}); }

  void add_address(size_t index, size_t offset) {
    addresses.push_back({reserve(sizeof(uint64_t), sizeof(uint64_t)), index, offset});
  }

  void add_map(size_t index, int type, uint32_t rows_dim, const std::vector<uint64_t>& sizes,
               const std::vector<uint64_t>& strides, const std::vector<uint32_t>& box) {
    Map map{reserve(sizeof(CUtensorMap), MAP_ALIGNMENT), index, static_cast<CUtensorMapDataType>(type),
            static_cast<uint32_t>(sizes.size()), rows_dim};
    fill(map.sizes, sizes);
    fill(map.strides, strides);
    fill(map.box, box);
    maps.push_back(map);
  }

  void launch(const Driver& cuda, const uint64_t* given, const Numbers& numbers, CUstream stream) const {
    alignas(MAP_ALIGNMENT) char bytes[MAX_PARAMETER_BYTES];
    void* pointers[MAX_PARAMETERS];
    std::memcpy(bytes, parameters.data(), parameters.size());
    for (size_t i = 0; i < starts.size(); ++i) pointers[i] = bytes + starts[i];
    for (const Address& each : addresses) {
      uint64_t address = given[each.index] + each.offset;
      std::memcpy(bytes + each.at, &address, sizeof address);
    }
    for (const Variable& each : variables)  // the first bytes of a small number are the number: little endian
      std::memcpy(bytes + each.at, &numbers[static_cast<size_t>(each.number)], each.bytes);
    for (const Map& map : maps) {
      static constexpr std::array<cuuint32_t, 5> element_strides{1, 1, 1, 1, 1};
      auto sizes = map.sizes;
      sizes[map.rows_dim] = numbers[0];
      cuda.check(cuda.encode(
          reinterpret_cast<CUtensorMap*>(bytes + map.at), map.type, map.rank, reinterpret_cast<void*>(given[map.index]),
          sizes.data(), map.strides.data(), map.box.data(), element_strides.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
          CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    }
    CUlaunchConfig with = config;
    if (grid[0]) with.gridDimX = cluster * static_cast<unsigned>(numbers[static_cast<size_t>(*grid[0])]);
    if (grid[1]) with.gridDimY = static_cast<unsigned>(numbers[static_cast<size_t>(*grid[1])]);
    with.hStream = stream;
    with.attrs = const_cast<CUlaunchAttribute*>(attributes.data());
    cuda.check(cuda.launch(&with, function, pointers, nullptr));
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
                "fusednorm: a kernel must have at most ", text(MAX_PARAMETERS), " parameters of ",
                text(MAX_PARAMETER_BYTES), " bytes in all, got parameter ", text(starts.size() + 1), " at byte ",
                text(at));
    parameters.resize(at + bytes);
    starts.push_back(at);
    return at;
  }

  template <typename Array, typename Type>
  static void fill(Array& array, const std::vector<Type>& numbers) {
    for (size_t i = 0; i < numbers.size(); ++i) array.at(i) = numbers[i];
  }
};

// What a call binds its program to: the addresses of its tensors, and what x's shape says.
struct Binding {
  std::array<uint64_t, MOST_ADDRESSES> addresses;
  size_t num_tensors;
  IntArrayRef x_shape, normalized_shape;
  int64_t rows = 1, groups = 1;
};

struct Program {
  at::Device device;
  int64_t rows_above, most_rows;  // valid for more rows than the one, and at most the other
  Grid grid;
  std::vector<optional<Output>> outputs;  // nullopt for an unwanted one
  optional<Workspace> workspace;
  std::vector<Step> steps;
  int64_t sm_margin;          // that it was planned under
  int64_t invariance;         // and under what of settings/invariance.py
  optional<Blocks> blocks;
  c10::Allocator* allocator;  // what torch allocates by on this device

  Program(int device, int64_t rows_above, int64_t most_rows, Grid grid, std::vector<optional<Output>> outputs,
          optional<Workspace> workspace, std::vector<Step> steps, int64_t sm_margin, int64_t invariance,
          optional<Blocks> blocks)
      : device(device < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device))),
        rows_above(rows_above), most_rows(most_rows), grid(grid), outputs(std::move(outputs)), workspace(workspace),
        steps(std::move(steps)), sm_margin(sm_margin), invariance(invariance), blocks(std::move(blocks)),
        allocator(at::empty({1}, at::device(this->device)).storage().allocator()) {
    TORCH_CHECK(allocator, "fusednorm: torch must have an allocator for ", this->device, ", got none");
  }

  // Launches, and fills `made` with the outputs.
  void run(Binding& to, Outputs& made) const {
    const Driver& cuda = driver();
    c10::OptionalDeviceGuard guard;
    CUstream stream = reinterpret_cast<CUstream>(1);  // in tests without a GPU
    if (!device.is_cpu()) {
      guard.reset_device(device);
      auto current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
      stream = static_cast<CUstream>(current.native_handle());
    }
    cuda.ensure_context(device.index());
    int64_t count = blocks ? ceil_div(to.rows, blocks->rows) : 1;
    Numbers numbers = numbers_of(0, to.rows);
    uint64_t* next = to.addresses.data() + to.num_tensors;
    for (const auto& output : outputs) {
      const Tensor& each = made.emplace_back(output ? allocate(*output, to) : Tensor());
      *next++ = output ? reinterpret_cast<uint64_t>(each.unsafeGetTensorImpl()->data()) : 0;
    }
    Tensor parts;
    if (workspace) {
      auto sizes = workspace->sizes(numbers, count);
      if (count > 1) {
        auto of_last = workspace->sizes(numbers_of(count - 1, to.rows), count);
        for (size_t i = 0; i < sizes.size(); ++i) sizes[i] = std::max(sizes[i], of_last[i]);
      }
      parts = allocate({std::accumulate(sizes.begin(), sizes.end(), int64_t(0))}, workspace->dtype);
      uint64_t address = reinterpret_cast<uint64_t>(parts.unsafeGetTensorImpl()->data());
      for (int64_t size : sizes) {
        *next++ = address;
        address += size * c10::elementSize(workspace->dtype);
      }
    }
    if (!blocks) {
      for (const Step& step : steps) step.launch(cuda, to.addresses.data(), numbers, stream);
      return;
    }
    auto once = steps.end() - blocks->once;
    for (int64_t block = 0; block < count; ++block) {
      auto addresses = to.addresses;
      for (size_t i = 0; i < blocks->bytes.size(); ++i) addresses[i] += block * blocks->bytes[i];
      numbers = numbers_of(block, to.rows);
      for (auto step = steps.begin(); step != once; ++step) step->launch(cuda, addresses.data(), numbers, stream);
    }
    for (auto step = once; step != steps.end(); ++step)
      step->launch(cuda, to.addresses.data(), {to.rows, 0, count, 0}, stream);
  }

 private:
  Numbers numbers_of(int64_t block, int64_t rows) const {
    return grid.numbers(blocks ? std::min(blocks->rows, rows - block * blocks->rows) : rows);
  }

  Tensor allocate(const Output& output, const Binding& to) const {
    if (output.role == Role::STRIDED) return allocate(output.shape, output.dtype);
    if (output.role == Role::ROWS) return allocate(to.x_shape, output.dtype);
    if (output.role == Role::PARAMETER) return allocate(to.normalized_shape, output.dtype);
    Shape shape(to.x_shape.begin(), to.x_shape.end());
    if (output.role == Role::COLUMNS) {
      shape.back() = output.width;
    } else if (output.role == Role::MODULATION) {
      shape.resize(output.dims);
      for (size_t i = 0; i < shape.size(); ++i)
        if (!(output.whole >> i & 1)) shape[i] = 1;
      shape.append(to.normalized_shape.begin(), to.normalized_shape.end());
    } else {
      std::fill(shape.end() - to.normalized_shape.size(), shape.end(), 1);
      shape.back() = to.groups;
    }
    return allocate(shape, output.dtype);
  }

  // As torch.empty, without the dispatcher. torch does the same below it.
  Tensor allocate(IntArrayRef shape, at::ScalarType dtype) const {
    c10::DispatchKeySet key(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
    return Tensor(at::detail::empty_generic(shape, allocator, key, dtype, std::nullopt));
  }
};

}  // namespace fusednorm
