// Runs Metal kernels on a CPU, and watches every byte that they read and write.
//
// Kernels are compiled so that they call `__tsan_*` before each access. All their buffers lie in one
// arena, with gaps between them, beside a map that says of each byte whether it may be read or written; a
// byte is written once. Memory of a threadgroup must be written before it is read, and what one thread
// writes another one may touch only after a barrier.
#include "../../fibers.h"

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

enum { READ = 1, WRITE = 2 };
constexpr uint32_t NOBODY = 0xFFFFFFFFu, SEVERAL = 0xFFFFFFFEu;

struct Word {  // four bytes of a threadgroup
  uint32_t writer = NOBODY, write_round = 0, reader = NOBODY, read_round = 0;
};

char *arena, *map;
uint64_t arena_bytes;
void* const* buffers;
char problem[200];
unsigned group_bytes;
std::vector<Word> words;
uint32_t left[2][32][32];  // what lanes leave for each other, by simdgroup and lane
unsigned side[32][32];     // which of the two a lane uses next, so that one meeting is enough

void complain(const char* what, uint64_t at) {
  if (!problem[0]) std::snprintf(problem, sizeof problem, "%s at %llu", what, (unsigned long long)at);
}
void check_shared(uint64_t at, unsigned size, bool writes) {
  const uint32_t me = emulator::current, round = emulator::of_block.round;
  for (uint64_t i = at / 4; i <= (at + size - 1) / 4 && i < words.size(); ++i) {
    Word& word = words[i];
    const bool fresh_write = word.writer != NOBODY && word.write_round == round;
    const bool fresh_read = word.reader != NOBODY && word.read_round == round;
    if (fresh_write && word.writer != me) complain("no barrier after a write of threadgroup memory", at);
    if (writes) {
      if (fresh_read && word.reader != me) complain("no barrier after a read of threadgroup memory", at);
      word.writer = me, word.write_round = round;
    } else {
      if (word.writer == NOBODY) complain("threadgroup memory is read before it is written", at);
      word.reader = fresh_read && word.reader != me ? SEVERAL : me, word.read_round = round;
    }
  }
}
void check(const void* address, unsigned size, bool writes) {
  const uint64_t at = (const char*)address - arena;
  if (at < arena_bytes) {
    if (at % size) complain("an access is not aligned", at);
    for (unsigned i = 0; i < size; ++i) {
      char& allowed = map[at + i];
      if (!(allowed & (writes ? WRITE : READ))) complain(writes ? "no byte to write" : "no byte to read", at);
      if (writes) allowed &= ~WRITE;
    }
    return;
  }
  const uint64_t shared_at = (const char*)address - emulator::shared.data();
  if (shared_at < group_bytes) check_shared(shared_at, size, writes);
}

}  // namespace

extern "C" {

#define CHECKED(SIZE)                                                      \
  void __tsan_read##SIZE(void* at) { check(at, SIZE, false); }             \
  void __tsan_write##SIZE(void* at) { check(at, SIZE, true); }             \
  void __tsan_unaligned_read##SIZE(void* at) { check(at, SIZE, false); }   \
  void __tsan_unaligned_write##SIZE(void* at) { check(at, SIZE, true); }
CHECKED(1)
CHECKED(2)
CHECKED(4)
CHECKED(8)
CHECKED(16)
void __tsan_init() {}

struct Position {
  Index group;
  unsigned in_group;
};
Position shim_position() { return {emulator::block, emulator::current}; }
void* shim_buffer(int index) { return buffers[index]; }
void* shim_threadgroup_memory(unsigned n_bytes) {
  if (n_bytes > emulator::shared.size()) complain("too much threadgroup memory", n_bytes);
  group_bytes = n_bytes;
  if (words.size() != n_bytes / 4) words.assign(n_bytes / 4, Word());
  return emulator::shared.data();
}
unsigned shim_exchange(unsigned x, unsigned lane) {
  const unsigned warp = emulator::warp(), own = emulator::lane(), now = side[warp][own];
  side[warp][own] ^= 1;
  left[now][warp][own] = x;
  emulator::meet_lanes(0xFFFFFFFFu);
  return left[now][warp][lane];
}
void shim_barrier() { emulator::meet(emulator::of_block, (int)emulator::fibers.size()); }

// Empty if nothing was wrong. `threads` is the grid, as MLX counts it, in groups of `group` x 1 x 1.
const char* shim_launch(void (*body)(), void* const* buffers_, char* arena_, char* map_, uint64_t n_bytes,
                        const unsigned* threads, unsigned group) {
  buffers = buffers_, arena = arena_, map = map_, arena_bytes = n_bytes;
  problem[0] = 0;
  static void (*run)();
  run = body;
  std::memset(side, 0, sizeof side);
  const bool done = emulator::launch({threads[0] / group, threads[1], threads[2]}, group, 32768, [] {
    if (emulator::current == 0) words.clear();
    run();
  });
  if (!done) complain("threads wait for others that do not come", 0);
  return problem;
}

}  // extern "C"
