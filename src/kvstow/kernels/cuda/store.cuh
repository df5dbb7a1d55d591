// The new token of a row, encoded into the planes by the warp of a block that reads it there.
//
// Its block would wait for a launch of `encode` otherwise. Where several blocks read a token, because a KV head has
// more query rows than one of them takes, each writes it for itself: the same bytes.
#pragma once
#include "decode_shape.cuh"
#include "encode_keys.cuh"
#include "encode_values.cuh"
namespace kvstow {

// All lanes of a warp call it, and see what was written. Those of the lower half encode groups of the key.
template <class S, Dtype T>
KVSTOW_INLINE void store_token(const DecodeArgs& args, int b, int head, int token) {
  EncodeArgs to;
  to.keys = args.new_keys, to.values = args.new_values;
  to.key_codes = (u8*)args.key_codes, to.key_scales = (u16*)args.key_scales, to.key_zeros = (u16*)args.key_zeros;
  to.value_codes = (u8*)args.value_codes, to.value_scales = (u16*)args.value_scales;
  to.signs = args.signs, to.boundaries = args.boundaries;
  to.n_kv_heads = args.n_kv_heads, to.n_tokens = 1, to.capacity = args.capacity, to.position = token;
  to.token_step = to.head_step = S::D, to.batch_step = (u64)args.n_kv_heads * S::D;
  const u32 vector = b * args.n_kv_heads + head;
  const int lane = threadIdx.x & 31, group = lane & 15;
  constexpr u32 UPPER = ((1u << S::GROUPS) - 1) << 16;
  if (group < S::GROUPS) {
    if (lane < 16) encode_key_group<S::D, S::KEY_BITS, T, true, false, false>(to, vector, group);
    else encode_value_group<S::D, S::VALUE_BITS, T, true, false, UPPER>(to, to.boundaries, vector, group);
  }
  __syncwarp();
}

}  // namespace kvstow
