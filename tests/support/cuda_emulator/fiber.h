// A fiber: a function with a stack of its own, which stops in the middle and goes on later. A context (POSIX) starts it,
// and jumps take it from there, because they spare the system calls of `swapcontext`.
#pragma once
#include <setjmp.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <new>

namespace emulator {

class Fiber {
 public:
  static constexpr size_t STACK = 128 << 10;

  // Not from the heap, which hundreds of thousands of stacks in a run of the tests let grow beyond what may be forked.
  Fiber()
      : stack_((char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (stack_ == MAP_FAILED) throw std::bad_alloc();
    memset(stack_, UNTOUCHED, MARGIN);
  }
  ~Fiber() { munmap(stack_, STACK); }
  Fiber(const Fiber&) = delete;

  // Whether the function needed more than its stack, which grows downwards; what lay below is then damaged.
  bool overflown() const {
    for (size_t i = 0; i < MARGIN; ++i)
      if (stack_[i] != UNTOUCHED) return true;
    return false;
  }
  bool owns(const void* p) const { return (size_t)((const char*)p - stack_) < STACK; }

  // From outside: this runs the fiber from where it stopped, or begins `run(argument)`, until it stops.
  void resume(void (*run)(void*), void* argument) {
    if (_setjmp(outside_)) return;
    if (started_) _longjmp(inside_, 1);
    started_ = true;
    run_ = run;
    argument_ = argument;
    beginning() = this;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack_;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, begin, 0);
    setcontext(&context);
  }
  // From inside.
  void stop() {
    if (!_setjmp(inside_)) _longjmp(outside_, 1);
  }

 private:
  static constexpr size_t MARGIN = 64;
  static constexpr char UNTOUCHED = 0x5a;

  static Fiber*& beginning() {
    static Fiber* fiber;
    return fiber;
  }
  static void begin() {
    Fiber* fiber = beginning();
    fiber->run_(fiber->argument_);  // It never returns.
    abort();
  }

  char* stack_;
  bool started_ = false;
  void (*run_)(void*);
  void* argument_;
  jmp_buf inside_, outside_;
};

}  // namespace emulator
