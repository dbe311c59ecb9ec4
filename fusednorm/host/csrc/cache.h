// The programs, by the kinds of calls that they serve.

#pragma once

#include "program.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

namespace fusednorm {

using Key = c10::SmallVector<int64_t, 24>;
using Kind = std::vector<std::shared_ptr<const Program>>;  // of one key, for different row counts

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0xcbf29ce484222325;
    for (int64_t each : key) hash = (hash ^ static_cast<uint64_t>(each)) * 0x9E3779B97F4A7C15 + (hash >> 29);
    return hash;
  }
};

// Threads look up a key of their own first: what they looked up last for the same op.
class Cache {
 public:
  size_t most_kinds = 0;  // `start` sets it to the limit of prepared.py

  std::shared_ptr<const Program> find(size_t op, const Key& key, int64_t rows) {
    static thread_local std::vector<Last> lasts;
    if (C10_UNLIKELY(op >= lasts.size())) lasts.resize(op + 1);
    Last& last = lasts[op];
    if (C10_UNLIKELY(last.version != version.load(std::memory_order_acquire) || last.key != key)) {
      std::shared_lock<std::shared_mutex> reading(mutex);
      auto found = kinds.find(key);
      if (found == kinds.end()) return {};
      last = {version.load(std::memory_order_relaxed), key, found->second};
    }
    for (const auto& each : last.kind)
      if (each->rows_above < rows && rows <= each->most_rows) return each;
    return {};
  }

  void add(const Key& key, std::shared_ptr<const Program> program) {
    std::unique_lock<std::shared_mutex> writing(mutex);
    if (kinds.size() >= most_kinds && !kinds.count(key)) kinds.clear();
    Kind& kind = kinds[key];
    for (const auto& each : kind)
      if (each->rows_above == program->rows_above) return;  // another thread was first
    kind.push_back(std::move(program));
    version.fetch_add(1, std::memory_order_release);
  }

  // Keeps that such calls are made as two.
  void add_in_two(const Key& key) {
    std::unique_lock<std::shared_mutex> writing(mutex);
    if (in_two.size() >= most_kinds) in_two.clear();
    in_two.insert(key);
  }

  bool are_in_two(const Key& key) {
    std::shared_lock<std::shared_mutex> reading(mutex);
    return in_two.count(key);
  }

  void forget() {
    std::unique_lock<std::shared_mutex> writing(mutex);
    kinds.clear();
    in_two.clear();
    version.fetch_add(1, std::memory_order_release);
  }

 private:
  struct Last {
    uint64_t version = 0;
    Key key;
    Kind kind;
  };

  std::atomic<uint64_t> version{1};  // of `kinds`
  std::shared_mutex mutex;           // guards both of these
  std::unordered_map<Key, Kind, Hash> kinds;
  std::unordered_set<Key, Hash> in_two;
};

inline Cache& cache = *new Cache;  // never destroyed: threads may still call when the process ends

}  // namespace fusednorm
