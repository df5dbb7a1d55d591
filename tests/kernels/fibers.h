// Threads of a block as fibers of one thread that take turns, for kernels that run on a CPU.
//
// Where threads exchange something, or wait for each other, they meet: each goes on once all have
// arrived. Blocks run one after the other.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <deque>
#include <memory>
#include <vector>

struct Index {
  unsigned x, y, z;
};

namespace emulator {

constexpr int STACK_BYTES = 256 * 1024;

struct Meeting {
  int arrived = 0;
  unsigned round = 0;
};
struct Copy {
  unsigned to;       // in shared memory
  const void* from;
  int n, size;       // bytes that are read, and that are written: zeros behind what is read
};
struct Fiber {
  ucontext_t beginning;
  jmp_buf here;  // where one that has begun goes on, without the system calls of ucontext
  std::unique_ptr<char[]> stack;
  bool begun, done;
  std::deque<std::vector<Copy>> copies;  // groups that it has not waited for, and behind them an open one
};

inline std::vector<Fiber> fibers;
inline ucontext_t outside;
inline unsigned current;
inline Index thread, block, grid;
inline std::vector<char> shared;
inline Meeting of_block, of_lanes[32][32];  // by warp and lowest lane
inline unsigned idle;                       // turns in which no thread has got on
inline bool stuck;                          // no thread could get on

inline void resume(unsigned next) {
  Fiber& fiber = fibers[next];
  current = next, thread = {next, 0, 0};
  if (fiber.begun) _longjmp(fiber.here, 1);
  fiber.begun = true;
  setcontext(&fiber.beginning);
}
inline void take_turns() {
  for (unsigned i = 1; i < fibers.size(); ++i) {
    const unsigned next = (current + i) % fibers.size();
    if (fibers[next].done) continue;
    if (!_setjmp(fibers[current].here)) resume(next);
    return;
  }
}
inline void meet(Meeting& meeting, int n) {
  const unsigned round = meeting.round;
  idle = 0;
  if (++meeting.arrived == n) {
    meeting.arrived = 0;
    ++meeting.round;
    return;
  }
  while (meeting.round == round) {
    take_turns();
    if (++idle <= fibers.size()) continue;
    stuck = true;
    setcontext(&outside);
  }
}
inline unsigned warp() { return current / 32; }
inline unsigned lane() { return current % 32; }
inline void meet_lanes(unsigned mask) {
  meet(of_lanes[warp()][__builtin_ctz(mask)], __builtin_popcount(mask));
}

inline void (*work)();
inline void begin() {
  work();
  fibers[current].done = true;
  idle = 0;
  for (unsigned next = 0; next < fibers.size(); ++next)
    if (!fibers[next].done) resume(next);
  setcontext(&outside);
}
inline void run_block(unsigned n_threads) {
  fibers.resize(n_threads);
  for (Fiber& fiber : fibers) {
    if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
    fiber.begun = fiber.done = false;
    fiber.copies.assign(1, {});
    getcontext(&fiber.beginning);
    fiber.beginning.uc_stack = {fiber.stack.get(), 0, STACK_BYTES};
    makecontext(&fiber.beginning, begin, 0);
  }
  fibers[0].begun = true;
  current = 0, thread = {0, 0, 0};
  swapcontext(&outside, &fibers[0].beginning);
}
// False if threads could not go on.
inline bool launch(Index blocks, unsigned n_threads, unsigned shared_bytes, void (*body)()) {
  work = body, grid = blocks, stuck = false;
  of_block = Meeting();  // one that was stuck has left threads there
  for (auto& warp : of_lanes)
    for (Meeting& meeting : warp) meeting = Meeting();
  for (block.z = 0; block.z < grid.z; ++block.z)
    for (block.y = 0; block.y < grid.y; ++block.y)
      for (block.x = 0; block.x < grid.x; ++block.x) {
        shared.assign(shared_bytes, '\x7f');  // whatever was there before
        run_block(n_threads);
        if (stuck) return false;
      }
  return true;
}

}  // namespace emulator
