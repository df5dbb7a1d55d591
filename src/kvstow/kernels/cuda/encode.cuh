// Keys and values of new tokens, encoded straight into the planes by one launch.
#pragma once
#include "encode_keys.cuh"
#include "encode_values.cuh"
namespace kvstow {

constexpr int ENCODE_THREADS = 128;

// Grid 2 * ceil(n_vectors / (128 / groups)), one lane per group: the first half encodes keys, the other one values.
// `table` holds 2^VALUE_BITS floats in shared memory.
template <int D, int KEY_BITS, int VALUE_BITS, Dtype T, bool GUARD, bool SEARCH>
KVSTOW_INLINE void encode(const EncodeArgs& args, float* table) {
  constexpr int GROUPS = D / 32, N_EDGES = (1 << VALUE_BITS) - 1;
  const u32 half = gridDim.x / 2;
  const bool is_key = blockIdx.x < half;
  const u32 block = is_key ? blockIdx.x : blockIdx.x - half;
  const u32 last = args.n_vectors - 1;  // lanes beyond it write the same bytes once more, so that whole warps exchange
  const u32 vector = min(block * (ENCODE_THREADS / GROUPS) + threadIdx.x / GROUPS, last);
  const int group = threadIdx.x % GROUPS;
  if (is_key) {
    encode_key_group<D, KEY_BITS, T, GUARD, SEARCH, true>(args, vector, group);
    return;
  }
  if (VALUE_BITS > 3) {  // looked up by a number that differs from lane to lane
    KVSTOW_ROLLED
    for (int i = threadIdx.x; i < N_EDGES; i += ENCODE_THREADS) table[i] = args.boundaries[i];
    __syncthreads();
  }
  const float* edges = VALUE_BITS > 3 ? table : args.boundaries;
  encode_value_group<D, VALUE_BITS, T, GUARD, SEARCH, WHOLE_WARP>(args, edges, vector, group);
}

}  // namespace kvstow
