// The recipes, by the signatures of their calls.

#pragma once

#include "recipe.h"

#include <c10/util/SmallVector.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace fusednorm {

using Key = c10::SmallVector<int64_t, 96>;

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0xcbf29ce484222325;
    for (int64_t each : key) hash = (hash ^ static_cast<uint64_t>(each)) * 0x9E3779B97F4A7C15 + (hash >> 29);
    return hash;
  }
};

inline std::shared_mutex mutex;  // guards `recipes`
inline std::unordered_map<Key, std::shared_ptr<const Recipe>, Hash> recipes;
inline size_t most_recipes = 0;  // `install` sets it to the limit of recipe.py

}  // namespace fusednorm
