// The threads that share a pass: made once, they wait by spinning, then by giving their core away at every turn, and
// sleep when nothing comes for a while. Between two passes of a running decoder they stay awake on their own cores:
// a thread that sleeps is often woken on its waker's core, and then both take turns on one, for seconds. So a thread that
// finds another of its team on its core moves to a free one.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

constexpr int SPINS = 4000;                                // some microseconds
constexpr std::chrono::milliseconds AWAKE{3};              // longer than what lies between two passes
constexpr std::chrono::milliseconds SETTLED{20};           // how long a thread stays where it has moved to, crowded or not

static inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Waits until ready() without sleeping. A thread of another process that took a core then costs one time slice, where
// one that only spins costs one at every meeting.
template <class Ready>
static inline void await(Ready ready) {
  for (int turn = 0; !ready(); ++turn)
    if (turn > SPINS) sched_yield();
    else relax();
}

// Where the threads of a pass wait for each other.
class Meeting {
 public:
  explicit Meeting(int threads) : threads_(threads) {}
  void wait() {
    int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      await([&] { return phase_.load(std::memory_order_acquire) != phase; });
    }
  }

 private:
  const int threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

class Team {
 public:
  explicit Team(int threads) : threads_(threads), cores_(size_t(threads)) {
    for (auto& core : cores_) core.store(-1);
    for (int t = 1; t < threads; ++t) std::thread([this, t] { work(t); }).detach();
  }

  // Calls body(t) once on each thread t, the caller being thread 0, and returns when all have. One caller at a time.
  template <class Body>
  void run(Body body) {
    if (threads_ == 1) return body(0);
    std::lock_guard<std::mutex> alone(caller_);
    cores_[0].store(core(), std::memory_order_relaxed);
    argument_ = &body;
    call_ = [](void* argument, int t) { (*static_cast<Body*>(argument))(t); };
    busy_.store(threads_ - 1, std::memory_order_relaxed);
    job_.fetch_add(1);
    if (asleep_.load() > 0) {
      { std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    body(0);
    await([&] { return busy_.load(std::memory_order_acquire) == 0; });
  }

  // The process's team of this size. Never destroyed: its threads end with the process. A forked child gets its own.
  static Team& of(int threads) {
    static std::mutex mutex;
    static auto* teams = new std::map<std::pair<pid_t, int>, std::unique_ptr<Team>>;
    std::lock_guard<std::mutex> lock(mutex);
    auto& team = (*teams)[{getpid(), threads}];
    if (!team) team = std::make_unique<Team>(threads);
    return *team;
  }

 private:
  static int core() {
#ifdef __linux__
    return sched_getcpu();
#else
    return -1;
#endif
  }

  // Takes note of the thread's core, and moves it off one that the caller or a thread before it is on, where there is another.
  void part(int t, std::chrono::steady_clock::time_point& moved) {
    const int here = core();
    cores_[size_t(t)].store(here, std::memory_order_relaxed);
#ifdef __linux__
    bool crowded = false;
    for (int other = 0; other < t; ++other) crowded |= cores_[size_t(other)].load(std::memory_order_relaxed) == here;
    if (!crowded || std::chrono::steady_clock::now() - moved < SETTLED) return;
    moved = std::chrono::steady_clock::now();
    cpu_set_t allowed, free;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    free = allowed;
    for (int other = 0; other < t; ++other)
      if (const int core = cores_[size_t(other)].load(std::memory_order_relaxed); core >= 0) CPU_CLR(core, &free);
    if (!CPU_COUNT(&free) || sched_setaffinity(0, sizeof free, &free)) return;
    sched_setaffinity(0, sizeof allowed, &allowed);  // moved, and as free as before (or as before a change in between)
    cores_[size_t(t)].store(core(), std::memory_order_relaxed);
#endif
  }

  void work(int t) {
    std::chrono::steady_clock::time_point moved{};
    for (uint64_t done = 0;;) {
      const auto until = std::chrono::steady_clock::now() + AWAKE;
      bool called = false;
      for (int turn = 0; !(called = job_.load() != done) && (turn <= SPINS || std::chrono::steady_clock::now() < until); ++turn)
        if (turn > SPINS) sched_yield();
        else relax();
      if (!called) {
        std::unique_lock<std::mutex> lock(sleep_);
        asleep_.fetch_add(1);
        wake_.wait(lock, [&] { return job_.load() != done; });
        asleep_.fetch_sub(1);
      }
      part(t, moved);
      ++done;  // a caller waits for its job, so jobs come one by one
      call_(argument_, t);
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int threads_;
  std::vector<std::atomic<int>> cores_;  // that the threads were on last; -1 where that is not known
  std::mutex caller_, sleep_;
  std::condition_variable wake_;
  void* argument_ = nullptr;
  void (*call_)(void*, int) = nullptr;
  alignas(64) std::atomic<uint64_t> job_{0};
  alignas(64) std::atomic<int> busy_{0};
  alignas(64) std::atomic<int> asleep_{0};
};
