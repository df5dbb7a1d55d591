// Keys and values of new tokens, encoded straight into the planes by one launch.
#pragma once
#include "encode_keys.cuh"
#include "encode_values.cuh"
namespace kvstow {

constexpr int ENCODE_THREADS = 128;

// Calls use(loaded, place) for the vectors of this thread's place in a block and of every so many blocks. What
// comes next is asked for before: while a group is encoded, the next one is on its way.
template <int D, Dtype T, class Use>
KVSTOW_INLINE void each_vector(const EncodeArgs& args, const void* from, int group, Use use) {
  constexpr int GROUPS = D / 32, VECTORS = ENCODE_THREADS / GROUPS;
  const u32 n_blocks = gridDim.x / 2, step = n_blocks * VECTORS;
  u32 vector = blockIdx.x % n_blocks * VECTORS + threadIdx.x / GROUPS;
  if (vector >= args.n_vectors) return;
  Place next(args, vector, group);
  LoadedGroup<T> ahead;
  ahead.load(from, next.from);
  KVSTOW_ROLLED
  for (; vector < args.n_vectors; vector += step) {
    const LoadedGroup<T> loaded = ahead;
    const Place place = next;
    if (step < args.n_vectors - vector) {
      next = Place(args, vector + step, group);
      ahead.load(from, next.from);
    }
    use(loaded, place);
  }
}

// A grid of any even number of blocks, one lane per group: the first half encodes keys, the other one values.
// `table` holds 2^VALUE_BITS floats in shared memory.
template <int D, int KEY_BITS, int VALUE_BITS, Dtype T, bool GUARD, bool SEARCH>
KVSTOW_INLINE void encode(const EncodeArgs& args, float* table) {
  constexpr int N_EDGES = (1 << VALUE_BITS) - 1;
  const int group = threadIdx.x % (D / 32);
  if (blockIdx.x < gridDim.x / 2) {
    each_vector<D, T>(args, args.keys, group, [&](const LoadedGroup<T>& loaded, const Place& place) {
      encode_key_group<D, KEY_BITS, T, GUARD, SEARCH>(args, loaded, place, group);
    });
    return;
  }
  if (VALUE_BITS > 3) {  // looked up by a number that differs from lane to lane
    KVSTOW_ROLLED
    for (int i = threadIdx.x; i < N_EDGES; i += ENCODE_THREADS) table[i] = args.boundaries[i];
    __syncthreads();
  }
  const float* edges = VALUE_BITS > 3 ? table : args.boundaries;
  each_vector<D, T>(args, args.values, group, [&](const LoadedGroup<T>& loaded, const Place& place) {
    encode_value_group<D, VALUE_BITS, T, GUARD, SEARCH>(args, loaded, place, group, edges);
  });
}

}  // namespace kvstow
